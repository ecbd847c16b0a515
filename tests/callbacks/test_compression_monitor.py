"""CompressionMonitor: what reaches loggers and the progress bar."""

import contextlib
import csv
import io
import math
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import RichProgressBar, TQDMProgressBar
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.callbacks import CompressionMonitor
from lightning_sparse.callbacks.reporting.gathering import gather_rows
from lightning_sparse.callbacks.reporting.history import History
from lightning_sparse.callbacks.reporting.pictures import draw_density, draw_steps, draw_time, figure_class
from lightning_sparse.callbacks.reporting.throughput import batch_size
from lightning_sparse.engine.observe.timeline import BACKWARD, RecordedStep, Slice
from lightning_sparse.testing.pool import Pool
from tests.helpers.sparse_ddp import COMPRESSOR_NAMES, DENSITY
from tests.helpers.statistics import MEASURED, STATS
from tests.helpers.trainers import Rows, Small, accelerator, make_trainer, run_fit, weights

TAGS = {f"sparse/{name}" for name in STATS | MEASURED}
STEPS = [3, 7, 11, 15]
NAMES = [name for name, _ in Small().named_parameters()]
BY_PARAMETER = ["density", "union_density", "gradient_norm", "residual_norm", "residual_to_gradient"]
EVERYTHING = {"progress_bar": True, "by_parameter": True, "histograms": True, "pictures": True}


def fit_monitored(
    rank: int,
    logger_class: Any,
    directory: str,
    monitor: "dict[str, Any] | None" = None,
    strategy: "dict[str, Any] | None" = None,
    module: Any = Small,
    **arguments: Any,
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Fit with a logger; return what the progress bar was given, and the weights."""
    logger = logger_class(directory, name="", version="")
    trainer = run_fit(
        rank,
        SparseDDPStrategy(**(strategy or {"density": 0.01})),
        module(),
        logger=logger,
        log_every_n_steps=4,
        callbacks=[CompressionMonitor(**(monitor or {"progress_bar": True}))],
        **arguments,
    )
    shown = {name: float(value) for name, value in trainer.progress_bar_metrics.items()}
    return shown, weights(trainer.lightning_module)


def read_events(directory: Path) -> EventAccumulator:
    """Read what was written for TensorBoard."""
    events = EventAccumulator(str(directory), size_guidance={"images": 0, "tensors": 0, "histograms": 0, "scalars": 0})
    events.Reload()
    return events


def read_rows(directory: Path) -> list[dict[str, str]]:
    """Read what was written as CSV."""
    with (directory / "metrics.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["sparse/wire_bytes"]]


def test_scalars_reach_tensorboard(pair: Pool, tmp_path: Path) -> None:
    pair.run(fit_monitored, TensorBoardLogger, str(tmp_path))
    events = read_events(tmp_path)
    assert set(events.Tags()["scalars"]) >= TAGS
    density = events.Scalars("sparse/density")
    assert [event.step for event in density] == STEPS
    assert all(event.value == pytest.approx(0.01, rel=0.05) for event in density)


def test_scalars_reach_any_logger(pair: Pool, tmp_path: Path) -> None:
    pair.run(fit_monitored, CSVLogger, str(tmp_path))
    rows = read_rows(tmp_path)
    assert [int(row["step"]) for row in rows] == STEPS
    assert rows[0].keys() >= TAGS
    assert all(float(row["sparse/compression_ratio"]) > 10 for row in rows)
    for row in rows:
        assert float(row["sparse/backward_seconds"]) > 0
        assert float(row["sparse/residual_to_gradient"]) > 0
        # Two ranks, four rows in a batch.
        samples = float(row["sparse/samples_per_second"]) * float(row["sparse/step_seconds"])
        assert samples == pytest.approx(8)


class Dawdling(Callback):
    """Let exchanges of one rank wait for their turn, now and then."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Queue something slow."""
        assert isinstance(trainer.strategy, SparseDDPStrategy)
        assert trainer.strategy.engine is not None
        if trainer.global_rank == batch_idx % 2:
            trainer.strategy.engine._worker.submit(lambda: time.sleep(0.1))


def fit_dawdling(rank: int, local: dict[str, int], directory: str) -> list[int]:
    """Fit with exchanges that travel for some steps; return the steps in which ranks looked together."""
    strategy = SparseDDPStrategy(density=0.1, local_steps=4, **local)
    looked: list[int] = []
    monitor = CompressionMonitor()
    log = monitor._log_plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitor, "_log_plan", lambda *told: (looked.append(told[-1]), log(*told)))
        logger = CSVLogger(directory, name="", version="")
        callbacks = [monitor, Dawdling()]
        run_fit(rank, strategy, logger=logger, log_every_n_steps=1, callbacks=callbacks)
    return looked


@pytest.mark.parametrize("local", [{"overlap_steps": 2}, {"fragments": 2, "overlap_steps": 3}], ids=str)
def test_ranks_look_together_however_late_an_exchange_is(pair: Pool, tmp_path: Path, local: dict[str, int]) -> None:
    first, second = pair.run(fit_dawdling, local, str(tmp_path))
    assert first == second
    assert len(first) > 8


def fit_with_slow_pictures(rank: int, seconds: float, directory: str) -> None:
    """Fit two epochs, with pictures that take ``seconds`` to draw."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_sparse.callbacks.compression_monitor.draw_time", lambda *drawn: time.sleep(seconds))
        fit_monitored(rank, TensorBoardLogger, directory, {"pictures": True}, max_epochs=2)


def test_pictures_are_left_out_of_the_time_of_a_step(pair: Pool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawing = 4.0
    pair.run(fit_with_slow_pictures, drawing, str(tmp_path))
    # The first row of the second epoch is the mean of four steps: a quarter, if the drawing were one of them.
    times = [event.value for event in read_events(tmp_path).Scalars("sparse/step_seconds")]
    assert len(times) > len(STEPS)
    assert max(times) < drawing / 4


@pytest.mark.parametrize("bar", ["tqdm", "rich"], ids=lambda bar: f"{bar} progress bar")
def test_a_progress_bar_shows_ratio_and_exposed_time(pair: Pool, tmp_path: Path, bar: str) -> None:
    (printed, shown), _ = pair.run(fit_with_bar, bar, str(tmp_path))
    assert shown["compression"] > 10
    assert shown["exposed_ms"] > 0
    assert re.search(r"compression[:=]\s*\d\d", printed), printed[-2000:]
    assert re.search(r"exposed_ms[:=]\s*\d", printed), printed[-2000:]


def fit_with_bar(rank: int, bar: str, directory: str) -> tuple[str, dict[str, float]]:
    """Fit with a progress bar; return what it printed, and what it was given."""
    bars = {"tqdm": TQDMProgressBar, "rich": RichProgressBar}
    trainer_arguments = {"enable_progress_bar": True}
    screen = io.StringIO()
    with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
        trainer = make_trainer(
            rank,
            SparseDDPStrategy(density=0.01),
            log_every_n_steps=4,
            callbacks=[bars[bar](), CompressionMonitor(progress_bar=True)],
            **trainer_arguments,
        )
        trainer.fit(Small())
    return screen.getvalue(), {name: float(value) for name, value in trainer.progress_bar_metrics.items()}


def test_nothing_is_in_the_progress_bar_unless_asked_for(pair: Pool, tmp_path: Path) -> None:
    (shown, _), _ = pair.run(fit_monitored, CSVLogger, str(tmp_path), {"by_parameter": False})
    assert not {"compression", "exposed_ms"} & shown.keys()


@pytest.mark.parametrize("compressor", COMPRESSOR_NAMES)
def test_the_observer_is_neutral(pair: Pool, tmp_path: Path, compressor: str) -> None:
    pytest.importorskip("matplotlib")
    settings = {"compressor": compressor, "density": DENSITY[compressor]}
    watched = pair.run(fit_monitored, TensorBoardLogger, str(tmp_path), EVERYTHING, settings)
    alone = pair.run(fit_alone, settings)
    for (_, with_monitor), without in zip(watched, alone):
        assert all(torch.equal(with_monitor[name], without[name]) for name in without)


def fit_alone(rank: int, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Fit without a callback."""
    return weights(run_fit(rank, SparseDDPStrategy(**settings)).lightning_module)


def test_everything_reaches_tensorboard(pair: Pool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pair.run(fit_monitored, TensorBoardLogger, str(tmp_path), EVERYTHING, {"density": 0.01, "schedule": "layerwise"})
    events = read_events(tmp_path)
    assert set(events.Tags()["scalars"]) >= TAGS | {
        f"sparse_parameters/{each}/{name}" for each in BY_PARAMETER for name in NAMES
    }
    for name, parameter in Small().named_parameters():
        density = events.Scalars(f"sparse_parameters/density/{name}")[-1].value
        assert density == pytest.approx(max(1, round(0.01 * parameter.numel())) / parameter.numel())
        union = events.Scalars(f"sparse_parameters/union_density/{name}")[-1].value
        assert density <= union * 1.0001 <= 2.0002 * density
        ratio = events.Scalars(f"sparse_parameters/residual_to_gradient/{name}")[-1].value
        norms = [events.Scalars(f"sparse_parameters/{kind}_norm/{name}")[-1].value for kind in ("residual", "gradient")]
        assert ratio == pytest.approx(norms[0] / norms[1], rel=1e-4)
    assert set(events.Tags()["images"]) == {"sparse/density_by_parameter", "sparse/time_of_a_step"}
    for tag in events.Tags()["images"]:
        assert [image.step for image in events.Images(tag)] == [15]
        assert events.Images(tag)[0].width > 500


def test_histograms_count_what_both_ranks_send_and_keep(pair: Pool, tmp_path: Path) -> None:
    pair.run(fit_monitored, TensorBoardLogger, str(tmp_path), {"histograms": True, "by_parameter": True})
    events = read_events(tmp_path)
    elements = sum(parameter.numel() for parameter in Small().parameters())
    for kind, most in (("sent", 0.02 * elements), ("kept", 2 * elements)):
        whole = events.Histograms(f"sparse/log10_{kind}_magnitude")
        assert [each.step for each in whole] == STEPS
        counted = sum(whole[-1].histogram_value.bucket)
        # Zeros are left out: what was sent has left the residual.
        assert 0.9 * most <= counted <= 1.05 * most
        parts = [
            events.Histograms(f"sparse_parameters/log10_{kind}_magnitude/{name}")[-1].histogram_value for name in NAMES
        ]
        assert sum(sum(part.bucket) for part in parts) == counted
        assert all(-10 < part.min < part.max < 2 for part in parts)
    sent, kept = (events.Histograms(f"sparse/log10_{kind}_magnitude")[-1].histogram_value for kind in ("sent", "kept"))
    assert sent.sum / sent.num > kept.sum / kept.num


def test_the_page_opens_sorted_and_says_what_is_planned(pair: Pool, tmp_path: Path) -> None:
    pair.run(fit_planned, str(tmp_path))
    events = read_events(tmp_path)
    layout = layout_pb2.Layout()
    layout.ParseFromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    charts = {chart.title: list(chart.multiline.tag) for category in layout.category for chart in category.chart}
    assert charts["Exposed exchange, seconds"] == ["sparse/exposed_seconds$"]
    assert charts["Density, log10 of the fraction of elements"] == ["sparse/log10_density$"]
    for name in ("density", "union_density"):
        logarithms = [math.log10(event.value) for event in events.Scalars(f"sparse/{name}")]
        assert [event.value for event in events.Scalars(f"sparse/log10_{name}")] == pytest.approx(logarithms, rel=1e-4)
    # With several runs, a chart of several statistics is unreadable: its lines have the colours of runs, and no names.
    assert all(len(patterns) == 1 for patterns in charts.values())
    tags = events.Tags()["scalars"]
    assert all(any(re.match(pattern, tag) for tag in tags) for patterns in charts.values() for pattern in patterns)
    first, *later = events.Tensors("sparse/plan/text_summary")
    assert first.step == 3
    assert "No plan, or none yet" in first.tensor_proto.string_val[0].decode()
    text = later[-1].tensor_proto.string_val[0].decode()  # the trials have ended
    assert "compressor: TopK" in text
    assert "backward and exchange, measured:" in text
    assert "| ready at |" not in text or "Times of groups count from the start of backward." in text
    assert "`network." in text


def fit_planned(rank: int, directory: str) -> None:
    """Fit until a plan is followed."""
    fit_monitored(rank, TensorBoardLogger, directory, max_epochs=6)


class Notes(Callback):
    """Note what this rank measured."""

    def __init__(self) -> None:
        self.stats: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
        """Note it."""
        self.stats.append(trainer.strategy.compression_stats())


def fit_noted(rank: int, directory: str) -> list[dict[str, float]]:
    """Fit with a method whose ranks send differently much; return what this rank measured."""
    notes = Notes()
    trainer = make_trainer(
        rank,
        SparseDDPStrategy("exdyna", density=0.05),
        logger=CSVLogger(directory, name="", version=""),
        log_every_n_steps=4,
        callbacks=[CompressionMonitor(), notes],
    )
    trainer.fit(Small())
    return notes.stats


def test_logged_are_means_over_ranks_and_steps_and_what_the_slowest_has_exposed(pair: Pool, tmp_path: Path) -> None:
    noted = pair.run(fit_noted, str(tmp_path))

    def means(name: str, step: int) -> list[float]:
        return [sum(each[name] for each in rank[step - 3 : step + 1]) / 4 for rank in noted]

    densities = [each["density"] for each in noted[0]]
    assert max(densities) > 1.2 * min(densities)  # else a single step would do
    for step, row in zip(STEPS, read_rows(tmp_path)):
        for name in ("density", "union_density", "wire_bytes", "select_seconds", "exchange_seconds"):
            assert float(row[f"sparse/{name}"]) == pytest.approx(sum(means(name, step)) / 2), name
        total = sum(rank[step]["total_wire_bytes"] for rank in noted) / 2
        assert float(row["sparse/total_wire_bytes"]) == pytest.approx(total)
        first, second = means("exposed_seconds", step)
        assert float(row["sparse/exposed_seconds"]) == pytest.approx(max(first, second))
        assert first != second


def gather(rank: int) -> list[list[float]]:
    """Gather rows that are hard to copy."""
    trainer = make_trainer(rank, SparseDDPStrategy(), fast_dev_run=True)
    trainer.fit(Small())
    return gather_rows(trainer.strategy, [0.1 + rank, math.inf, math.nan if rank else -1.0])


def test_rows_arrive_as_they_were(pair: Pool) -> None:
    for rows in pair.run(gather):
        assert rows[0] == [0.1, math.inf, -1.0]
        assert rows[1][:2] == [1.1, math.inf]
        assert math.isnan(rows[1][2])


class Unsized(Small):
    """A model whose batches do not tell their size."""

    def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Any:
        """Add a tensor of another length."""
        return [batch, torch.zeros(7)]

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        """Reconstruct the first part."""
        return super().training_step(batch[0], batch_index)


def fit_unsized(rank: int, directory: str) -> None:
    """Fit with it."""
    fit_monitored(rank, CSVLogger, directory, module=Unsized, limit_val_batches=0)


def test_batches_of_unknown_size_leave_throughput_out(pair: Pool, tmp_path: Path) -> None:
    pair.run(fit_unsized, str(tmp_path))
    rows = read_rows(tmp_path)
    assert len(rows) == 4
    assert "sparse/samples_per_second" not in rows[0]
    assert float(rows[0]["sparse/step_seconds"]) > 0


def test_a_batch_has_the_size_that_its_tensors_share() -> None:
    assert batch_size([torch.zeros(3, 2), {"label": torch.zeros(3), "weight": torch.tensor(1.0)}]) == 3
    assert batch_size([torch.zeros(3), torch.zeros(4)]) is None
    assert batch_size("text") is None


@pytest.mark.parametrize("accumulate", [2, 4])
def test_a_step_of_several_batches_is_logged_once(pair: Pool, tmp_path: Path, accumulate: int) -> None:
    pair.run(fit_accumulating, str(tmp_path), accumulate)
    rows = read_rows(tmp_path)
    assert [int(row["step"]) for row in rows] == list(range(1, 16 // accumulate, 2))
    for row in rows:
        samples = float(row["sparse/samples_per_second"]) * float(row["sparse/step_seconds"])
        assert samples == pytest.approx(8 * accumulate)


def fit_accumulating(rank: int, directory: str, accumulate: int) -> None:
    """Fit with several batches a step."""
    trainer = make_trainer(
        rank,
        SparseDDPStrategy(density=0.01),
        logger=CSVLogger(directory, name="", version=""),
        log_every_n_steps=2,
        callbacks=[CompressionMonitor()],
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(Small())


def test_old_columns_of_a_long_history_are_thinned() -> None:
    history = History()
    for step in range(1000):
        history.add(step, {"step": float(step)}, {"weight": step / 1000, **({"late": 1.0} if step > 500 else {})})
    assert len(history.steps) <= 256
    assert history.steps[-1] == 999
    assert history.densities["weight"] == [step / 1000 for step in history.steps]
    assert history.densities["late"] == [float(step > 500) for step in history.steps]
    assert [row["step"] for row in history.statistics] == history.steps


class Pictures(CSVLogger):
    """A logger with a way for images."""

    shown: "list[tuple[str, int, Any]]"

    def log_image(self, key: str, images: list[Any], step: int) -> None:
        """Remember them."""
        self.shown = [*getattr(self, "shown", []), (key, step, images[0].shape)]


def fit_with_pictures(rank: int, directory: str) -> Any:
    """Fit with it."""
    logger = Pictures(directory, name="", version="")
    monitor = CompressionMonitor(pictures=True)
    make_trainer(rank, SparseDDPStrategy(density=0.01), logger=logger, log_every_n_steps=8, callbacks=[monitor]).fit(
        Small()
    )
    return getattr(logger, "shown", [])


def test_pictures_tell_what_their_colours_are() -> None:
    pytest.importorskip("matplotlib")
    new = figure_class(None)
    for density, told in ((0.0, True), (0.1, False)):
        figure = new()
        draw_density(figure, [3, 7], {"weight": [0.5, density]})
        assert ("white: nothing is sent" in figure.axes[0].get_title()) == told
    stages = ("backward", "exposed", "step", "select", "exchange", "commit")
    over_time, by_rank = new(), new()
    draw_time(over_time, [3], [{f"{stage}_seconds": 0.1 for stage in stages}])
    draw_steps(by_rank, {"": RecordedStep(3, [[Slice(BACKWARD, "gradient", "weight", 0.0, 0.1, {})]], [0.0])})
    words = [{text.get_text() for text in figure.legends[0].get_texts()} for figure in (over_time, by_rank)]
    assert "exposed: optimizer waits" in words[0] & words[1]


def test_pictures_reach_loggers_that_can_show_them(pair: Pool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shown, elsewhere = pair.run(fit_with_pictures, str(tmp_path))
    assert [(key, step) for key, step, _ in shown] == [
        ("sparse/density_by_parameter", 15),
        ("sparse/time_of_a_step", 15),
    ]
    assert all(len(shape) == 3 and shape[2] == 3 for _, _, shape in shown)
    assert elsewhere == []


def warnings_of(rank: int, directory: str, arguments: dict[str, Any], has_logger: bool) -> list[str]:
    """Fit; return what the monitor warned of."""
    logger = CSVLogger(directory, name="", version="") if has_logger else False
    trainer = make_trainer(rank, SparseDDPStrategy(), logger=logger, callbacks=[CompressionMonitor(**arguments)])
    if rank > 0:
        trainer.fit(Small())
        return []
    with pytest.warns(UserWarning, match="CompressionMonitor") as caught:
        trainer.fit(Small())
    return [str(each.message) for each in caught if "CompressionMonitor" in str(each.message)]


@pytest.mark.parametrize(
    ("arguments", "has_logger", "message"),
    [
        ({"pictures": True}, True, "(pictures=True) has no effect, because CSVLogger cannot show them"),
        ({"histograms": True}, True, "(histograms=True) has no effect"),
        ({}, False, "nowhere to log: give the Trainer a logger"),
    ],
)
def test_what_cannot_be_shown_is_said(
    pair: Pool, tmp_path: Path, arguments: dict[str, Any], has_logger: bool, message: str
) -> None:
    (warning,), _ = pair.run(warnings_of, str(tmp_path), arguments, has_logger)
    assert message in warning


def test_pictures_without_matplotlib_are_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"CompressionMonitor need matplotlib.*lightning-sparse\[plot\]"):
        CompressionMonitor(pictures=True)
    CompressionMonitor()


def test_one_process_has_nothing_to_log(forked: dict[int, Pool], tmp_path: Path) -> None:
    forked[1].run(fit_monitored, CSVLogger, str(tmp_path))
    assert "sparse/" not in (tmp_path / "metrics.csv").read_text()


class OnlySparseLayout(Small):
    """A model all of whose gradients are ``sparse_coo``."""

    def __init__(self) -> None:
        super().__init__()
        self.network = torch.nn.EmbeddingBag(16, 4, sparse=True, mode="sum")

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        """Pull some rows to one."""
        return (self.network(batch[:, :3].abs().mul(5).long().clamp(max=15)) - 1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD, which takes such gradients."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_sparse_layout(rank: int, directory: str) -> None:
    """Fit with it, and everything on."""
    fit_monitored(rank, TensorBoardLogger, directory, EVERYTHING, module=OnlySparseLayout, limit_val_batches=0)


def test_gradients_that_travel_whole_by_layout_are_shown_without_parameters(pair: Pool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pair.run(fit_sparse_layout, str(tmp_path))
    events = read_events(tmp_path)
    assert all(event.value > 0 for event in events.Scalars("sparse/wire_bytes"))
    assert events.Tags()["images"] == ["sparse/time_of_a_step"]
    assert not any("network" in tag for tag in events.Tags()["scalars"])


class LongValidation(Small):
    """A model whose validation takes longer than its training."""

    def on_validation_start(self) -> None:
        """Wait."""
        time.sleep(4.0)

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return 4 batches for two ranks."""
        return DataLoader(Rows(32), batch_size=4)


def test_validation_does_not_count_as_training(pair: Pool, tmp_path: Path) -> None:
    arguments = {"num_sanity_val_steps": 0, "max_epochs": 2}
    pair.run(fit_monitored_long, str(tmp_path), arguments)
    assert all(float(row["sparse/step_seconds"]) < 0.9 for row in read_rows(tmp_path)[1:])


def fit_monitored_long(rank: int, directory: str, arguments: dict[str, Any]) -> None:
    """Fit with it."""
    fit_monitored(rank, CSVLogger, directory, None, None, LongValidation, **arguments)


def test_another_strategy_is_refused() -> None:
    trainer = Trainer(
        accelerator=accelerator(), devices=1, max_epochs=1, logger=False, callbacks=[CompressionMonitor()]
    )
    with pytest.raises(TypeError, match=r"needs a SparseDDPStrategy, got SingleDeviceStrategy.*strategy='sparse_topk'"):
        trainer.fit(Small())
