import os
import signal
from functools import partial
from threading import Thread
from unittest import mock

import pytest
import torch
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.environments import SLURMEnvironment

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.strategy.stop import GracefulStop
from tests.helpers.trainers import Small, make_trainer

STEPS = 16
JOB = {"SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "train", "SLURM_NODEID": "0", "SLURM_NTASKS_PER_NODE": "2"}


class SignalAt(Callback):
    def __init__(self, batch, number):
        self.batch, self.number = batch, number

    def on_train_batch_start(self, trainer, module, batch, batch_index):
        if batch_index == self.batch:
            os.kill(os.getpid(), self.number)


def put_scontrol(folder, end):
    path = folder / "scontrol"
    path.write_text(f'#!/bin/sh\necho "$*" >> {folder}/asked\n{end}\n')
    path.chmod(0o755)


def fit_signalled(rank, folder, signalled, batch, number, seconds=0.0, more=None, settings=None, in_thread=False):
    job = {**JOB, "SLURM_NTASKS": "2", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "PATH": folder}
    is_job = number == signal.SIGUSR1
    seen, ends, numbers = [], [], (signal.SIGTERM, signal.SIGUSR1)
    first = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    before = [signal.getsignal(each) for each in numbers]
    callbacks = [SignalAt(batch, number)] if rank in signalled else []
    callbacks.append(
        ModelCheckpoint(f"{folder}/saves", filename="last", save_on_exception=True, every_n_train_steps=1000)
    )
    more = {"callbacks": callbacks, "enable_checkpointing": True, "default_root_dir": folder, **(more or {})}
    more |= {"plugins": [SLURMEnvironment()]} if is_job else {}
    with mock.patch.dict(os.environ, job if is_job else {}), mock.patch.object(GracefulStop, "SECONDS", seconds):
        trainer = make_trainer(rank, SparseDDPStrategy("topk", density=0.1, **(settings or {})), **more)

        def fit():
            try:
                trainer.fit(Small())
            except SystemExit as error:
                ends.append(type(error).__name__)

        if in_thread and rank == 1:
            thread = Thread(target=fit)
            thread.start()
            thread.join()
        else:
            fit()
    is_restored = [signal.getsignal(each) for each in numbers] == before
    signal.signal(signal.SIGTERM, first)
    return ends, trainer.global_step, len(seen), is_restored


@pytest.mark.parametrize(
    ("signalled", "batch", "options", "stop"),
    [
        ((0,), 5, {}, 6),
        ((1,), 5, {}, 6),
        ((0, 1), STEPS - 1, {}, STEPS),
        ((1,), 6, {"more": {"accumulate_grad_batches": 4}}, 2),  # within the second step
        ((1,), 5, {"settings": {"local_steps": 4}}, 6),
        ((1,), 5, {"seconds": 3600.0}, STEPS),  # ranks compare every few seconds and at the end
        ((0,), 5, {"in_thread": True}, 6),  # rank 1 can have no handler
    ],
)
def test_all_ranks_end_and_save_after_the_same_step(signalled, batch, options, stop, pair, tmp_path):
    fit = partial(fit_signalled, **options)
    ends = pair.run(fit, str(tmp_path), signalled, batch, signal.SIGTERM)
    assert ends == [(["SIGTERMException"], stop, int(rank in signalled), True) for rank in range(2)]
    (saved,) = (tmp_path / "saves").glob("*.ckpt")
    assert torch.load(saved, map_location="cpu", weights_only=True)["global_step"] == stop


@pytest.mark.parametrize(("signalled", "end"), [((0,), "exit 0"), ((1,), "exit 0"), ((0, 1), "exit 1")])
def test_all_ranks_save_and_requeue_after_the_same_step(signalled, end, pair, tmp_path):
    put_scontrol(tmp_path, end)
    ends = pair.run(fit_signalled, str(tmp_path), signalled, 4, signal.SIGUSR1)
    assert ends == [([], STEPS, 0, True)] * 2
    assert (tmp_path / "asked").read_text() == "requeue 77\n"
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", map_location="cpu", weights_only=True)
    assert saved["global_step"] == 5
