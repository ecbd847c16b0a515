"""Exchanges between ranks for callbacks: numbers, counts, objects, and how clocks differ."""

import json
import math
import time
import zlib
from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.engine.observe.timeline import ClockOffset, clock_offset
from lightning_sparse.strategy.trainer import SparseDDPStrategy

# The slowest rank is the one that all wait for, and samples of all ranks are trained on.
REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "exposed_seconds": max,
    "exposed_share": max,
    "step_samples": math.fsum,
}
_ROUNDS = 8


def gather_rows(strategy: SparseDDPStrategy, numbers: Sequence[float]) -> list[list[float]]:
    """Gather equally many numbers from every rank, on every rank; the host waits for them."""
    rows: list[list[float]] = _gather(strategy, torch.tensor(numbers, dtype=torch.float64)).tolist()
    return rows


def gather_counts(strategy: SparseDDPStrategy, counts: Tensor) -> Tensor:
    """Gather int64 ``[n]`` from every rank as ``[ranks, n]``, on every rank, on the CPU."""
    return _gather(strategy, counts)


def reduce_rows(names: Sequence[str], rows: Sequence[Sequence[float]]) -> dict[str, float]:
    """Make one number of those of all ranks: the mean, unless :data:`REDUCTIONS` says otherwise.

    Example::

        >>> reduce_rows(["density", "exposed_seconds"], [[0.01, 2.0], [0.03, 1.0]])
        {'density': 0.02, 'exposed_seconds': 2.0}
    """
    return {name: REDUCTIONS.get(name, mean)(column) for name, column in zip(names, zip(*rows))}


def sum_over_ranks(strategy: SparseDDPStrategy, counts: Tensor) -> Tensor:
    """Add up counts over ranks; on every rank, on the CPU."""
    return _sum(strategy, counts.to(strategy.root_device, copy=True))


def gather_objects(strategy: SparseDDPStrategy, plain: Any) -> list[Any]:
    """Gather what JSON can write from every rank, on every rank; the host waits for it."""
    content = zlib.compress(json.dumps(plain).encode())
    sizes = [int(size) for (size,) in gather_rows(strategy, [len(content)])]
    padded = bytearray(content.ljust(max(sizes), b"\0"))
    rows = _gather(strategy, torch.frombuffer(padded, dtype=torch.uint8))
    return [json.loads(zlib.decompress(row[:size].numpy().tobytes())) for row, size in zip(rows, sizes)]


def clock_offsets(strategy: SparseDDPStrategy) -> list[ClockOffset]:
    """Find out, on every rank, how far each rank's clock (``time.perf_counter``) is ahead of that of rank 0.

    A few small collectives, which no rank leaves before all have entered, bound it from both sides.
    """
    times: list[float] = []
    for _ in range(_ROUNDS):
        times.append(time.perf_counter())
        gather_rows(strategy, [0.0])
        times.append(time.perf_counter())
    rows = gather_rows(strategy, times)
    return [clock_offset(rows[0][::2], rows[0][1::2], row[::2], row[1::2]) for row in rows]


def _gather(strategy: SparseDDPStrategy, row: Tensor) -> Tensor:
    # Lightning's all_gather warns with torch 2.13. A sum over ranks, of rows that only one rank fills, is the same to
    # the bit, and the rows are small.
    rows = torch.zeros(strategy.world_size, row.numel(), dtype=row.dtype, device=strategy.root_device)
    rows[strategy.global_rank] = row.to(strategy.root_device)
    return _sum(strategy, rows)


def _sum(strategy: SparseDDPStrategy, tensor: Tensor) -> Tensor:
    total = strategy.reduce(tensor, reduce_op="sum")
    assert isinstance(total, Tensor)
    return total.cpu()
