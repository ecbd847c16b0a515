"""Facts of one step on this rank: how much was sent, and how long it took."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple, Union

import torch
from torch import Tensor

from lightning_sparse.compressors.group_selection import FlatSelection, GroupSelection
from lightning_sparse.engine.observe.marks import StepMarks
from lightning_sparse.engine.observe.samples import sent_count, union_count


class StepVolume(NamedTuple):
    """How much one step sent and when, without a tensor of what arrived, so that many steps can be kept.

    Attributes:
        elements: gradient elements that were to be exchanged.
        sent: of them, those that this rank sent; a tensor is a count that the device has not been asked for.
        union: those that any rank sent; ``None`` where only what arrived could tell.
        wire_bytes: as in :class:`StepFacts`, like the following.
        node_bytes: see there.
        marks: see there.
    """

    elements: int
    sent: Union[int, Tensor]
    union: Union[int, Tensor, None]
    wire_bytes: int
    node_bytes: int
    marks: StepMarks


class StepFacts:
    """Facts of one step on this rank.

    Args:
        node_ranks: how many ranks share a gradient; 1 where there is one level.

    Attributes:
        elements: gradient elements that were to be exchanged; with two levels those of this rank's shares.
        wire_bytes: bytes that this rank handed to collectives, indices, counts, flags and padding included.
        node_bytes: those of them that were for ranks of the same node, with two levels.
        marks: when it happened.
        deltas: by parameter name, the ``delta`` of LAGS' assumption (tensors of one element); empty if not sampled.
    """

    def __init__(self, node_ranks: int = 1) -> None:
        self._node_ranks = node_ranks
        self.elements = 0
        self.wire_bytes = 0
        self.node_bytes = 0
        self.marks = StepMarks()
        self.deltas: dict[str, Tensor] = {}
        self._sent: list[Union[int, Tensor]] = []  # tensors are counts that the device has not been asked for
        # Counts, those of a device as tensors; or what has to be sorted for them, until the step ends whole.
        self._arrived: list[Union[int, Tensor, FlatSelection]] = []

    def add_selection(self, selection: GroupSelection) -> None:
        """Record what this rank sends of a group."""
        self.elements += selection.numel
        self._sent.append(selection.numel if selection.is_whole else sent_count(selection.flat()))

    def add_means(self, means: GroupSelection) -> None:
        """Record what arrived from all ranks for a group."""
        if means.is_whole:
            self._arrived.append(means.numel)
        else:
            flat = means.flat()
            self._arrived.append(torch.count_nonzero(flat.values) if len(flat.values) == 1 else flat)

    def close(self) -> None:
        """Hold no more of the step than a byte for each of its elements, however many ranks there are."""
        self._arrived = [_held(arrived) if isinstance(arrived, FlatSelection) else arrived for arrived in self._arrived]

    def union(self) -> int:
        """Return how many elements any rank has sent, which costs a sort of what arrived."""
        return sum(map(_union_of, self._arrived))

    def volume(self) -> StepVolume:
        """Return how much was sent, and when, as far as it is known without a look at the device."""
        counts = [
            each for each in self._arrived if isinstance(each, int) or (isinstance(each, Tensor) and not each.dim())
        ]
        union = sum(counts) if len(counts) == len(self._arrived) else None
        return StepVolume(self.elements, sum(self._sent), union, self.wire_bytes, self.node_bytes, self.marks)

    def as_stats(self) -> dict[str, float]:
        """Return the public statistics, see :meth:`SparseDDPStrategy.compression_stats`."""
        return mean_stats([self.volume()._replace(union=self.union())], self._node_ranks)


def mean_stats(steps: Sequence[StepVolume], node_ranks: int) -> dict[str, float]:
    """Return the public statistics of several steps: of times and bytes their means; on a device this waits for them.

    Args:
        steps: one at least.
        node_ranks: how many ranks share a gradient; 1 where there is one level.

    Returns:
        those that are known of all of the steps: ``union_density`` may be missing.
    """
    elements = sum(step.elements for step in steps)
    wire_bytes = fmean(step.wire_bytes for step in steps)
    dense_bytes = 4.0 * elements * node_ranks / len(steps)
    unions = [step.union for step in steps if step.union is not None]
    marks = [step.marks for step in steps]
    return {
        "density": float(sum(step.sent for step in steps)) / max(1, elements),
        **({"union_density": float(sum(unions)) / max(1, elements)} if len(unions) == len(steps) else {}),
        "wire_bytes": wire_bytes,
        **({} if node_ranks == 1 else {"link_bytes": wire_bytes - fmean(step.node_bytes for step in steps)}),
        "dense_bytes": dense_bytes,
        "compression_ratio": dense_bytes / wire_bytes if wire_bytes else 1.0,
        "select_seconds": fmean(each.seconds("select", "encode") for each in marks),
        "exchange_seconds": fmean(each.seconds("exchange") for each in marks),
        "exposed_seconds": fmean(each.exposed_seconds for each in marks),
    }


def _held(arrived: FlatSelection) -> Union[Tensor, FlatSelection]:
    """Return what arrived of a group, or where something did, uint8 ``[numel]``, if that takes less memory."""
    if arrived.values.nbytes + arrived.indices.nbytes <= arrived.numel:
        return arrived
    sent = (arrived.values != 0).flatten().byte()
    return sent.new_zeros(arrived.numel).scatter_reduce_(0, arrived.indices.flatten(), sent, "amax")


def _union_of(arrived: Union[int, Tensor, FlatSelection]) -> int:
    if isinstance(arrived, FlatSelection):
        return union_count(arrived)
    return int(arrived.sum()) if isinstance(arrived, Tensor) else arrived


def dense_stats(elements: int, total_wire_bytes: int) -> dict[str, float]:
    """Return the public statistics of a step that was left to plain DDP, as far as they are known."""
    sizes = dict.fromkeys(("wire_bytes", "dense_bytes"), 4.0 * elements)
    seconds = dict.fromkeys(("select_seconds", "exchange_seconds", "exposed_seconds"), math.nan)
    whole = dict.fromkeys(("density", "union_density", "compression_ratio"), 1.0)
    return {**whole, **sizes, **seconds, "total_wire_bytes": float(total_wire_bytes)}
