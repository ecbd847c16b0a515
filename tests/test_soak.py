"""Long training with all features: memory, threads and files must not grow. `make soak` runs 20 000 steps.

Two ranks on the CPU with a monitor, a logger, new plans, validations and checkpoints.
"""

import gc
import os
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import TensorBoardLogger
from torch.utils.data import DataLoader

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.callbacks import CompressionMonitor
from tests.helpers.trainers import Rows, Small, make_trainer, weights

STEPS = int(os.environ.get("LIGHTNING_SPARSE_SOAK", 300))  # fewer steps do not make two plans
OFTEN = 20  # new plans, validations and checkpoints per run
ALLOWED_MEGABYTES = 20.0  # variation of Python and glibc, far below a leak of one gradient per step


class Usage(NamedTuple):
    step: int
    megabytes: float
    threads: int
    files: int


def usage_now(step):
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    threads, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    return Usage(step, pages * os.sysconf("SC_PAGE_SIZE") / 1e6, threads, files)


class Watching(Callback):
    def __init__(self):
        self.seen = []
        self.plans = 0
        self._plan = None

    def on_train_batch_end(self, trainer, *arguments):
        strategy, step = trainer.strategy, trainer.global_step
        self.plans += strategy.exchange_plan() is not self._plan
        self._plan = strategy.exchange_plan()
        if step % max(100, STEPS // OFTEN) == 0:
            strategy.engine.worker.drain()
            strategy.engine._planner._order = ()
            strategy.engine._planner.start()
        if step in (STEPS // 10, STEPS // 2, STEPS):
            for logger in trainer.loggers:
                logger.save()  # TensorBoard's thread reopens its file for each write
            self.seen.append(usage_now(step))


class Long(Small):
    def train_dataloader(self):
        return DataLoader(Rows(8000), batch_size=4)


def soak(rank, folder):
    often, watching, model = max(10, STEPS // OFTEN), Watching(), Long()
    # A separate folder, because Lightning warns on rank 0 if the logger has written to the same folder.
    saving = ModelCheckpoint(
        f"{folder}/checkpoints", monitor="loss", save_top_k=2, save_last=True, every_n_train_steps=often
    )
    make_trainer(
        rank,
        SparseDDPStrategy("topk", 0.05),
        accelerator="cpu",
        max_steps=STEPS,
        max_epochs=-1,
        logger=TensorBoardLogger(f"{folder}/logs"),
        enable_checkpointing=True,
        callbacks=[CompressionMonitor(), saving, watching],
        val_check_interval=min(often, 1000),
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
    ).fit(model)
    return watching.seen, watching.plans, weights(model)


@pytest.mark.exhaustive
@pytest.mark.timeout(60 + STEPS)
def test_a_long_training_leaves_nothing_behind(pair, tmp_path):
    answers = pair.run(soak, str(tmp_path), timeout=60.0 + STEPS, patience=60.0)
    for seen, plans, parameters in answers:
        assert [look.step for look in seen] == [STEPS // 10, STEPS // 2, STEPS]
        print(*seen, f"{plans} plans", sep="\n")
        first, last = seen[0], seen[-1]
        assert last.megabytes - first.megabytes <= ALLOWED_MEGABYTES, seen
        assert last.threads <= first.threads, seen
        assert last.files <= first.files, seen
        assert plans >= 2  # a first plan and a second plan
        assert all(torch.equal(value, answers[0][2][name]) for name, value in parameters.items())
    assert list(tmp_path.glob("checkpoints/last.ckpt.sparse/*/0/rank_0000?.pt"))
