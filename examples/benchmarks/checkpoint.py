"""Measure what a checkpoint costs that holds what the ranks keep, beside Lightning's own with as many bytes.

Two ranks on this machine, over loopback; no root needed::

    python examples/benchmarks/checkpoint.py

Both are written in turn by the same processes. Lightning's is one file with all that the ranks keep in it, written by
rank 0 alone; what it would take to gather it there is not counted, nor does it wait until the file is on the disk.
"""

import argparse
import logging
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from models import BenchmarkModule, Workload
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.plugins import TorchCheckpointIO
from rows import ROWS
from torch import nn
from torch.nn import functional
from training import train

_DEFAULT_ROW = "sparse_topk 0.01"
_WIDTH = 1000  # a layer has a million elements
_RANKS = 2
_STEPS = 2  # after which residuals exist
_TIMEOUT_SECONDS = 300
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


def _workload(layers: int) -> Workload:
    return Workload(
        network=lambda: nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers))),
        batch=lambda: (torch.randn(4, _WIDTH), torch.randn(4, _WIDTH)),
        loss=functional.mse_loss,
    )


def _train_rank(rank: int, row: str, layers: int, repeats: int, folder: str) -> dict[str, Cost]:
    os.environ.update({"NODE_RANK": str(rank), "LOCAL_RANK": "0"})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=_RANKS)
    watch = SaveWatch(Path(folder), repeats)
    train(ROWS[row], BenchmarkModule(_workload(layers)), _RANKS, _STEPS, [watch])
    dist.barrier()
    dist.destroy_process_group()
    return watch.costs


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--elements", type=int, default=5, help="million elements of the model")
    parser.add_argument("--row", choices=[row for row in ROWS if row.startswith("sparse")], default=_DEFAULT_ROW)
    parser.add_argument("--repeats", type=int, default=7, help="saves of each kind")
    parser.add_argument("--folder", help="where to write, on the disk that is to be measured")
    options = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["training"])
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        ProcessPoolExecutor(_RANKS, mp_context=context) as ranks,
    ):
        given = (options.row, options.elements, options.repeats, folder)
        futures = [ranks.submit(_train_rank, rank, *given) for rank in range(_RANKS)]
        costs, *_ = (future.result(_TIMEOUT_SECONDS) for future in futures)
    print(f"{_RANKS} ranks, torch {torch.__version__}, {options.elements} million elements, {options.row}")
    print(as_text(costs))


if __name__ == "__main__":
    main()
