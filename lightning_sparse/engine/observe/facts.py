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
from lightning_sparse.schedule.cost.network import dense_bytes


class StepVolume(NamedTuple):
    """How much one step sent and when, without a tensor of what arrived, so that many steps can be kept.

    Attributes:
        elements: gradient elements that were to be exchanged.
        sent: of them, those that this rank sent; a tensor is a count that the device has not been asked for.
        union: those that any rank sent; ``None`` where only what arrived could tell.
        wire_bytes: as in :class:`StepFacts`, like the following.
        node_bytes: see there.
        dense_bytes: see there.
        marks: see there.
    """

    elements: int
    sent: Union[int, Tensor]
    union: Union[int, Tensor, None]
    wire_bytes: float
    node_bytes: float
    dense_bytes: float
    marks: StepMarks


class StepFacts:
    """Facts of one step on this rank.

    Args:
        ranks: of the training.
        node_ranks: how many of them share a gradient; 1 where there is one level.

    Attributes:
        elements: gradient elements that were to be exchanged; with two levels those of this rank's shares.
        wire_bytes: bytes that left this rank, as :func:`~lightning_sparse.schedule.cost.network.sent_bytes` counts
            them, indices, counts, flags and padding included.
        node_bytes: those of them that were for ranks of the same node, with two levels.
        covered_steps: optimizer steps that the exchange is about, more than one in rounds of local steps.
        marks: when it happened.
        deltas: by parameter name, the ``delta`` of LAGS' assumption (tensors of one element); empty if not sampled.
    """

    def __init__(self, ranks: int, node_ranks: int = 1) -> None:
        self._ranks = ranks
        self._node_ranks = node_ranks
        self.elements = 0
        self.wire_bytes = 0.0
        self.node_bytes = 0.0
        self.covered_steps = 1
        self.marks = StepMarks()
        self.deltas: dict[str, Tensor] = {}
        self._sent: list[Union[int, Tensor]] = []  # tensors are counts that the device has not been asked for
        # Counts, those of a device as tensors; or what has to be sorted for them, until the step ends whole.
        self._arrived: list[Union[int, Tensor, FlatSelection]] = []

    @property
    def dense_bytes(self) -> float:
        """Bytes that would have left this rank in DDP's all-reduces of fp32 gradients."""
        return dense_bytes(self.elements * self._node_ranks * self.covered_steps, self._ranks)

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
        sizes = (self.wire_bytes, self.node_bytes, self.dense_bytes)
        return StepVolume(self.elements, sum(self._sent), union, *sizes, self.marks)

    def as_stats(self) -> dict[str, float]:
        """Return the public statistics, see :meth:`SparseDDPStrategy.compression_stats`."""
        return mean_stats([self.volume()._replace(union=self.union())], self._node_ranks > 1)


def mean_stats(steps: Sequence[StepVolume], has_levels: bool) -> dict[str, float]:
    """Return the public statistics of several steps: of times and bytes their means; on a device this waits for them.

    Args:
        steps: one at least.
        has_levels: whether some bytes stay in the node.

    Returns:
        those that are known of all of the steps: ``union_density`` may be missing.
    """
    elements = sum(step.elements for step in steps)
    wire_bytes = fmean(step.wire_bytes for step in steps)
    dense = fmean(step.dense_bytes for step in steps)
    unions = [step.union for step in steps if step.union is not None]
    marks = [step.marks for step in steps]
    return {
        "density": float(sum(step.sent for step in steps)) / max(1, elements),
        **({"union_density": float(sum(unions)) / max(1, elements)} if len(unions) == len(steps) else {}),
        "wire_bytes": wire_bytes,
        **({"link_bytes": wire_bytes - fmean(step.node_bytes for step in steps)} if has_levels else {}),
        "dense_bytes": dense,
        "compression_ratio": compression_ratio(dense, wire_bytes),
        "select_seconds": fmean(each.seconds("select", "encode") for each in marks),
        "exchange_seconds": fmean(each.seconds("exchange") for each in marks),
        "exposed_seconds": fmean(each.exposed_seconds for each in marks),
    }


def compression_ratio(dense: float, sent: float) -> float:
    """Return how many times fewer bytes were sent than DDP would have sent; 1 where nothing travels."""
    return dense / sent if sent else 1.0


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


def plain_stats(sent: float) -> dict[str, float]:
    """Return the public statistics of a step of so many bytes that was left to plain DDP, as far as they are known."""
    sizes = dict.fromkeys(("wire_bytes", "dense_bytes"), sent)
    seconds = dict.fromkeys(("select_seconds", "exchange_seconds", "exposed_seconds"), math.nan)
    whole = dict.fromkeys(("density", "union_density", "compression_ratio"), 1.0)
    return {**whole, **sizes, **seconds}
