"""The numbers on which ranks agree about the steps that they saw."""

import time

import pytest
import torch
from typing_extensions import override

from lightning_sparse.cli.plan.rehearsal import EchoCollectives
from lightning_sparse.engine.observe import GroupMarks, Span, StepMarks
from lightning_sparse.engine.planner import averaged


class Told(EchoCollectives):
    """Collectives of ranks that all say what one says, which note how many numbers that are."""

    def __init__(self, ranks=1):
        super().__init__(ranks, torch.device("cpu"))
        self.counts = []

    @override
    def gather_numbers(self, numbers):
        self.counts.append(len(numbers))
        return super().gather_numbers(numbers)


def step(ready, tensors=2):
    """Return a step of some gradients in a group; on a device they have no mark unless somebody watches."""
    marks = StepMarks()
    marks.backward_start, marks.backward_end, marks.end = 0.0, 2.0, 3.0
    marks.ready = {f"weight {number}": ready for number in range(tensors)}
    group = GroupMarks(tuple(marks.ready))
    group.spans = [Span("select", 2.0, 2.1), Span("exchange", 2.1, 2.5)]
    marks.groups = [group]
    return marks


def test_a_rank_that_watches_gradients_tells_as_many_numbers_as_the_others():
    told = Told()
    (watched,) = averaged(told, [step(ready=1.0)], holds_groups=False, has_ready=False)
    (unwatched,) = averaged(told, [step(ready=None)], holds_groups=False, has_ready=False)
    assert told.counts[0] == told.counts[1]
    assert watched == unwatched


@pytest.mark.clock
def test_the_numbers_of_many_ranks_are_averaged_in_little_memory_and_time():
    ranks, tensors, steps = 512, 1000, 30
    told, seen = Told(ranks), [step(1.0, tensors)] * steps
    start = time.perf_counter()
    samples = averaged(told, seen, holds_groups=False)
    assert time.perf_counter() - start < 1.0
    for sample, alone in zip(samples, averaged(Told(), seen, holds_groups=False), strict=True):
        assert sample.times() == pytest.approx(alone.times())
    assert sum(told.counts) > steps * tensors
    assert 8 * ranks * max(told.counts) < 100e6
