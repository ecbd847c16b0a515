"""CompressionMonitor: what reaches loggers and the progress bar."""

import contextlib
import io
import math
import re
import time
from functools import partial

import pytest
import torch
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import RichProgressBar, TQDMProgressBar
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from tensorboard.plugins.custom_scalar import layout_pb2
from torch.utils.data import DataLoader

from lightning_sparse import AdamCorrection, LocalSteps, SparseDDPStrategy
from lightning_sparse.callbacks import CompressionMonitor
from lightning_sparse.callbacks.compression_monitor import batch_size
from lightning_sparse.compressors import A2SGD
from tests.helpers.loggers import events_of, rows_of
from tests.helpers.statistics import MEASURED, STATS
from tests.helpers.trainers import Adversaries, Late, Rows, Small, WithAdam, make_trainer, run_fit

TAGS = {f"sparse/{name}" for name in STATS | MEASURED}
STEPS = [3, 7, 11, 15]
NAMES = [name for name, _ in Small().named_parameters()]
BY_PARAMETER = ["density", "gradient_norm", "residual_norm", "residual_to_gradient"]
EVERYTHING = {"progress_bar": True, "by_parameter": True}


def fit_monitored(rank, directory, monitor=None, strategy=None, module=Small, **arguments):
    """Fit with two loggers; return what the progress bar was given."""
    settings = {
        "logger": [TensorBoardLogger(directory, name="", version=""), CSVLogger(directory, name="rows", version="")],
        "log_every_n_steps": 4,
        "callbacks": [CompressionMonitor(**(monitor or {}))],
        **arguments,
    }
    trainer = run_fit(rank, SparseDDPStrategy(**(strategy or {"density": 0.01})), module(), **settings)
    return {name: float(value) for name, value in trainer.progress_bar_metrics.items()}


@pytest.fixture
def fitted(pair, tmp_path):
    """Return a function that fits on two ranks as :func:`fit_monitored` does."""
    return lambda **arguments: pair.run(partial(fit_monitored, directory=str(tmp_path), **arguments))


def test_scalars_reach_any_logger(fitted, tmp_path):
    shown, _ = fitted()
    assert not {"compression", "exposed_ms"} & shown.keys()
    rows = rows_of(tmp_path / "rows", "sparse/wire_bytes")
    assert [int(row["step"]) for row in rows] == STEPS
    assert rows[0].keys() >= TAGS
    for row in rows:
        assert float(row["sparse/compression_ratio"]) > 10
        assert float(row["sparse/backward_seconds"]) > 0
        assert float(row["sparse/residual_to_gradient"]) > 0
        # Two ranks, four rows in a batch.
        samples = float(row["sparse/samples_per_second"]) * float(row["sparse/step_seconds"])
        assert samples == pytest.approx(8)


def test_everything_reaches_tensorboard(fitted, tmp_path):
    fitted(monitor=EVERYTHING)
    events = events_of(tmp_path)
    assert set(events.Tags()["scalars"]) >= TAGS | {
        f"sparse_parameters/{each}/{name}" for each in BY_PARAMETER for name in NAMES
    }
    assert [event.step for event in events.Scalars("sparse/density")] == STEPS
    for name, parameter in Small().named_parameters():
        density = events.Scalars(f"sparse_parameters/density/{name}")[-1].value
        assert density == pytest.approx(max(1, round(0.01 * parameter.numel())) / parameter.numel())
        ratio = events.Scalars(f"sparse_parameters/residual_to_gradient/{name}")[-1].value
        norms = [events.Scalars(f"sparse_parameters/{kind}_norm/{name}")[-1].value for kind in ("residual", "gradient")]
        assert ratio == pytest.approx(norms[0] / norms[1], rel=1e-4)


def test_the_page_opens_sorted_and_says_what_is_planned(fitted, tmp_path):
    fitted(max_epochs=6)
    events = events_of(tmp_path)
    layout = layout_pb2.Layout()
    layout.ParseFromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    charts = {chart.title: list(chart.multiline.tag) for category in layout.category for chart in category.chart}
    assert charts["Exposed exchange, seconds"] == ["sparse/exposed_seconds$"]
    assert charts["Density, log10 of the fraction of elements"] == ["sparse/log10_density$"]
    logarithms = [math.log10(event.value) for event in events.Scalars("sparse/density")]
    assert [event.value for event in events.Scalars("sparse/log10_density")] == pytest.approx(logarithms, rel=1e-4)
    # With several runs, a chart of several statistics is unreadable: its lines have the colours of runs, and no names.
    assert all(len(patterns) == 1 for patterns in charts.values())
    tags = events.Tags()["scalars"]
    assert all(any(re.match(pattern, tag) for tag in tags) for patterns in charts.values() for pattern in patterns)
    first, *later = events.Tensors("sparse/plan/text_summary")
    assert first.step == 3
    assert "Groups are not planned" in first.tensor_proto.string_val[0].decode()
    text = later[-1].tensor_proto.string_val[0].decode()  # the trials have ended
    assert "compressor: TopK" in text
    assert "backward and exchange, measured:" in text
    assert "`network." in text


class Dawdling(Callback):
    """Let exchanges of one rank wait for their turn, now and then."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == batch_idx % 2:
            trainer.strategy.engine.worker.submit(lambda: time.sleep(0.1))


def fit_dawdling(rank, overlap_steps, directory):
    """Fit with exchanges that travel for some steps; return the steps in which ranks looked together."""
    strategy = SparseDDPStrategy(density=0.1, local_steps=LocalSteps(4, overlap_steps=overlap_steps))
    looked = []
    monitor = CompressionMonitor()
    log = monitor._log_plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitor, "_log_plan", lambda *told: (looked.append(told[-1]), log(*told)))
        logger = CSVLogger(directory, name="", version="")
        run_fit(rank, strategy, logger=logger, log_every_n_steps=1, callbacks=[monitor, Dawdling()])
    return looked


@pytest.mark.parametrize("overlap_steps", [2, 3])
def test_ranks_look_together_however_late_an_exchange_is(pair, tmp_path, overlap_steps):
    first, second = pair.run(fit_dawdling, overlap_steps, str(tmp_path))
    assert first == second
    assert len(first) > 8


@pytest.mark.parametrize("bar", ["tqdm", "rich"], ids=lambda bar: f"{bar} progress bar")
def test_a_progress_bar_shows_ratio_and_exposed_time(pair, bar):
    pytest.importorskip(bar)
    (printed, shown), _ = pair.run(fit_with_bar, bar)
    assert shown["compression"] > 10
    assert shown["exposed_ms"] > 0
    assert re.search(r"compression[:=]\s*\d\d", printed), printed[-2000:]
    assert re.search(r"exposed_ms[:=]\s*\d", printed), printed[-2000:]


def fit_with_bar(rank, bar):
    """Fit with a progress bar; return what it printed, and what it was given."""
    callbacks = [{"tqdm": TQDMProgressBar, "rich": RichProgressBar}[bar](), CompressionMonitor(progress_bar=True)]
    arguments = {"log_every_n_steps": 4, "enable_progress_bar": True}
    screen = io.StringIO()
    with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
        trainer = run_fit(rank, SparseDDPStrategy(density=0.01), callbacks=callbacks, **arguments)
    return screen.getvalue(), {name: float(value) for name, value in trainer.progress_bar_metrics.items()}


class Notes(Callback):
    def __init__(self):
        self.stats = []

    def on_train_batch_end(self, trainer, *arguments):
        self.stats.append(trainer.strategy.compression_stats())


def fit_noted(rank, directory, strategy, module, monitor):
    notes = Notes()
    fit_monitored(rank, directory, None, strategy, module, callbacks=[CompressionMonitor(**monitor), notes])
    return notes.stats


def test_logged_are_means_over_ranks_and_steps_and_what_the_slowest_has_exposed(pair, tmp_path):
    # A method whose ranks send differently much.
    noted = pair.run(fit_noted, str(tmp_path), {"compressor": "exdyna", "density": 0.05}, Small, {})

    def means(name, step):
        return [sum(each[name] for each in rank[step - 3 : step + 1]) / 4 for rank in noted]

    densities = [each["density"] for each in noted[0]]
    assert max(densities) > 1.2 * min(densities)  # else a single step would do
    for step, row in zip(STEPS, rows_of(tmp_path / "rows", "sparse/wire_bytes")):
        for name in ("density", "wire_bytes", "select_seconds", "exchange_seconds"):
            assert float(row[f"sparse/{name}"]) == pytest.approx(sum(means(name, step)) / 2), name
        total = sum(rank[step]["total_wire_bytes"] for rank in noted) / 2
        assert float(row["sparse/total_wire_bytes"]) == pytest.approx(total)
        first, second = means("exposed_seconds", step)
        assert float(row["sparse/exposed_seconds"]) == pytest.approx(max(first, second))
        assert first != second


def test_steps_of_plain_ddp_are_logged_as_far_as_they_are_known(pair, tmp_path):
    strategy = {"density": 0.01, "optimizer_correction": AdamCorrection(dense_steps=6, fall_steps=0)}
    noted, _ = pair.run(fit_noted, str(tmp_path), strategy, WithAdam, EVERYTHING)
    first, second, *_ = rows = rows_of(tmp_path / "rows", "sparse/wire_bytes")
    assert [int(row["step"]) for row in rows] == STEPS
    known = {"density": 1, "compression_ratio": 1, "total_compression_ratio": 1, "wire_bytes": noted[0]["dense_bytes"]}
    assert {name: float(first[f"sparse/{name}"]) for name in known} == pytest.approx(known)
    assert float(first["sparse/samples_per_second"]) > 0
    assert not any(first[f"sparse/{name}"] for name in ("exposed_seconds", "exchange_seconds", "backward_seconds"))
    # Two steps of DDP and two sparse ones: bytes are the mean of all four, times those of the latter.
    for name in ("wire_bytes", "density"):
        assert float(second[f"sparse/{name}"]) == pytest.approx(sum(each[name] for each in noted[4:8]) / 4, rel=1e-3)
    assert 0.4 < float(second["sparse/density"]) < 0.6
    assert float(second["sparse/exposed_seconds"]) > 0
    charts = events_of(tmp_path).Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    assert b"sparse/exposed_seconds$" in charts


@pytest.mark.parametrize("losses", [1, 3])
def test_all_that_a_step_of_several_backwards_sends_is_counted(fitted, tmp_path, losses):
    fitted(strategy={"density": 0.05}, module=partial(Adversaries, losses))
    rows = rows_of(tmp_path / "rows", "sparse/wire_bytes")
    assert [float(row["sparse/total_steps"]) for row in rows] == [8, 16, 24, 32]
    for before, row in zip([dict.fromkeys(rows[0], 0), *rows], rows):
        for name in ("wire_bytes", "dense_bytes"):
            sent = float(row[f"sparse/total_{name}"]) - float(before[f"sparse/total_{name}"])
            assert float(row[f"sparse/{name}"]) == pytest.approx(sent / 8), name
    sent = [float(row["sparse/wire_bytes"]) for row in rows]
    assert sent == pytest.approx([sent[0]] * len(sent))


class Noting(Adversaries):
    """It notes the norm of the gradient of each parameter, of its own network and the other, from outside."""

    def training_step(self, batch, batch_index):
        self.norms = {}
        for module, name in ((self.network, "network"), (self.other, "other")):
            gradients = torch.autograd.grad(module(batch).square().mean(), list(module.parameters()))
            for (parameter, _), gradient in zip(module.named_parameters(), gradients):
                self.norms[f"{name}.{parameter}"] = float(gradient.norm())
            # The second network sees no change of the first, whose optimizer steps first.
        super().training_step(batch, batch_index)


class Norms(Callback):
    def __init__(self):
        self.norms = []

    def on_train_batch_end(self, trainer, pl_module, *batch):
        self.norms.append(pl_module.norms)


def fit_adversaries(rank, directory):
    norms = Norms()
    arguments = {"monitor": None, "strategy": {"density": 0.05, "schedule": "single"}, "module": Noting}
    fit_monitored(rank, directory, callbacks=[CompressionMonitor(by_parameter=True), norms], **arguments)
    return norms.norms


def test_parameters_of_several_optimizers_are_those_of_the_backward_that_uses_them(pair, tmp_path):
    ranks = pair.run(fit_adversaries, str(tmp_path))
    for step, row in zip(STEPS, rows_of(tmp_path / "rows", "sparse/wire_bytes")):
        for name in ranks[0][step]:
            expected = math.sqrt(sum(norms[step][name] ** 2 for norms in ranks) / 2)
            assert float(row[f"sparse_parameters/gradient_norm/{name}"]) == pytest.approx(expected, rel=1e-4)
            assert 0 < float(row[f"sparse_parameters/residual_to_gradient/{name}"]) < math.inf


class Alike(Small):
    """A model with the same batches on all ranks."""

    def train_dataloader(self):
        return DataLoader(Rows(16), batch_size=4)


@pytest.mark.parametrize("levels", [1, 2])
def test_norms_are_those_of_whole_parameters_whoever_has_a_part_of_them(pools, tmp_path, levels):
    model, batch = Alike(), next(iter(Alike().train_dataloader()))
    (model.network(batch) - batch).square().mean().backward()
    arguments = {"monitor": EVERYTHING, "module": Alike, "use_distributed_sampler": False, "node_ranks": 2}
    strategy = {"density": 0.05, "levels": levels}
    pools[4].run(partial(fit_monitored, directory=str(tmp_path), strategy=strategy, log_every_n_steps=1, **arguments))
    row = rows_of(tmp_path / "rows", "sparse/wire_bytes")[0]
    for name, parameter in model.named_parameters():
        norm = float(parameter.grad.norm())
        assert float(row[f"sparse_parameters/gradient_norm/{name}"]) == pytest.approx(norm, rel=1e-4)
        assert 0.5 * norm < float(row[f"sparse_parameters/residual_norm/{name}"]) < norm


class Freezing(WithAdam):
    """It freezes a layer in the midst of training, with updates that wait."""

    def on_train_batch_start(self, batch, batch_index):
        self.network[0].requires_grad_(batch_index < 9)


def test_a_frozen_layer_takes_part_in_no_error_of_updates(fitted, tmp_path):
    correction = AdamCorrection(dense_steps=2, fall_steps=0)
    fitted(monitor=EVERYTHING, strategy={"density": 0.05, "optimizer_correction": correction}, module=Freezing)
    rows = rows_of(tmp_path / "rows", "sparse/update_error")
    assert [int(row["step"]) for row in rows] == STEPS
    assert all(0 < float(row["sparse/update_error"]) < math.inf for row in rows)


class AdamAdversaries(Adversaries):
    def configure_optimizers(self):
        return [torch.optim.Adam(each.parameters()) for each in (self.network, self.other)]


def test_the_error_of_updates_is_that_of_all_optimizers_of_a_batch(fitted, tmp_path):
    correction = AdamCorrection(dense_steps=2, fall_steps=0)
    fitted(monitor=EVERYTHING, strategy={"density": 0.05, "optimizer_correction": correction}, module=AdamAdversaries)
    *_, row = rows_of(tmp_path / "rows", "sparse/update_error")
    errors = [float(row[f"sparse_parameters/update_error/{name}"]) for name, _ in Adversaries().named_parameters()]
    assert 0.95 * min(errors) < float(row["sparse/update_error"]) < 1.05 * max(errors)  # of ranks' own, a mean of them


class LateGradients(Small):
    """A model whose backward takes time before any gradient is ready."""

    def training_step(self, batch, batch_index):
        return (Late.apply(self.network(batch), 0.05) - batch).square().mean()


def test_backward_takes_time_before_its_first_gradient(fitted, tmp_path):
    fitted(module=LateGradients)
    for row in rows_of(tmp_path / "rows", "sparse/wire_bytes"):
        assert 0.05 <= float(row["sparse/backward_seconds"]) < float(row["sparse/step_seconds"])


def test_rounds_of_local_steps_see_no_backward(fitted, tmp_path):
    fitted(strategy={"density": 0.05, "local_steps": 2}, module=LateGradients)
    rows = rows_of(tmp_path / "rows", "sparse/wire_bytes")
    assert len(rows) == 4
    assert "sparse/backward_seconds" not in rows[0]
    assert float(rows[0]["sparse/commit_seconds"]) > 0


class Unsized(Small):
    """A model whose batches do not tell their size."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [batch, torch.zeros(7)]

    def training_step(self, batch, batch_index):
        return super().training_step(batch[0], batch_index)


def test_batches_of_unknown_size_leave_throughput_out(fitted, tmp_path):
    fitted(module=Unsized, limit_val_batches=0)
    rows = rows_of(tmp_path / "rows", "sparse/wire_bytes")
    assert len(rows) == 4
    assert "sparse/samples_per_second" not in rows[0]
    assert float(rows[0]["sparse/step_seconds"]) > 0


def test_a_batch_has_the_size_that_its_tensors_share():
    assert batch_size([torch.zeros(3, 2), {"label": torch.zeros(3), "weight": torch.tensor(1.0)}]) == 3
    assert math.isnan(batch_size([torch.zeros(3), torch.zeros(4)]))
    assert math.isnan(batch_size("text"))


@pytest.mark.parametrize("accumulate", [2, 4])
def test_a_step_of_several_batches_is_logged_once(fitted, tmp_path, accumulate):
    fitted(accumulate_grad_batches=accumulate, log_every_n_steps=2)
    rows = rows_of(tmp_path / "rows", "sparse/wire_bytes")
    assert [int(row["step"]) for row in rows] == list(range(1, 16 // accumulate, 2))
    for row in rows:
        samples = float(row["sparse/samples_per_second"]) * float(row["sparse/step_seconds"])
        assert samples == pytest.approx(8 * accumulate)


def warnings_of(rank):
    trainer = make_trainer(rank, SparseDDPStrategy(), logger=False, callbacks=[CompressionMonitor()])
    if rank > 0:
        trainer.fit(Small())
        return []
    with pytest.warns(UserWarning, match="CompressionMonitor") as caught:
        trainer.fit(Small())
    return [str(each.message) for each in caught if "CompressionMonitor" in str(each.message)]


def test_what_cannot_be_shown_is_said(pair):
    (warning,), _ = pair.run(warnings_of)
    assert "logger" in warning


def test_one_process_has_nothing_to_log(forked, tmp_path):
    forked[1].run(fit_monitored, str(tmp_path))
    assert "sparse/" not in (tmp_path / "rows" / "metrics.csv").read_text()


class LateAverages(Callback):
    """Have each exchange after an optimizer's step wait."""

    def on_before_optimizer_step(self, trainer, *arguments):
        if trainer.global_step % 4 == 3:
            trainer.strategy.engine.worker.submit(lambda: time.sleep(0.1))


def fit_averaging(rank):
    notes = Notes()
    strategy = SparseDDPStrategy(A2SGD(param_sync_every=4), schedule="single")
    run_fit(rank, strategy, callbacks=[LateAverages(), notes], limit_val_batches=0, limit_train_batches=8)
    return notes.stats


def test_averages_of_replicas_are_exposed(pair):
    for stats in pair.run(fit_averaging):
        for averaged in stats[3::4]:
            assert averaged["exposed_seconds"] > 0.09
            assert averaged["exchange_seconds"] > 0.09
        assert stats[-1]["exposed_share"] > 0.1


class LongValidation(Small):
    """A model whose validation takes longer than its training."""

    def on_validation_start(self):
        time.sleep(1.2)

    def train_dataloader(self):
        return DataLoader(Rows(32), batch_size=4)


class Slow(Small):
    """A model whose batches take a while."""

    def training_step(self, batch, batch_index):
        time.sleep(0.1)
        return super().training_step(batch, batch_index)


class Exposing(Callback):
    """Have each exchange wait."""

    def on_before_backward(self, trainer, *arguments):
        if trainer.fit_loop.batch_idx % 4 == 3:
            trainer.strategy.engine.worker.submit(lambda: time.sleep(0.2))


def test_batches_before_a_validation_in_the_midst_of_a_step_count_as_training(pair):
    often = {"val_check_interval": 1, "limit_val_batches": 1, "accumulate_grad_batches": 4, "limit_train_batches": 8}
    for share in pair.run(partial(exposed_share, module=Slow, callbacks=[Exposing()], **often)):
        assert 0.1 < share < 0.3  # 0.2 s, of 1 s; the first step's exchange begins late enough to wait for nothing


def exposed_share(rank, module, **arguments):
    trainer = run_fit(rank, SparseDDPStrategy(density=0.05, schedule="single"), module(), **arguments)
    return trainer.strategy.compression_stats()["exposed_share"]


def test_validation_does_not_count_as_training(fitted, tmp_path):
    fitted(module=LongValidation, num_sanity_val_steps=0, max_epochs=2)
    assert all(float(row["sparse/step_seconds"]) < 0.3 for row in rows_of(tmp_path / "rows", "sparse/wire_bytes")[1:])
