"""From the marks of a step to slices on a clock that all ranks share, and to a trace that Perfetto and Chrome show."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from lightning_sparse.engine.observe import Clock, Mark, StepMarks

BACKWARD, WORKER, QUEUE = "backward", "exchange worker", "ready, waiting for the worker"
ROWS = (BACKWARD, WORKER, QUEUE)

_GAP_SECONDS = 1e-3  # between steps in a trace; what lay between them is left out


class Slice(NamedTuple):
    """A stretch of time on one row.

    Attributes:
        row: one of :data:`ROWS`.
        stage: ``"backward"``, ``"gradient"``, ``"wait"`` (of the optimizer for the exchange), ``"group"``,
            ``"select"``, ``"encode"``, ``"exchange"``, ``"commit"``, or ``"queue"`` (of a group for the worker).
        name: what a reader sees.
        start: seconds.
        end: seconds, not before ``start``.
        details: plain numbers and strings.
    """

    row: str
    stage: str
    name: str
    start: float
    end: float
    details: Mapping[str, Any]


class RecordedStep(NamedTuple):
    """One step of all ranks.

    Attributes:
        step: its number.
        ranks: the slices of each, on the clock of rank 0.
        uncertainties: for each rank, seconds by which its clock may be off that of rank 0, to either side.
    """

    step: int
    ranks: Sequence[Sequence[Slice]]
    uncertainties: Sequence[float]


class ClockOffset(NamedTuple):
    """Seconds by which a clock is ahead of another.

    Attributes:
        seconds: best guess.
        uncertainty: how far it may be off, to either side.
    """

    seconds: float
    uncertainty: float


def clock_offset(
    entries: Sequence[float], exits: Sequence[float], other_entries: Sequence[float], other_exits: Sequence[float]
) -> ClockOffset:
    """Bound how far another rank's clock is ahead, from collectives that no rank leaves before all have entered.

    The other rank's exit, on its own clock, comes after the entry here; the exit here comes after its entry. Each
    collective bounds the offset from both sides, and the tightest bounds of several count, as in NTP.

    Args:
        entries: when this rank entered each collective, in seconds of its own clock.
        exits: when it left.
        other_entries: the same of the other rank, on its clock.
        other_exits: the same.

    Example::

        >>> clock_offset([0.0, 1.0], [0.5, 1.25], [10.25, 11.0], [10.5, 11.25])
        ClockOffset(seconds=10.0, uncertainty=0.25)
    """
    least = max(entry - exit_here for entry, exit_here in zip(other_entries, exits))
    most = min(exit_there - entry for exit_there, entry in zip(other_exits, entries))
    return ClockOffset((least + most) / 2, abs(most - least) / 2)


def step_slices(marks: StepMarks, reference: Mark, reference_seconds: float, numels: Mapping[str, int]) -> list[Slice]:
    """Put a step on the host's clock; on a device this waits for it.

    Args:
        marks: of a step that has ended.
        reference: a mark whose time is known.
        reference_seconds: that time.
        numels: elements by parameter name.

    Returns:
        slices in the order of their start, longer ones first.
    """

    def seconds(mark: Mark) -> float:
        return reference_seconds - Clock.seconds(mark, reference)

    slices = chain(_main_slices(marks, seconds, numels), _worker_slices(marks, seconds))
    return sorted(slices, key=lambda each: (each.start, -each.end))


def hidden_seconds(slices: Sequence[Slice], stage: str = "exchange") -> float:
    """Return for how long a stage and backward went on at the same time."""
    backward = [each for each in slices if each.stage == "backward"]
    return sum(
        max(0.0, min(each.end, other.end) - max(each.start, other.start))
        for each in slices
        if each.stage == stage
        for other in backward
    )


def stage_seconds(slices: Sequence[Slice], stage: str) -> float:
    """Return the time spent in a stage."""
    return sum(each.end - each.start for each in slices if each.stage == stage)


def trace(steps: Sequence[RecordedStep]) -> dict[str, Any]:
    """Write steps as a trace in Chrome's JSON format, a process for each rank and a row for each of :data:`ROWS`.

    Steps are moved together, a millisecond apart; ``metadata`` says when they really began, counted from the first.

    Returns:
        an object for :func:`json.dump`: ``traceEvents`` in the order of their times (microseconds), and ``metadata``.
    """
    ranks = max((len(step.ranks) for step in steps), default=0)
    events = [event for rank in range(ranks) for event in _names(rank)]
    timed: list[dict[str, Any]] = []
    end = 0.0
    for step in steps:
        first, last = _bounds(step)
        for rank, slices in enumerate(step.ranks):
            for position, each in enumerate(slices):
                timed.extend(_events(each, rank, step.step, f"{step.step}.{rank}.{position}", end - first))
        end += last - first + _GAP_SECONDS
    # Longer slices first, so that those inside them are drawn below.
    timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    origin = _bounds(steps[0])[0] if steps else 0.0
    metadata = [
        {
            "step": step.step,
            "began_seconds": _bounds(step)[0] - origin,
            "clock_uncertainty_seconds": list(step.uncertainties),
        }
        for step in steps
    ]
    return {"traceEvents": [*events, *timed], "displayTimeUnit": "ms", "metadata": {"steps": metadata}}


def _main_slices(marks: StepMarks, seconds: Any, numels: Mapping[str, int]) -> Iterator[Slice]:
    assert marks.backward_end is not None
    assert marks.end is not None
    ready = {name: seconds(mark) for name, mark in marks.ready.items() if mark is not None}
    end = max([seconds(marks.backward_end), *ready.values()])
    first = min(ready.values(), default=end)
    start = first if marks.backward_start is None else min(first, seconds(marks.backward_start))
    yield Slice(BACKWARD, "backward", "backward", start, end, {"gradients": len(marks.ready)})
    for name, is_ready in sorted(ready.items(), key=lambda item: item[1]):
        yield Slice(BACKWARD, "gradient", name, start, is_ready, {"elements": numels.get(name, 0)})
        start = is_ready
    yield Slice(BACKWARD, "wait", "waits for the exchange", end, max(end, seconds(marks.end)), {})


def _worker_slices(marks: StepMarks, seconds: Any) -> Iterator[Slice]:
    for position, group in enumerate(marks.groups):
        stages = [(span.stage, seconds(span.start), seconds(span.end)) for span in group.spans]
        start, end = min(stage[1] for stage in stages), max(stage[2] for stage in stages)
        details = {
            "elements": group.elements,
            "bytes": group.wire_bytes,
            "asked for": group.counts + group.dense_elements,
            "parameters": ", ".join(group.names),
        }
        title = group.names[0] if len(group.names) == 1 else f"{group.names[0]} and {len(group.names) - 1} more"
        yield Slice(WORKER, "group", f"group {position}: {title}", start, end, details)
        for stage, began, ended in stages:
            yield Slice(WORKER, stage, f"{stage} {position}", began, max(began, ended), details)
        if group.ready is not None and (is_ready := seconds(group.ready)) < start:
            yield Slice(QUEUE, "queue", f"group {position} waits", is_ready, start, {"elements": group.elements})
    for span in marks.spans:
        began = seconds(span.start)
        yield Slice(WORKER, span.stage, span.stage, began, max(began, seconds(span.end)), {})


def _bounds(step: RecordedStep) -> tuple[float, float]:
    slices = [each for rank in step.ranks for each in rank]
    return min(each.start for each in slices), max(each.end for each in slices)


def _names(rank: int) -> list[dict[str, Any]]:
    process = {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
    order = {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    rows = [
        {"ph": "M", "pid": rank, "tid": number, "name": "thread_name", "args": {"name": row}}
        for number, row in enumerate(ROWS, 1)
    ]
    return [process, order, *rows]


def _events(each: Slice, rank: int, step: int, identity: str, shift: float) -> list[dict[str, Any]]:
    # In whole nanoseconds, so that what begins or ends together still does after the conversion.
    start, end = (round(1e6 * (seconds + shift), 3) for seconds in (each.start, each.end))
    common = {
        "pid": rank,
        "tid": ROWS.index(each.row) + 1,
        "name": f"{each.name}, step {step}" if each.stage == "backward" else each.name,
        "cat": each.stage,
        "args": {"step": step, **each.details},
    }
    if each.row != QUEUE:
        return [{**common, "ph": "X", "ts": start, "dur": round(end - start, 3)}]
    # Groups wait at the same time; asynchronous events may overlap where slices may only nest.
    ended = {**common, "ph": "e", "id": identity, "ts": end, "args": {}}
    return [{**common, "ph": "b", "id": identity, "ts": start}, ended]
