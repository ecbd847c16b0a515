"""The numbers on which ranks agree about the steps that they saw."""

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from lightning_sparse.engine.observe import GroupMarks, Span, StepMarks
from lightning_sparse.engine.step_samples import averaged


class Told:
    """Collectives of one rank, which note how many numbers it tells the others."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def gather_numbers(self, numbers: Sequence[float]) -> Tensor:
        """Note how many there are."""
        self.counts.append(len(numbers))
        return torch.tensor([numbers])


def step(ready: Optional[float]) -> StepMarks:
    """Return a step of two gradients in a group; on a device they have no mark unless somebody watches."""
    marks = StepMarks()
    marks.backward_start, marks.backward_end, marks.end = 0.0, 2.0, 3.0
    marks.ready = {"weight": ready, "bias": ready}
    group = GroupMarks(("weight", "bias"))
    group.spans = [Span("select", 2.0, 2.1), Span("exchange", 2.1, 2.5)]
    marks.groups = [group]
    return marks


def test_a_rank_that_watches_gradients_tells_as_many_numbers_as_the_others() -> None:
    told: Any = Told()
    (watched,) = averaged(told, [step(ready=1.0)], holds_groups=False, has_ready=False)
    (unwatched,) = averaged(told, [step(ready=None)], holds_groups=False, has_ready=False)
    assert told.counts[0] == told.counts[1]
    assert watched == unwatched
