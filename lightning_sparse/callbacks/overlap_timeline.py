"""Show when backward and exchange happened, on every rank: a callback, its trace for Perfetto, and its picture."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Optional, Union

from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_sparse.callbacks.base import StepObserver, engine_of, say, step_of
from lightning_sparse.engine import Engine
from lightning_sparse.engine.collectives import gather_together
from lightning_sparse.engine.observe import Clock, Mark, StepRecord
from lightning_sparse.jobs.lightning import LightningModule, TensorBoardLogger, Trainer
from lightning_sparse.strategy.trainer import SparseDDPStrategy

BACKWARD, WORKER = ROWS = ("backward", "exchange worker")

_STEPS = (100, 200, 300, 400, 500, 600, 700, 800)  # after those in which ``schedule="merged"`` tries groupings
_CLOCK_ROUNDS = 8
_GAP_SECONDS = 1e-3  # between steps in a trace; what lay between them is left out
_COLOURS = {
    "gradient": "#9aa5b1",
    "wait": "#d64545",
    "select": "#f0b429",
    "encode": "#8d6e63",
    "exchange": "#2186eb",
    "commit": "#3f9142",
}
_LABELS = {"gradient": "backward", "wait": "exposed: optimizer waits"}
_DRAWN_RANKS = 8
_FONT_SIZE = 14  # TensorBoard first shows a picture some 300 pixels wide, however large it is


class Slice(NamedTuple):
    """A stretch of time on one of :data:`ROWS`, in seconds."""

    row: str
    stage: str  # backward, gradient, wait (for the exchange), group, or that of a span
    name: str
    start: float
    end: float
    details: Mapping[str, Any]


class RecordedStep(NamedTuple):
    """The slices of each rank on the clock of rank 0, and by how many seconds its clock may be off to either side."""

    step: int
    ranks: Sequence[Sequence[Slice]]
    uncertainties: Sequence[float]


class OverlapTimeline(StepObserver):
    """Record some steps of all ranks, and write them as a trace for Perfetto (https://ui.perfetto.dev) and Chrome.

    Each rank is a process with two rows: backward (a slice for each gradient, then the wait for the exchange), and the
    exchange worker (groups, and in them selection, encoding, exchange and commit, with elements, bytes, parameters, and
    the seconds for which a group waited for the worker). Rank 0 writes the file after every recorded step. A few small
    collectives compare the clocks of ranks; ``metadata`` says how far they may still be off. On a GPU a recorded step
    marks every gradient with an event. Other steps cost nothing.

    Args:
        steps: numbers of the steps to record, from 0, as loggers count them. In the first ones ``schedule="merged"``
            tries groupings.
        path: file to write, with the picture beside it as ``.png``. ``None`` for ``overlap.json`` in the directory of
            the logger, or the Trainer's.
        pictures: draw the last recorded step when training ends, also in TensorBoard.

    Attributes:
        recorded: the steps recorded since training began, on every rank.

    Raises:
        ValueError: for steps that are not distinct numbers from 0, or a picture without matplotlib; in ``setup``, with
            local steps.

    Example::

        >>> timeline = OverlapTimeline(steps=[100, 101], pictures=False)
    """

    def __init__(
        self, steps: Sequence[int] = _STEPS, path: Optional[Union[str, Path]] = None, pictures: bool = True
    ) -> None:
        self.steps = _checked_steps(steps)
        self.path = path
        self._figure_class = figure_class("OverlapTimeline(pictures=True)") if pictures else None
        self.recorded: list[RecordedStep] = []
        self._target = Path()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        directory = trainer.log_dir  # asks rank 0, so all ranks have to ask
        self._target = Path(directory or ".") / "overlap.json" if self.path is None else Path(self.path)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.recorded = []

    @override
    def looks_at(self, trainer: Trainer, step: int) -> bool:
        return step in self.steps

    @override
    def before_step(self, trainer: Trainer, engine: Engine) -> None:
        engine.recorder.is_watched = True

    @override
    def after_step(self, trainer: Trainer, pl_module: LightningModule, strategy: SparseDDPStrategy, step: int) -> None:
        recorder = engine_of(strategy).recorder
        recorder.is_watched = False
        offsets = _clock_offsets()
        slices: list[Slice] = []
        if recorder.last is not None and recorder.last.ready:
            numels = {name: parameter.numel() for name, parameter in pl_module.named_parameters()}
            reference, seconds = recorder.clock.reference()
            slices = step_slices(recorder.last, reference, seconds - offsets[trainer.global_rank][0], numels)
        ranks = gather_together(slices)
        if not all(ranks):
            return  # there are no groups: every gradient was sparse_coo, or plain DDP made the step
        self.recorded.append(RecordedStep(step, ranks, [uncertainty for _, uncertainty in offsets]))
        if trainer.is_global_zero:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            self._target.write_text(json.dumps(trace(self.recorded)))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.recorded:
            rank_zero_warn(
                f"OverlapTimeline has recorded nothing: steps={sorted(self.steps)} names no step that more than one"
                f" process made (training ended before step {step_of(trainer)}, counted from 0)"
            )
            return
        say(self, f"{len(self.recorded)} steps are in {self._target}; open it in https://ui.perfetto.dev")
        if self._figure_class is not None and trainer.is_global_zero:
            figure = self._figure_class(layout="constrained")
            draw_step(figure, self.recorded[-1])
            figure.savefig(self._target.with_suffix(".png"))
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_figure("sparse/overlap", figure, self.recorded[-1].step, close=False)


def step_slices(marks: StepRecord, reference: Mark, reference_seconds: float, numels: Mapping[str, int]) -> list[Slice]:
    """Return a step's slices by their start, on the host's clock (``reference`` passed at ``reference_seconds``)."""

    def seconds(mark: Mark) -> float:
        return reference_seconds - Clock.seconds(mark, reference)

    slices = [*_main_slices(marks, seconds, numels), *_worker_slices(marks, seconds)]
    return sorted(slices, key=lambda each: (each.start, -each.end))


def _main_slices(marks: StepRecord, seconds: Callable[[Mark], float], numels: Mapping[str, int]) -> Iterator[Slice]:
    ready = {name: seconds(mark) for name, mark in marks.ready.items() if mark is not None}
    end = max([seconds(marks.backward_end), *ready.values()])
    first = min(ready.values(), default=end)
    start = first if marks.backward_start is None else min(first, seconds(marks.backward_start))
    yield Slice(BACKWARD, "backward", "backward", start, end, {"gradients": len(marks.ready)})
    for name, is_ready in sorted(ready.items(), key=lambda item: item[1]):
        yield Slice(BACKWARD, "gradient", name, start, is_ready, {"elements": numels.get(name, 0)})
        start = is_ready
    yield Slice(BACKWARD, "wait", "waits for the exchange", end, max(end, seconds(marks.end)), {})


def _worker_slices(marks: StepRecord, seconds: Callable[[Mark], float]) -> Iterator[Slice]:
    for position, group in enumerate(marks.groups):
        stages = [(span.stage, seconds(span.start), seconds(span.end)) for span in group.spans]
        start, end = min(stage[1] for stage in stages), max(stage[2] for stage in stages)
        details = {
            "waited": 0.0 if group.ready is None else max(0.0, start - seconds(group.ready)),
            "elements": group.elements,
            "bytes": group.wire_bytes,
            "asked for": group.counts + group.dense_elements,
            "parameters": ", ".join(group.names),
        }
        title = group.names[0] if len(group.names) == 1 else f"{group.names[0]} and {len(group.names) - 1} more"
        yield Slice(WORKER, "group", f"group {position}: {title}", start, end, details)
        for stage, began, ended in stages:
            yield Slice(WORKER, stage, f"{stage} {position}", began, max(began, ended), details)
    for span in marks.spans:
        began = seconds(span.start)
        yield Slice(WORKER, span.stage, span.stage, began, max(began, seconds(span.end)), {})


def clock_offset(
    entries: Sequence[float], exits: Sequence[float], other_entries: Sequence[float], other_exits: Sequence[float]
) -> tuple[float, float]:
    """Return by how many seconds another rank's clock is ahead, and how far that may be off to either side."""
    # No rank leaves a collective before all have entered it. The tightest bounds count, as in NTP.
    least = max(entry - exit_here for entry, exit_here in zip(other_entries, exits))
    most = min(exit_there - entry for exit_there, entry in zip(other_exits, entries))
    return (least + most) / 2, abs(most - least) / 2


def _clock_offsets() -> list[tuple[float, float]]:
    """Compare each rank's ``time.perf_counter`` with that of rank 0; all ranks must call."""
    times: list[float] = []
    for _ in range(_CLOCK_ROUNDS):
        times.append(time.perf_counter())
        gather_together(None)
        times.append(time.perf_counter())
    rows = gather_together(times)
    return [clock_offset(rows[0][::2], rows[0][1::2], row[::2], row[1::2]) for row in rows]


def trace(steps: Sequence[RecordedStep]) -> dict[str, Any]:
    """Write steps, moved together, in Chrome's JSON format: a process for each rank, a row for each of :data:`ROWS`."""
    events: list[dict[str, Any]] = []
    for rank in range(max((len(step.ranks) for step in steps), default=0)):
        names = [("process_name", 0, f"rank {rank}"), *(("thread_name", *row) for row in enumerate(ROWS, 1))]
        events += [{"ph": "M", "pid": rank, "tid": row, "name": what, "args": {"name": it}} for what, row, it in names]
    timed: list[dict[str, Any]] = []
    metadata: list[dict[str, Any]] = []
    end = 0.0
    for step in steps:
        first, last = _bounds(step.ranks)
        timed += [_event(each, rank, step.step, end - first) for rank, row in enumerate(step.ranks) for each in row]
        end += last - first + _GAP_SECONDS
        began = first - _bounds(steps[0].ranks)[0]
        uncertainty = list(step.uncertainties)
        metadata.append({"step": step.step, "began_seconds": began, "clock_uncertainty_seconds": uncertainty})
    # Longer slices first, so that those inside them are drawn below.
    timed.sort(key=lambda event: (event["ts"], -event["dur"]))
    return {"traceEvents": [*events, *timed], "displayTimeUnit": "ms", "metadata": {"steps": metadata}}


def _bounds(ranks: Sequence[Sequence[Slice]]) -> tuple[float, float]:
    slices = [each for rank in ranks for each in rank]
    return min(each.start for each in slices), max(each.end for each in slices)


def _event(each: Slice, rank: int, step: int, shift: float) -> dict[str, Any]:
    # In whole nanoseconds, so that what begins or ends together still does after the conversion.
    start, end = (round(1e6 * (seconds + shift), 3) for seconds in (each.start, each.end))
    name = f"{each.name}, step {step}" if each.stage == "backward" else each.name
    kind = {"ph": "X", "pid": rank, "tid": ROWS.index(each.row) + 1, "name": name, "cat": each.stage}
    return {**kind, "ts": start, "dur": round(end - start, 3), "args": {"step": step, **each.details}}


def draw_step(figure: Any, recorded: RecordedStep) -> None:
    """Draw backward and exchange worker of each rank in an empty figure, on one axis of time."""
    from matplotlib import rc_context
    from matplotlib.patches import Patch

    ranks, count = recorded.ranks[:_DRAWN_RANKS], len(recorded.ranks)
    figure.set_size_inches(9, 1.9 + 0.9 * len(ranks))
    figure.set_dpi(160)
    with rc_context({"font.size": _FONT_SIZE}):
        axes = figure.subplots()
        _draw_ranks(axes, ranks)
        some = f" (the first {_DRAWN_RANKS} of {count} ranks)" if count > _DRAWN_RANKS else ""
        exposed = [each.end - each.start for rank in recorded.ranks for each in rank if each.stage == "wait"]
        axes.set_title(f"step {recorded.step}{some}: {1e3 * fmean(exposed):.0f} ms exposed", fontsize=_FONT_SIZE)
        axes.set_xlabel("ms")
        handles = [Patch(color=colour, label=_LABELS.get(stage, stage)) for stage, colour in _COLOURS.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)


def _draw_ranks(axes: Any, ranks: Sequence[Sequence[Slice]]) -> None:
    origin, _ = _bounds(ranks)
    places = {}
    for rank, slices in enumerate(ranks):
        for row, place, label in ((BACKWARD, 2.0 * rank, f"rank {rank}"), (WORKER, 2.0 * rank + 0.8, "its exchange")):
            places[place] = label
            for stage, colour in _COLOURS.items():
                drawn = [each for each in slices if (each.row, each.stage) == (row, stage)]
                bars = [(1e3 * (each.start - origin), 1e3 * (each.end - each.start)) for each in drawn]
                # Edges tell neighbouring gradients apart, and would hide slices that are thinner than they.
                edge = "white" if stage == "gradient" else colour
                axes.broken_barh(bars, (place - 0.35, 0.7), facecolors=colour, edgecolors=edge, linewidth=0.4)
    axes.set_yticks(list(places), list(places.values()))
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)


def figure_class(asked: str) -> Any:
    """Return matplotlib's class of figures, or say how to install it, or else not to ask for a picture."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f"{asked} needs matplotlib, which is not installed: pip install 'lightning-sparse[plot]', or leave it out"
        ) from error
    return Figure


def _checked_steps(steps: Any) -> frozenset[int]:
    numbers = list(steps) if isinstance(steps, (Sequence, set, frozenset)) and not isinstance(steps, str) else []
    are_steps = all(isinstance(step, int) and not isinstance(step, bool) and step >= 0 for step in numbers)
    if not numbers or not are_steps or len(set(numbers)) < len(numbers):
        raise ValueError(f"steps={steps!r} must be a list of distinct whole numbers, at least 0, such as [100, 200]")
    return frozenset(numbers)
