"""Exchanges between ranks for callbacks, all small; the host waits for them, and every rank must call.

Where ranks have different numbers of batches some would wait for others: there each knows of itself alone.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor

from lightning_sparse.strategy.trainer import SparseDDPStrategy

# The slowest rank is the one that all wait for, and samples of all ranks are trained on.
_REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "exposed_seconds": max,
    "exposed_share": max,
    "step_samples": math.fsum,
}


def gather(strategy: SparseDDPStrategy, row: Tensor) -> Tensor:
    """Gather ``[n]`` from every rank as ``[ranks, n]``, on the CPU."""
    if strategy.has_uneven_batches:
        return row.cpu().unsqueeze(0)
    # Lightning's all_gather warns with torch 2.13. A sum of rows that only one rank fills is the same to the bit.
    rows = torch.zeros(strategy.world_size, row.numel(), dtype=row.dtype, device=strategy.root_device)
    rows[strategy.global_rank] = row.to(strategy.root_device)
    return _sum(strategy, rows)


def gather_rows(strategy: SparseDDPStrategy, numbers: Sequence[float]) -> list[list[float]]:
    """Gather equally many numbers from every rank."""
    rows: list[list[float]] = gather(strategy, torch.tensor(numbers, dtype=torch.float64)).tolist()
    return rows


def mean_over_ranks(strategy: SparseDDPStrategy, numbers: Sequence[float]) -> list[float]:
    """Return the mean over ranks of each of equally many numbers."""
    return list(map(fmean, zip(*gather_rows(strategy, numbers))))


def reduce_over_ranks(strategy: SparseDDPStrategy, mine: Mapping[str, float]) -> dict[str, float]:
    """Return the mean over ranks by name; exposed times are those of the slowest rank, samples those of all."""
    columns = zip(*gather_rows(strategy, list(mine.values())))
    return {name: _REDUCTIONS.get(name, fmean)(column) for name, column in zip(mine, columns)}


def sum_over_ranks(strategy: SparseDDPStrategy, counts: Tensor) -> Tensor:
    """Add up counts over ranks; on the CPU."""
    return _sum(strategy, counts.to(strategy.root_device, copy=True))


def _sum(strategy: SparseDDPStrategy, tensor: Tensor) -> Tensor:
    if strategy.has_uneven_batches:
        return tensor.cpu()
    total = strategy.reduce(tensor, reduce_op="sum")
    assert isinstance(total, Tensor)
    return total.cpu()
