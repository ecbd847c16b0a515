"""Facts of one step on this rank, and of all of them: how much was sent, and how long it took."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean
from time import perf_counter
from typing import Optional, Union

from torch import Tensor

from lightning_sparse.compressors.group_selection import FlatSelection, GroupSelection
from lightning_sparse.compressors.selection import Selection
from lightning_sparse.engine.observe.marks import StepMarks
from lightning_sparse.schedule.cost.network import dense_bytes


class StepFacts:
    """Facts of one step, without a tensor of what arrived, so that many steps can be kept."""

    def __init__(self, ranks: int, node_ranks: int = 1) -> None:
        self._ranks = ranks
        self._node_ranks = node_ranks
        self.elements = 0.0  # of gradients to be exchanged; with two levels those of this rank's shares
        self.wire_bytes = 0.0  # by ``sent_bytes``, indices, counts, flags and padding included
        self.node_bytes = 0.0  # those of them for ranks of the same node, with two levels
        self.covered_steps = 1  # optimizer steps that the exchange is about, more than one in rounds of local steps
        self.is_plain = False  # plain DDP made the exchange, whose times are not known
        self.marks = StepMarks()
        self.deltas: dict[str, Tensor] = {}  # of LAGS' assumption, by parameter (one element each), if sampled
        self._sent: list[Union[float, Tensor]] = []  # tensors are counts that the device has not been asked for

    @classmethod
    def of_plain_ddp(cls, numel: int, ranks: int, node_ranks: int) -> "StepFacts":
        """Return those of an all-reduce of all gradients, whose ring leaves each node once."""
        facts = cls(ranks, node_ranks)
        facts.is_plain, facts.elements = True, numel / node_ranks
        facts._sent.append(facts.elements)
        facts.wire_bytes = facts.dense_bytes
        facts.node_bytes = facts.wire_bytes * (node_ranks - 1) / node_ranks
        return facts

    @property
    def dense_bytes(self) -> float:
        """Bytes that would have left this rank in DDP's all-reduces of fp32 gradients."""
        return dense_bytes(self.elements * self._node_ranks * self.covered_steps, self._ranks)

    @property
    def sent(self) -> Union[float, Tensor]:
        """How many elements this rank sent, without asking the device for it."""
        return sum(self._sent)

    def add_selection(self, selection: GroupSelection) -> None:
        """Record what this rank sends of a group."""
        self.elements += selection.numel
        self._sent.append(selection.numel if selection.is_whole else sent_count(selection.flat()))


def mean_stats(steps: Sequence[StepFacts], has_levels: bool) -> dict[str, float]:
    """Return the public statistics of one step or more, of times and bytes their means; this waits for a device.

    Times are those of the steps that plain DDP did not make, NaN if it made all.
    """
    wire_bytes = fmean(step.wire_bytes for step in steps)
    dense = fmean(step.dense_bytes for step in steps)
    marks = [step.marks for step in steps if not step.is_plain]

    def mean(seconds: Callable[[StepMarks], float]) -> float:
        return fmean(map(seconds, marks)) if marks else math.nan

    return {
        "density": float(sum(step.sent for step in steps)) / max(1, sum(step.elements for step in steps)),
        "wire_bytes": wire_bytes,
        **({"link_bytes": wire_bytes - fmean(step.node_bytes for step in steps)} if has_levels else {}),
        "dense_bytes": dense,
        "compression_ratio": compression_ratio(dense, wire_bytes),
        "select_seconds": mean(lambda each: each.seconds("select", "encode")),
        "exchange_seconds": mean(lambda each: each.seconds("exchange")),
        "exposed_seconds": mean(lambda each: each.exposed_seconds),
    }


def compression_ratio(dense: float, sent: float) -> float:
    """Return how many times fewer bytes were sent than DDP would have sent; 1 where nothing travels."""
    return dense / sent if sent else 1.0


class Totals:
    """Add up what the steps of a training sent, and how long they took, without a wait for a device."""

    def __init__(self) -> None:
        self.steps = 0  # of optimizers, those left to plain DDP included
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
        if facts.is_plain:
            self._is_plain = True
            return
        self._unread.append(facts.marks)
        while self._unread and self._unread[0].have_passed:
            self._exposed_seconds += self._unread.popleft().exposed_seconds

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
        """Return the public statistics, with ``waited_seconds`` exposed where given; on a device this may wait."""
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


def sent_count(selection: Union[Selection, FlatSelection]) -> Union[int, Tensor]:
    """Return how many elements a rank sends, without asking the device for it."""
    return selection.values.numel() if selection.filled is None else selection.filled.sum()
