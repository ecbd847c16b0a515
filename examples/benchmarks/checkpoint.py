"""Measure what a checkpoint costs that holds what the ranks keep, beside Lightning's own with as many bytes.

Two ranks on this machine, over loopback; no root needed::

    python examples/benchmarks/checkpoint.py

Both are written in turn by the same processes. Lightning's is one file with all that the ranks keep in it, written by
rank 0 alone; what it would take to gather it there is not counted, nor does it wait until the file is on the disk.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from models import BenchmarkModule, million_layers
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.plugins import TorchCheckpointIO
from rows import ROWS
from training import RANKS, on_each_rank, train

_DEFAULT_ROW = "sparse_topk 0.01"
_STEPS = 2  # after which residuals exist
_OURS = "sparse, every rank its own"
_GATHERED = "Lightning, as many bytes"
_PLAIN = "Lightning, without what ranks keep"


class Cost(NamedTuple):
    """What it costs to save once.

    Attributes:
        size: bytes on the disk.
        seconds: until every rank goes on, median of the repeats.
    """

    size: int
    seconds: float


class SaveWatch(Callback):
    """Save in turn in every way, after the last step.

    Args:
        folder: where to.
        repeats: how many times.

    Attributes:
        costs: what was measured, by way.
    """

    def __init__(self, folder: Path, repeats: int) -> None:
        self.costs: dict[str, Cost] = {}
        self._folder = folder
        self._repeats = repeats

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure."""
        if trainer.global_step < _STEPS:
            return
        path = self._folder / "ours.ckpt"
        trainer.save_checkpoint(path)
        own = torch.load(path, weights_only=True)
        parts = [torch.load(part, weights_only=True) for part in sorted(self._folder.rglob("rank_*.pt"))]
        ways: dict[str, tuple[Path, Callable[[], None]]] = {
            _OURS: (path, lambda: trainer.save_checkpoint(path)),
            _GATHERED: _lightning(self._folder / "gathered.ckpt", {**own, "ranks": parts}),
            _PLAIN: _lightning(self._folder / "plain.ckpt", own),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(self._repeats):
            for way, (_, save) in ways.items():
                dist.barrier()
                start = time.perf_counter()
                save()
                dist.barrier()
                seconds[way].append(time.perf_counter() - start)
        self.costs = {way: Cost(size_of(ways[way][0]), statistics.median(seconds[way])) for way in ways}


def _lightning(path: Path, content: dict[str, Any]) -> tuple[Path, Callable[[], None]]:
    def save() -> None:
        if dist.get_rank() == 0:
            TorchCheckpointIO().save_checkpoint(content, path)

    return path, save


def size_of(path: Path) -> int:
    """Return the bytes of a checkpoint file and of the folder that belongs to it."""
    files = [path, *Path(f"{path}.sparse").rglob("rank_*.pt")]
    return sum(file.stat().st_size for file in files)


def as_text(costs: Mapping[str, Cost]) -> str:
    """Write a table; ratios are to Lightning's with as many bytes."""
    reference = costs[_GATHERED]
    lines = [f"{'':36s}{'MB':>8s}{'seconds':>10s}{'bytes / Lightning':>20s}{'seconds / Lightning':>22s}"]
    for way, cost in costs.items():
        ratios = cost.size / reference.size, cost.seconds / reference.seconds
        lines.append(f"{way:36s}{cost.size / 1e6:8.1f}{cost.seconds:10.3f}{ratios[0]:20.2f}{ratios[1]:22.2f}")
    return "\n".join(lines)


def _train_rank(row: str, layers: int, repeats: int, folder: str) -> dict[str, Cost]:
    watch = SaveWatch(Path(folder), repeats)
    train(ROWS[row], BenchmarkModule(million_layers(layers)), RANKS, _STEPS, [watch])
    return watch.costs


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--elements", type=int, default=5, help="million elements of the model")
    parser.add_argument("--row", choices=[row for row in ROWS if row.startswith("sparse")], default=_DEFAULT_ROW)
    parser.add_argument("--repeats", type=int, default=7, help="saves of each kind")
    parser.add_argument("--folder", help="where to write, on the disk that is to be measured")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        costs, *_ = on_each_rank(_train_rank, options.row, options.elements, options.repeats, folder)
    print(f"{RANKS} ranks, torch {torch.__version__}, {options.elements} million elements, {options.row}")
    print(as_text(costs))


if __name__ == "__main__":
    main()
