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

from lightning_sparse import AdamCorrection, SparseDDPStrategy
from lightning_sparse.callbacks import CompressionMonitor
from lightning_sparse.compressors import A2SGD
from tests.helpers.fits import fits
from tests.helpers.loggers import events_of, rows_of
from tests.helpers.pages import DOCS
from tests.helpers.statistics import MEASURED, STATS
from tests.helpers.trainers import Adversaries, Rows, Small, WithAdam, run_fit, with_optimizer

TAGS = {f"sparse/{name}" for name in STATS | MEASURED}
STEPS = [3, 7, 11, 15]
BYTES = ("wire_bytes", "dense_bytes")
NAMES = [name for name, _ in Small().named_parameters()]
BY_PARAMETER = ["density", "gradient_norm", "residual_norm", "residual_to_gradient"]
SPARSE, EVERYTHING = {"density": 0.01}, {"progress_bar": True, "by_parameter": True}


@pytest.fixture
def fitted(pair, tmp_path):
    def fit(strategy=SPARSE, module=Small, pool=pair, monitor=(), callbacks=(), **arguments):
        loggers = [TensorBoardLogger(tmp_path, name="", version=""), CSVLogger(tmp_path, name="rows", version="")]
        callbacks = [CompressionMonitor(**dict(monitor)), *callbacks]
        more = {"max_epochs": 1, "limit_train_batches": 16, "log_every_n_steps": 4, **arguments}
        return fits(pool, module, {"compressor": "topk", **strategy}, callbacks=callbacks, logger=loggers, **more)

    return fit


class Shown(Small):
    def on_train_end(self):
        self.notes = set(self.trainer.progress_bar_metrics)


def test_everything_reaches_any_logger(fitted, tmp_path):
    shown, _ = fitted(module=Shown, monitor={"by_parameter": True})
    assert not {"compression", "exposed_ms"} & shown.notes
    rows, events = rows_of(tmp_path / "rows", "sparse/wire_bytes"), events_of(tmp_path)
    assert [int(row["step"]) for row in rows] == [event.step for event in events.Scalars("sparse/density")] == STEPS
    tags = TAGS | {f"sparse_parameters/{each}/{name}" for each in BY_PARAMETER for name in NAMES}
    assert rows[0].keys() >= tags
    assert set(events.Tags()["scalars"]) >= tags
    for row in rows:
        assert float(row["sparse/compression_ratio"]) > 10
    for name, parameter in Small().named_parameters():
        by_name = {kind: float(row[f"sparse_parameters/{kind}/{name}"]) for kind in BY_PARAMETER}
        assert by_name["density"] == pytest.approx(max(1, round(0.01 * parameter.numel())) / parameter.numel())
        ratio = by_name["residual_norm"] / by_name["gradient_norm"]
        assert by_name["residual_to_gradient"] == pytest.approx(ratio, rel=1e-4)


def test_the_page_opens_sorted(fitted, tmp_path):
    fitted(max_epochs=6)
    events = events_of(tmp_path)
    layout = layout_pb2.Layout()
    layout.ParseFromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    charts = {chart.title: list(chart.multiline.tag) for category in layout.category for chart in category.chart}
    assert charts["Exposed exchange, seconds"] == ["sparse/exposed_seconds$"]
    assert charts["Density, log10 of the fraction of elements"] == ["sparse/log10_density$"]
    logarithms = [math.log10(event.value) for event in events.Scalars("sparse/density")]
    assert [event.value for event in events.Scalars("sparse/log10_density")] == pytest.approx(logarithms, rel=1e-4)
    # A chart of several statistics is unreadable with several runs, because colors then show runs.
    assert all(len(patterns) == 1 for patterns in charts.values())
    tags = events.Tags()["scalars"]
    assert all(any(re.match(pattern, tag) for tag in tags) for patterns in charts.values() for pattern in patterns)


class Dawdling(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == batch_idx % 2:
            trainer.strategy.engine.worker.submit(lambda: time.sleep(0.1))


def fit_dawdling(rank, directory):
    logger = CSVLogger(directory, name=str(rank), version="")
    callbacks, looked = [CompressionMonitor(), Dawdling()], []
    with pytest.MonkeyPatch.context() as patch:
        log = "lightning_sparse.callbacks.compression_monitor.log_scalars"
        patch.setattr(log, lambda trainer, scalars, step: looked.append(step))
        strategy = SparseDDPStrategy(density=0.1, local_steps=2)
        run_fit(rank, strategy, logger=logger, log_every_n_steps=1, callbacks=callbacks)
    return looked


def test_ranks_look_together_however_late_an_exchange_is(pair, tmp_path):
    first, second = pair.run(fit_dawdling, str(tmp_path))
    assert first == second
    assert len(first) == 8


@pytest.mark.parametrize("bar", ["tqdm", "rich"], ids=lambda bar: f"{bar} progress bar")
def test_a_progress_bar_shows_ratio_and_exposed_time(pair, bar):
    pytest.importorskip(bar)
    (printed, shown), _ = pair.run(fit_with_bar, bar)
    assert shown["compression"] > 10
    assert shown["exposed_ms"] > 0
    assert re.search(r"compression[:=]\s*\d\d", printed), printed[-2000:]
    assert re.search(r"exposed_ms[:=]\s*\d", printed), printed[-2000:]


def fit_with_bar(rank, bar):
    callbacks = [{"tqdm": TQDMProgressBar, "rich": RichProgressBar}[bar](), CompressionMonitor(progress_bar=True)]
    arguments = {"log_every_n_steps": 4, "enable_progress_bar": True}
    screen = io.StringIO()
    with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
        trainer = run_fit(rank, SparseDDPStrategy(density=0.01), callbacks=callbacks, **arguments)
    return screen.getvalue(), {name: float(value) for name, value in trainer.progress_bar_metrics.items()}


def test_logged_are_means_over_ranks_and_steps_and_what_the_slowest_has_exposed(fitted, tmp_path):
    noted = [each.stats for each in fitted({"compressor": "exdyna", "density": 0.05})]

    def means(name, step):
        return [sum(each[name] for each in rank[step - 3 : step + 1]) / 4 for rank in noted]

    densities = [each["density"] for each in noted[0]]
    assert max(densities) > 1.2 * min(densities)  # one step is not enough
    for step, row in zip(STEPS, rows_of(tmp_path / "rows", "sparse/wire_bytes")):
        for name in ("density", "wire_bytes", "select_seconds", "exchange_seconds"):
            assert float(row[f"sparse/{name}"]) == pytest.approx(sum(means(name, step)) / 2), name
        total = sum(rank[step]["total_wire_bytes"] for rank in noted) / 2
        assert float(row["sparse/total_wire_bytes"]) == pytest.approx(total)
        first, second = means("exposed_seconds", step)
        assert float(row["sparse/exposed_seconds"]) == pytest.approx(max(first, second))
        assert first != second


def test_steps_of_plain_ddp_are_logged_as_far_as_they_are_known(fitted, tmp_path):
    strategy = {"density": 0.01, "optimizer_correction": AdamCorrection(warmup_steps=6, density_decay_steps=0)}
    noted = fitted(strategy, WithAdam, monitor=EVERYTHING)[0].stats
    first, second, *_ = rows = rows_of(tmp_path / "rows", "sparse/wire_bytes")
    assert [int(row["step"]) for row in rows] == STEPS
    known = {"density": 1, "compression_ratio": 1, "total_compression_ratio": 1, "wire_bytes": noted[0]["dense_bytes"]}
    assert {name: float(first[f"sparse/{name}"]) for name in known} == pytest.approx(known)
    assert not any(first[f"sparse/{name}"] for name in ("exposed_seconds", "exchange_seconds", "backward_seconds"))
    # Two DDP steps and two sparse steps: bytes are a mean over all, the other values over sparse steps.
    for name in ("wire_bytes", "density"):
        assert float(second[f"sparse/{name}"]) == pytest.approx(sum(each[name] for each in noted[4:8]) / 4, rel=1e-3)
    assert 0.4 < float(second["sparse/density"]) < 0.6
    assert float(second["sparse/exposed_seconds"]) > 0
    charts = events_of(tmp_path).Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    assert b"sparse/exposed_seconds$" in charts


class Alike(Small):
    def train_dataloader(self):
        return DataLoader(Rows(16), batch_size=4)


@pytest.mark.parametrize("levels", [1, 2])
def test_norms_are_those_of_whole_parameters_whoever_has_a_part_of_them(pools, fitted, tmp_path, levels):
    model, batch = Alike(), next(iter(Alike().train_dataloader()))
    (model.network(batch) - batch).square().mean().backward()
    arguments = {"use_distributed_sampler": False, "local_world_size": 2, "log_every_n_steps": 1}
    fitted({"density": 0.05, "levels": levels}, Alike, pools[4], EVERYTHING, limit_train_batches=4, **arguments)
    row = rows_of(tmp_path / "rows", "sparse/wire_bytes")[0]
    for name, parameter in model.named_parameters():
        norm = float(parameter.grad.norm())
        assert float(row[f"sparse_parameters/gradient_norm/{name}"]) == pytest.approx(norm, rel=1e-4)
        assert 0.5 * norm < float(row[f"sparse_parameters/residual_norm/{name}"]) < norm


class Freezing(Adversaries):
    def on_train_batch_start(self, batch, batch_index):
        self.network[0].requires_grad_(batch_index < 9)

    def configure_optimizers(self):
        return [torch.optim.Adam(each.parameters()) for each in (self.network, self.other)]


def test_the_error_of_updates_is_that_of_all_optimizers_of_a_batch_without_frozen_layers(fitted, tmp_path):
    correction = AdamCorrection(warmup_steps=2, density_decay_steps=0)
    fitted({"density": 0.05, "optimizer_correction": correction}, Freezing, monitor=EVERYTHING)
    rows = rows_of(tmp_path / "rows", "sparse/update_error")
    assert [int(row["step"]) for row in rows] == STEPS
    for row in rows:
        of_parameters = [row[name] for name in row if name.startswith("sparse_parameters/update_error/")]
        errors = [error for each in of_parameters if each and not math.isnan(error := float(each))]
        assert len(errors) == (6 if int(row["step"]) < 9 else 4)
        assert 0.95 * min(errors) < float(row["sparse/update_error"]) < 1.05 * max(errors)  # mean over ranks


class LateGradients(Small):
    def training_step(self, batch, batch_index):
        output = self.network(batch)
        output.register_hook(lambda gradient: time.sleep(0.05))
        return (output - batch).square().mean()


def test_backward_takes_time_before_its_first_gradient(fitted, tmp_path):
    fitted(module=LateGradients)
    for row in rows_of(tmp_path / "rows", "sparse/wire_bytes"):
        assert 0.05 <= float(row["sparse/backward_seconds"]) < float(row["sparse/step_seconds"])


class LateAverages(Callback):
    def on_before_optimizer_step(self, trainer, *arguments):
        if trainer.global_step % 4 == 3:
            trainer.strategy.engine.worker.submit(lambda: time.sleep(0.1))


def test_averages_of_replicas_are_exposed(fitted):
    strategy = {"compressor": A2SGD(param_sync_every=4), "schedule": "single"}
    for stats in (each.stats for each in fitted(strategy, callbacks=[LateAverages()], limit_train_batches=8)):
        for averaged in stats[3::4]:
            assert averaged["exposed_seconds"] > 0.09
        assert stats[-1]["exposed_share"] > 0.1


class LongValidation(Small):
    def on_validation_start(self):
        time.sleep(1.2)

    def train_dataloader(self):
        return DataLoader(Rows(32), batch_size=4)


def test_validation_does_not_count_as_training(fitted, tmp_path):
    fitted(module=LongValidation, num_sanity_val_steps=0, limit_val_batches=1, limit_train_batches=4, max_epochs=2)
    assert all(float(row["sparse/step_seconds"]) < 0.3 for row in rows_of(tmp_path / "rows", "sparse/wire_bytes")[1:])


class Often(Small):
    def __init__(self, backwards=1):
        super().__init__()
        self.automatic_optimization = backwards == 1
        self.backwards = backwards

    def training_step(self, batch, batch_index):
        if self.automatic_optimization:
            return super().training_step(batch, batch_index)
        for _ in range(self.backwards):
            self.manual_backward(self.network(batch).square().mean())
        self.optimizers().step()
        return self.optimizers().zero_grad()


class LateAtEnd(Callback):
    """Delay the last exchange far beyond a step."""

    def on_train_batch_start(self, trainer, *arguments):
        if trainer.is_last_batch:
            trainer.strategy.engine.worker.submit(lambda: time.sleep(0.5))


TWICE = partial(Often, 2)
DENSE_FIRST = {"optimizer_correction": AdamCorrection(warmup_steps=6, density_decay_steps=0)}
ALL = ("topk", "lags", "omgs", "exdyna", "dgc", "sdagc", "a2sgd", "qsgd", "micro", "dense")
STRATEGIES = {
    **{name: ({"compressor": name}, Often, {}) for name in ALL},
    **{f"{name}, two backwards": ({"compressor": name}, TWICE, {}) for name in ("topk", "exdyna", "a2sgd", "dense")},
    "accumulation": ({"compressor": "lags"}, Often, {"accumulate_grad_batches": 2}),
    "averages of replicas": ({"compressor": A2SGD(param_sync_every=3)}, Often, {}),
    "auto": ({"schedule": "auto"}, Often, {}),
    "AdamW": (DENSE_FIRST, partial(with_optimizer, torch.optim.AdamW), {}),
    "AdamW, two backwards": (DENSE_FIRST, partial(with_optimizer, torch.optim.AdamW, TWICE), {}),
    "local steps": ({"local_steps": 2}, Often, {}),
    "local steps, accumulation": ({"local_steps": 2}, Often, {"accumulate_grad_batches": 2}),
    "local steps, two backwards": ({"local_steps": 2}, TWICE, {}),
    "local steps, dense": ({"local_steps": 2, "compressor": "dense"}, Often, {}),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("strategy", "module", "arguments"), STRATEGIES.values(), ids=STRATEGIES)
def test_steps_add_up_to_the_totals_and_shares_to_one_at_most(fitted, tmp_path, strategy, module, arguments):
    batches = arguments.get("accumulate_grad_batches", 1)
    answers = fitted({"compressor": "lags", **strategy}, module, callbacks=[LateAtEnd()], **arguments)
    ranks = [each.stats[batches - 1 :: batches] for each in answers]
    every = strategy.get("local_steps", 1)
    for stats in ranks:
        steps = [*filter(None, stats), *[stats[-1]] * (every - 1)]  # a round has statistics at its end
        for kind in BYTES:
            assert sum(each[kind] for each in steps) == pytest.approx(stats[-1][f"total_{kind}"]), kind
        shares = [each["exposed_share"] for each in stats if "exposed_share" in each]
        assert all(math.isnan(share) or 0 <= share <= 1 for share in shares), shares
    before = {"step": -1, **dict.fromkeys([f"sparse/total_{kind}" for kind in BYTES], 0)}
    rows = rows_of(tmp_path / "rows", "sparse/wire_bytes")
    assert [int(row["step"]) for row in rows] == list(range(3, len(ranks[0]), 4))
    for row in rows:
        for kind in BYTES:
            sent = float(row[f"sparse/total_{kind}"]) - float(before[f"sparse/total_{kind}"])
            steps = int(row["step"]) - int(before["step"])
            assert float(row[f"sparse/{kind}"]) * steps == pytest.approx(sent), kind
        before = row
    assert any(row.get("sparse/backward_seconds") for row in rows) == (every == 1)  # rounds have no backward times
    logged = {name.removeprefix("sparse/") for row in rows for name in row if name.startswith("sparse/")}
    assert logged <= set(re.findall(r"`(\w+)`", (DOCS / "monitor.md").read_text()))
