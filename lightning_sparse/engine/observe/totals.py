"""Sums over all steps of a training on this rank."""

import math
from collections import deque
from time import perf_counter
from typing import Optional

from lightning_sparse.engine.observe.facts import StepFacts, compression_ratio
from lightning_sparse.engine.observe.marks import StepMarks


class Totals:
    """Add up what the steps of a training sent, and how long they took, without a wait for a device.

    Attributes:
        steps: of optimizers, those left to plain DDP included.
        wire_bytes: that left this rank in them, see :class:`StepFacts`.
        node_bytes: those of them that were for ranks of the same node, with two levels.
        dense_bytes: that DDP's would have been.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.wire_bytes = self.node_bytes = self.dense_bytes = 0.0
        self._exposed_seconds = 0.0
        self._unread: deque[StepMarks] = deque()  # of steps that a device may not have come to the end of
        self._is_plain = False
        self._seconds = 0.0
        self._border = perf_counter()

    def add(self, facts: StepFacts) -> None:
        """Add a step whose exchange has ended, as far as the host knows."""
        self.wire_bytes += facts.wire_bytes
        self.node_bytes += facts.node_bytes
        self.dense_bytes += facts.dense_bytes
        self._unread.append(facts.marks)
        while self._unread and self._unread[0].have_passed:
            self._exposed_seconds += self._unread.popleft().exposed_seconds

    def add_plain(self, dense_bytes: float, node_ranks: int = 1) -> None:
        """Add the exchange of a step that is left to plain DDP, whose ring leaves each node once."""
        self.wire_bytes += dense_bytes
        self.node_bytes += dense_bytes * (node_ranks - 1) / node_ranks
        self.dense_bytes += dense_bytes
        self._is_plain = True

    def resume(self) -> None:
        """Count time from here on: what went before, such as validation, is no part of a step."""
        self._border = perf_counter()

    def end_step(self) -> None:
        """Count a step of an optimizer."""
        border, self._border = self._border, perf_counter()
        if not self._is_plain:  # of which nobody knows what was exposed
            self._seconds += self._border - border
        self._is_plain = False
        self.steps += 1

    def as_stats(self, has_levels: bool, waited_seconds: Optional[float] = None) -> dict[str, float]:
        """Return the public statistics; on a device this waits for the steps that have not been read yet.

        Args:
            has_levels: whether some bytes stay in the node.
            waited_seconds: exposed in all steps, where their marks do not tell.
        """
        exposed = waited_seconds
        if exposed is None:
            exposed = self._exposed_seconds + sum(marks.exposed_seconds for marks in self._unread)
        stats = {
            "total_wire_bytes": self.wire_bytes,
            "total_dense_bytes": self.dense_bytes,
            "total_compression_ratio": compression_ratio(self.dense_bytes, self.wire_bytes),
        }
        if has_levels:
            stats["total_link_bytes"] = self.wire_bytes - self.node_bytes
        if self.steps:
            stats["total_steps"] = float(self.steps)
            stats["exposed_share"] = exposed / self._seconds if self._seconds else math.nan
        return stats
