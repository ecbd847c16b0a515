"""Ranks that a signal meets in different places save together, at the end of one step."""

import os
import signal
import warnings
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import LambdaCallback
from pytorch_lightning.plugins.environments import SLURMEnvironment

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.callbacks import RequeueAtStepEnd
from lightning_sparse.strategy import signals
from tests.helpers.jobs import JOB, SignalAt, put_scontrol
from tests.helpers.trainers import Small, make_trainer, run_fit

STEPS = 16


def fit_signalled(rank, folder, signalled, backend="gloo"):
    """Fit inside a job; return whether the process ended, after which step, whether all is as before, and warnings."""
    job = {**JOB, "SLURM_NTASKS": "2", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
    job["PATH"] = folder
    before, has_ended = signal.getsignal(signal.SIGUSR1), False
    made = mock.Mock(wraps=dist.new_group)
    theirs = SimpleNamespace(**{**vars(dist), "new_group": made})
    renamed = mock.patch.multiple(signals, dist=theirs, backend_of=lambda device: backend)
    with mock.patch.dict(os.environ, job), renamed, warnings.catch_warnings(record=True) as caught:
        for message in ("SLURM does not put job", "scontrol is not to be found"):
            warnings.filterwarnings("always", message=message)
        callbacks = [RequeueAtStepEnd(), SignalAt(4 if rank in signalled else None, signal.SIGUSR1)]
        plugins = [SLURMEnvironment()]
        trainer = make_trainer(rank, SparseDDPStrategy(), plugins=plugins, callbacks=callbacks, default_root_dir=folder)
        try:
            trainer.fit(Small())
        except SystemExit:
            has_ended = True
    assert made.call_count == 2 * (backend == "gloo")  # the other is for SIGTERM
    is_restored = signal.getsignal(signal.SIGUSR1) == before
    signal.signal(signal.SIGUSR1, before)
    said = [str(each.message) for each in caught if "trains on until its end" in str(each.message)]
    return has_ended, trainer.global_step, is_restored, said


def fit_outside(rank):
    handlers = []
    watching = LambdaCallback(on_train_batch_start=lambda *batch: handlers.append(signal.getsignal(signal.SIGUSR1)))
    run_fit(rank, SparseDDPStrategy(), callbacks=[RequeueAtStepEnd(), watching], max_steps=2)
    return set(handlers) == {signal.SIG_DFL}


@pytest.mark.parametrize(
    ("signalled", "backend", "end"),
    [
        ((0,), "gloo", "exit 0"),
        ((1,), "gloo", "exit 0"),
        ((0, 1), "gloo", "kill -TERM $$"),  # SLURM may end the job's processes, this one too, before it answers
        ((1,), "nccl", "exit 0"),
    ],
)
def test_all_ranks_save_and_end_after_the_same_step(signalled, backend, end, pair, tmp_path):
    put_scontrol(tmp_path, end)
    (ended, step, _, _), (other_ended, other_step, _, _) = pair.run(fit_signalled, str(tmp_path), signalled, backend)
    assert ended
    assert other_ended
    assert step == other_step == 6  # signalled in the fifth, agreed on while the sixth ran
    assert (tmp_path / "asked").read_text() == "requeue 77\n"
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", map_location="cpu", weights_only=True)
    assert saved["global_step"] == step


def test_without_a_signal_nothing_happens(pair, tmp_path):
    put_scontrol(tmp_path)
    assert pair.run(fit_signalled, str(tmp_path), ()) == [(False, STEPS, True, [])] * 2
    assert not list(tmp_path.glob("hpc*"))


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("echo no such job >&2; exit 1", "SLURM does not put job 77 back, which trains on until its end: no such job"),
        (None, "scontrol is not to be found here, such as in a container; job 77 trains on"),
    ],
)
def test_a_job_that_does_not_go_back_saves_and_trains_on(end, said, pair, tmp_path):
    if end is not None:
        put_scontrol(tmp_path, end)
    first, second = pair.run(fit_signalled, str(tmp_path), (0, 1))
    assert first[:3] == second[:3] == (False, STEPS, True)
    assert said in first[3][0]
    assert (tmp_path / "hpc_ckpt_1.ckpt").exists()


def test_outside_of_slurm_the_signal_is_left_alone(pair):
    assert pair.run(fit_outside) == [True, True]
