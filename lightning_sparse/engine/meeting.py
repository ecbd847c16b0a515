"""The meeting: what ranks tell each other before they exchange changes, where they may make different numbers of steps.

A rank with fewer batches in an epoch makes its share of a round: each of its steps stands for as many as the rank with
the most makes meanwhile. A change counts by the samples that it was learned from.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Optional
from zlib import crc32

from lightning_sparse.engine.collectives import Collectives

MEETING_POINTS = ("a step", "a validation", "the end of an epoch")  # where ranks are when they begin an exchange


class RankStatus(NamedTuple):
    """What each rank tells the others before an exchange, in numbers."""

    place: float  # that it has come to, as a position in ``MEETING_POINTS``
    samples: float  # since the last exchange; NaN where they cannot be told
    batches: float
    step: float
    missed_steps: float  # of others, since all ranks last met
    is_stale: float  # whether its model is not the shared one
    flags: float  # as bits
    resting: float  # what tells apart sets of parameters that nothing is to move


class Meeting:
    """What this rank tells, and has heard, of batches, steps and flags.

    ``ranks_in_step``, one after the other, train one model together, and have one change.
    """

    def __init__(self, collectives: Collectives, ranks_in_step: int = 1) -> None:
        self.collectives = collectives
        self.ranks_in_step = ranks_in_step
        # What a rank may set at any time (``is_noted``), and all ranks hear of (``heard()``) at an exchange; one that
        # waits for others does then what there is to do (``answer()``).
        self.flags: list[Any] = []
        self.heard = 0  # flags that exchanges have brought, as bits, until they are asked for
        self.step_ratio = (1, 1)  # steps of an epoch: of this rank, and of the rank with the most
        self._epoch = (0, 0)  # the step at which it began, and steps that this rank has made since
        self.missed_steps = 0  # that others have made, since all ranks last met
        self.are_uneven = False  # when all last met, some had missed steps
        self._skipped = 0
        self._samples = self._batches = 0.0  # since the last exchange began; NaN samples where they cannot be told
        self._is_told_of_batches = False

    def see_batch(self, samples: Optional[int]) -> None:
        """Count a batch of so many samples; ``None`` where that cannot be told."""
        self._is_told_of_batches = True
        self._batches += 1
        self._samples += math.nan if samples is None else samples

    def count_step(self, step: int) -> int:
        """Count a step of this rank, after ``step`` of the rank with the most; return how many of those it is."""
        if not self._is_told_of_batches:
            self._samples, self._batches = self._samples + 1, self._batches + 1
        own, most = self.step_ratio
        began, made = self._epoch[0], self._epoch[1] + 1
        self._epoch = (began, made)
        steps = 1 if most == 1 else max(0, began + made * most // own - step)
        self.missed_steps += steps - 1
        self._skipped += steps - 1
        return steps

    def skipped(self) -> int:
        """Return how many steps those of this rank have stood for beside themselves, since it was last asked."""
        skipped, self._skipped = self._skipped, 0
        return skipped

    def begin_epoch(self, step: int) -> None:
        """Count this rank's steps of an epoch from here on."""
        self._epoch = (step, 0)

    def status(self, step: int, resting: Collection[str], is_stale: bool = True, place: int = 0) -> RankStatus:
        """Return what this rank tells before an exchange that begins now."""
        flags = sum(flag.is_noted << bit for bit, flag in enumerate(self.flags))
        counts = (self._samples, self._batches, step, self.missed_steps)
        return RankStatus(place, *counts, is_stale, flags, crc32(repr(sorted(resting)).encode()))

    def begin_exchange(self) -> None:
        """Count batches for the next exchange."""
        self._samples = self._batches = 0.0

    def tell(self, status: RankStatus) -> list[RankStatus]:
        """Tell all ranks and return what each tells; on the worker."""
        return [RankStatus(*row) for row in self.collectives.gather_numbers(status).tolist()]

    def weight(self, everywhere: Sequence[RankStatus]) -> float:
        """Return how much the change of this rank counts."""
        counts = [(told.samples, told.batches) for told in everywhere]
        return _weight(counts, self.collectives.rank, self.ranks_in_step)

    def polls(self, flag: Any) -> bool:
        """Return whether an exchange that was applied brought a flag; ``False`` once it has been asked."""
        bit = 1 << self.flags.index(flag)
        is_heard, self.heard = bool(self.heard & bit), self.heard & ~bit
        return is_heard

    def answer(self) -> None:
        """Answer what has been heard, on a rank that waits for others."""
        while before := self.heard:
            for flag in list(self.flags):
                if flag.heard():
                    flag.answer()
            if self.heard == before:
                self.heard = 0  # of flags that have been taken away

    def end(self, everywhere: Sequence[RankStatus]) -> None:
        """Know that all ranks have met."""
        self.are_uneven = len({told.step for told in everywhere}) > 1 or any(told.missed_steps for told in everywhere)
        self.missed_steps = 0

    def state(self) -> dict[str, tuple[float, float]]:
        """Return what this rank goes on from."""
        return {"epoch": self._epoch, "seen": (self._samples, self._batches)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        (self._samples, self._batches), self._epoch = state["seen"], state["epoch"]
        self.missed_steps = self._skipped = 0
        self.are_uneven = False


def _weight(everywhere: Sequence[tuple[float, float]], rank: int, in_step: int = 1) -> float:
    """Return how much a change counts, 1 on average: by samples, or by batches unless all know their samples.

    So many ranks that train ``in_step`` have one change, which counts by what all of them have seen.

    >>> [_weight([(6, 2), (2, 2)], rank) for rank in (0, 1)]
    [1.5, 0.5]
    >>> [_weight([(math.nan, 3), (2, 1)], rank) for rank in (0, 1)]
    [1.5, 0.5]
    >>> [_weight([(4, 1), (2, 1), (1, 1), (1, 1)], rank, in_step=2) for rank in range(4)]
    [1.5, 1.5, 0.5, 0.5]
    >>> _weight([(0, 0), (0, 0)], rank=0)  # steps without a batch
    1.0
    """
    samples, batches = ([row[column] for row in everywhere] for column in (0, 1))
    counts = batches if math.isnan(math.fsum(samples)) else samples
    total, first = math.fsum(counts), rank - rank % in_step
    return len(counts) / in_step * math.fsum(counts[first : first + in_step]) / total if total else 1.0
