"""The model as one flat vector, cut into blocks, and runs of blocks into partitions, one for each rank."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

_BLOCKS = 1024  # published: enough for balance, few enough to keep a load for each
_BLOCK_MULTIPLE = 32  # elements, published; no block is smaller where the model has more elements than that for a rank
_IMBALANCE = 1.05  # published: above it a partition has too many elements selected,
_INVERSE_IMBALANCE = 0.95238  # and below this too few


class Partitions(NamedTuple):
    """Partitions of the flat model, one for each rank.

    Attributes:
        edges: where each block starts in the flat vector, ascending, and where the last one ends.
        cuts: for each partition its first block, ascending, and the number of blocks.
    """

    edges: tuple[int, ...]
    cuts: tuple[int, ...]

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(self.edges) - 1

    def owned(self, rank: int, step: int) -> tuple[int, int]:
        """Return the first element of a rank's partition in a step, and the one after the last.

        In every step each partition belongs to one rank, and every rank visits every partition in as many steps as
        there are ranks.

        Example::

            >>> partitions = Partitions(edges=(0, 4, 8, 12), cuts=(0, 1, 3))
            >>> partitions.owned(rank=0, step=0), partitions.owned(rank=0, step=1)
            ((0, 4), (4, 12))
        """
        partition = (step + rank) % (len(self.cuts) - 1)
        return self.edges[self.cuts[partition]], self.edges[self.cuts[partition + 1]]

    def block_loads(self, positions: Tensor) -> Tensor:
        """Count how many of some positions in the flat vector (int64, on any device) lie in each block."""
        edges = torch.tensor(self.edges[1:-1], dtype=torch.int64, device=positions.device)
        blocks = torch.bucketize(positions, edges, right=True)
        loads = torch.zeros(self.blocks, dtype=torch.int64, device=positions.device)
        return loads.index_add_(0, blocks, torch.ones_like(blocks)).cpu()


def even_cuts(total: int, parts: int) -> tuple[int, ...]:
    """Cut ``total`` things into parts that differ by one at most, the larger ones first.

    Example::

        >>> even_cuts(11, 3)
        (0, 4, 8, 11)
    """
    size, larger = divmod(total, parts)
    return tuple(part * size + min(part, larger) for part in range(parts + 1))


def spread_edges(numel: int, ranks: int) -> tuple[int, ...]:
    """Cut a model into blocks that differ by one element at most.

    Example::

        >>> spread_edges(numel=100, ranks=2)
        (0, 33, 66, 100)
    """
    blocks = max(ranks, min(_BLOCKS, numel // _BLOCK_MULTIPLE))
    return tuple(block * numel // blocks for block in range(blocks + 1))


def published_edges(numel: int, ranks: int) -> tuple[int, ...]:
    """Cut a model into 1024 blocks of a multiple of 32 elements; what is over goes to the last one.

    A model of less than 1024 times 32 elements, of which the published code would make empty blocks, gets fewer.
    """
    blocks = max(ranks, min(_BLOCKS, numel // _BLOCK_MULTIPLE))
    size = numel // blocks
    size -= size % _BLOCK_MULTIPLE if size > _BLOCK_MULTIPLE else 0
    return (*range(0, blocks * size, size or 1), numel) if size else spread_edges(numel, ranks)


def balanced_cuts(loads: Tensor, ranks: int) -> tuple[int, ...]:
    """Cut blocks into one run for each rank, as equal in load as blocks allow, each of one block at least.

    Args:
        loads: float64 ``[blocks]``, on CPU, not all zero; at least as many as ranks.
        ranks: number of runs.

    Example::

        >>> balanced_cuts(torch.tensor([8.0, 1.0, 1.0, 2.0, 2.0, 2.0]), ranks=2)
        (0, 1, 6)
    """
    blocks = loads.numel()
    reached = torch.cat([loads.new_zeros(1), loads.cumsum(0)])
    targets = torch.arange(1, ranks, dtype=loads.dtype) * (reached[-1] / ranks)
    after = torch.searchsorted(reached, targets).clamp_(1, blocks)
    before = after - 1
    is_nearer = targets - reached[before] < reached[after] - targets
    cuts = [0]
    for rank, nearest in enumerate(torch.where(is_nearer, before, after).tolist(), start=1):
        cuts.append(min(max(nearest, cuts[-1] + 1), blocks - ranks + rank))
    return (*cuts, blocks)


def shifted_cuts(partitions: Partitions, loads: Sequence[int]) -> tuple[int, ...]:
    """Move one block between neighbours of which one has too much load and the other too little, as published.

    One sweep from left to right, each decision seeing what the ones before it have moved; a block is taken to carry the
    average load. No partition falls below a quarter of its even share.

    Args:
        partitions: as they are.
        loads: for each block, the elements selected in the last step.
    """
    cuts = list(partitions.cuts)
    ranks = len(cuts) - 1
    selected = [sum(loads[first:last]) for first, last in pairwise(cuts)]
    average = sum(selected) // ranks
    least = partitions.blocks / (4 * ranks)
    moved_load = int(partitions.edges[1] * sum(selected) / partitions.edges[-1])
    if not average:
        return partitions.cuts
    for left in range(ranks - 1):
        left_load, right_load = selected[left] / average, selected[left + 1] / average
        if left_load > _IMBALANCE and right_load < _INVERSE_IMBALANCE:
            giver, step = left, -1
        elif left_load < _INVERSE_IMBALANCE and right_load > _IMBALANCE:
            giver, step = left + 1, 1
        else:
            continue
        if cuts[giver + 1] - cuts[giver] - 1 < least:
            continue
        cuts[left + 1] += step
        selected[left] += step * moved_load
        selected[left + 1] -= step * moved_load
    return tuple(cuts)
