"""Measure the memory of a training process for each parameter element, plain DDP beside the sparse strategy.

Two ranks on this machine, over loopback; no root needed::

    python examples/benchmarks/memory.py

What is measured is resident memory as Linux counts it, whoever allocated it, with the C library told to return freed
tensors at once: otherwise what it keeps for later hides differences of a byte for each element. Every row trains two
models, a small and a large one, in fresh processes: the difference in bytes divided by the difference in elements is
what an element costs, free of what any process needs.
"""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from models import BenchmarkModule, million_layers
from pytorch_lightning import Callback, LightningModule, Trainer
from rows import DDP, NO_COMMUNICATION, ROWS
from training import RANKS, on_each_rank, train

_BUCKET_VIEW = "ddp, bucket view"
_DEFAULT_ROWS = [NO_COMMUNICATION, DDP, _BUCKET_VIEW, "sparse_dense", "sparse_topk 0.01", "sparse_topk 0.001"]
_WARM_UP = 4  # steps after which DDP has rebuilt its buckets and residuals exist
_STEPS = 5
_MMAP_THRESHOLD = "65536"  # bytes; larger tensors get pages of their own, which are returned when they are freed
_RESET_PEAK = "5"  # to /proc/self/clear_refs, see proc(5)


class Memory(NamedTuple):
    """Bytes, or bytes for each element.

    Attributes:
        held: resident at the end of a batch, gradients included.
        peak: the most that was resident at once during a batch.
    """

    held: float
    peak: float


class MemoryWatch(Callback):
    """Read this process's resident memory during the last steps.

    Args:
        warm_up: steps before them.

    Attributes:
        memory: what was seen at the end of the last batch, in bytes.
    """

    def __init__(self, warm_up: int) -> None:
        self._warm_up = warm_up
        self.memory = Memory(0.0, 0.0)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Forget the peak of the warm-up, or read."""
        if trainer.global_step == self._warm_up:
            Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
        self.memory = Memory(_status_bytes("VmRSS"), _status_bytes("VmHWM"))


def per_element(small: Memory, large: Memory, small_elements: int, large_elements: int) -> Memory:
    """Return the bytes that one element more takes."""
    elements = large_elements - small_elements
    return Memory((large.held - small.held) / elements, (large.peak - small.peak) / elements)


def as_text(rows: Mapping[str, Memory]) -> str:
    """Write a table; extras are differences of peaks."""
    lines = [f"{'bytes for each element':24s}{'held':>8s}{'peak':>8s}{'peak - ddp':>14s}{'peak - bucket view':>22s}"]
    for row, memory in rows.items():
        extras = [memory.peak - rows[other].peak for other in (DDP, _BUCKET_VIEW)]
        lines.append(f"{row:24s}{memory.held:8.2f}{memory.peak:8.2f}{extras[0]:14.2f}{extras[1]:22.2f}")
    return "\n".join(lines)


def _status_bytes(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024.0 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}: this benchmark needs Linux")


def _train_rank(row: str, layers: int) -> Memory:
    local_steps = ROWS[row].local_steps  # an exchange has to come before and after the warm-up
    watch = MemoryWatch(_WARM_UP + local_steps)
    train(ROWS[row], BenchmarkModule(million_layers(layers)), RANKS, _WARM_UP + _STEPS + 2 * local_steps, [watch])
    return watch.memory


def _measure(row: str, layers: int) -> Memory:
    seen = on_each_rank(_train_rank, row, layers)
    return Memory(max(memory.held for memory in seen), max(memory.peak for memory in seen))


def main() -> None:
    """Measure the rows and print the table."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--small", type=int, default=1, help="million elements of the small model")
    parser.add_argument("--large", type=int, default=20, help="million elements of the large model")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=_DEFAULT_ROWS, metavar="ROW", help=f"{list(ROWS)}")
    options = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = _MMAP_THRESHOLD  # read by the C library of the processes that follow
    print(f"{RANKS} ranks, torch {torch.__version__}, fp32, {options.small} and {options.large} million elements")
    rows = {}
    for row in dict.fromkeys([DDP, _BUCKET_VIEW, *options.rows]):
        small, large = (_measure(row, layers) for layers in (options.small, options.large))
        rows[row] = per_element(small, large, options.small * 10**6, options.large * 10**6)
        print(f"  {row}: held {rows[row].held:.2f}, peak {rows[row].peak:.2f}", flush=True)
    print(as_text({row: rows[row] for row in sorted(rows, key=list(ROWS).index)}))


if __name__ == "__main__":
    main()
