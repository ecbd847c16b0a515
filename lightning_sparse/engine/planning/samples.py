"""From marks in time to numbers on which all ranks agree."""

from collections.abc import Sequence

from lightning_sparse.engine.collectives import Collectives
from lightning_sparse.engine.observe.record import Clock, StepMarks
from lightning_sparse.schedule.step_profile import GroupSample, StepSample


def averaged(
    collectives: Collectives, steps: Sequence[StepMarks], holds_groups: bool, has_ready: bool = True
) -> list[StepSample]:
    """Average the times of steps of the same groups over ranks: one exchange, and a look at the device's clock.

    ``has_ready`` tells when each gradient was ready, too; only where all ranks have marked it.
    """
    samples = [sample_of(marks, holds_groups) for marks in steps]
    if not has_ready:
        samples = [sample._replace(ready=()) for sample in samples]
    means = iter(collectives.mean_of_numbers([seconds for sample in samples for seconds in sample.times()]))
    return [sample.with_times(means) for sample in samples]


def sample_of(marks: StepMarks, holds_groups: bool = False) -> StepSample:
    """Read the marks of a step; gradients that nobody watched are left out."""
    assert marks.end is not None
    watched = [mark for mark in marks.ready.values() if mark is not None]
    # Whoever drives the engine without a Trainer need not say when backward begins.
    first = watched[0] if watched else marks.backward_end
    start = first if marks.backward_start is None else marks.backward_start
    backward_seconds = Clock.seconds(start, marks.backward_end)
    ready = [backward_seconds if holds_groups else Clock.seconds(start, mark) for mark in watched]
    last_exchange = marks.groups[-1].spans[-1].end
    groups = [
        GroupSample(
            group.elements,
            group.counts,
            group.dense_elements,
            group.seconds("select", "encode"),
            group.seconds("exchange"),
        )
        for group in marks.groups
    ]
    return StepSample(
        tuple(ready),
        tuple(groups),
        Clock.seconds(last_exchange, marks.end),
        marks.exposed_seconds,
        Clock.seconds(start, marks.end),
    )
