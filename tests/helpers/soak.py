"""Train for long, with everything that a long job does, and see whether anything grows.

    python -m tests.helpers.soak --steps 20000

Two ranks, with a monitor and its logger, new plans, validations and checkpoints. Prints what it saw as a line of JSON,
and ends with an error if memory, files or threads have grown, or replicas have come apart. On the CPU, whose memory is
what is measured.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.callbacks import CompressionMonitor
from lightning_sparse.testing.pool import Pool
from tests.helpers.trainers import Rows, Small, make_trainer, weights

_ROWS = 8000  # 1000 batches an epoch for two ranks
_OFTEN = 20  # times in a run: new plans, validations and checkpoints
_PATIENCE = 60.0  # seconds between the first rank's end, or failure, and the last's
_ALLOWED_MEGABYTES = 20.0  # Python's and glibc's own ups and downs; a leak of one gradient a step would be far more


class Usage(NamedTuple):
    """What a process holds."""

    step: int
    megabytes: float
    threads: int
    files: int


def usage_now(step: int) -> Usage:
    """Look at this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    threads, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    return Usage(step, pages * os.sysconf("SC_PAGE_SIZE") / 1e6, threads, files)


class Watching(Callback):
    """Ask for new plans, and write down what the process holds: after a tenth of the steps, half of them, and all.

    Args:
        steps: of the whole run.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.seen: list[Usage] = []
        self.plans = 0
        self._plan: Any = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy, step = trainer.strategy, trainer.global_step
        self.plans += strategy.exchange_plan() is not self._plan
        self._plan = strategy.exchange_plan()
        if step % max(100, self.steps // _OFTEN) == 0:
            strategy.engine.settle()
            strategy.engine.planner.start_anew()
        if step in (self.steps // 10, self.steps // 2, self.steps):
            for logger in trainer.loggers:
                logger.save()  # TensorBoard's thread opens its file anew for everything it writes
            self.seen.append(usage_now(step))


class Long(Small):
    """A small model with many batches."""

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Rows(_ROWS), batch_size=4)


def soak(rank: int, steps: int, folder: str) -> tuple[list[Usage], int, dict[str, Tensor]]:
    """Train; return what was held, the number of plans, and the weights."""
    often = max(10, steps // _OFTEN)
    watching = Watching(steps)
    # In a folder of its own: Lightning warns on rank 0 of one that the logger has begun to fill.
    saving = ModelCheckpoint(
        f"{folder}/checkpoints", monitor="loss", save_top_k=2, save_last=True, every_n_train_steps=often
    )
    trainer = make_trainer(
        rank,
        SparseDDPStrategy("topk", 0.05),
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        logger=TensorBoardLogger(f"{folder}/logs"),
        enable_checkpointing=True,
        callbacks=[CompressionMonitor(), saving, watching],
        val_check_interval=min(often, 1000),
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
    )
    model = Long()
    trainer.fit(model)
    return watching.seen, watching.plans, weights(model)


def verdict(answers: Any) -> list[str]:
    """Return what has grown since the first look, and what has come apart."""
    found = []
    for rank, (seen, plans, parameters) in enumerate(answers):
        first, last = seen[0], seen[-1]
        if last.megabytes - first.megabytes > _ALLOWED_MEGABYTES:
            found.append(f"rank {rank}: memory grew from {first.megabytes:.1f} to {last.megabytes:.1f} MB")
        if last.threads > first.threads or last.files > first.files:
            found.append(f"rank {rank}: {first} became {last}")
        if plans < 2:
            found.append(f"rank {rank}: {plans} plans were followed, so nothing was planned anew")
        apart = [name for name, value in parameters.items() if not torch.equal(value, answers[0][2][name])]
        found += [f"rank {rank}: {name} differs from rank 0's" for name in apart]
    return found


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=int, default=20_000, help="optimizer steps, at least 300 (default: %(default)s)"
    )
    steps = parser.parse_args().steps
    if steps < 300:
        parser.error(f"--steps {steps} must be at least 300: plans take that long to be made and made anew")
    pool = Pool(2)
    with tempfile.TemporaryDirectory() as folder:
        answers = pool.run(soak, steps, folder, timeout=60.0 + steps, patience=_PATIENCE)
    pool.stop()
    seen = [[look._asdict() for look in looks] for looks, _, _ in answers]
    found = verdict(answers)
    print(json.dumps({"steps": steps, "seen": seen, "plans": [plans for _, plans, _ in answers], "found": found}))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
