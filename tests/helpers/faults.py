"""Fits with a fault: a rank dies, stops, or runs out of memory at a chosen point of the step."""

import importlib
import os
import signal
import time
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

import lightning_sparse.engine.planner as planner_module
import lightning_sparse.loop.backend_choice as choice_module
import lightning_sparse.schedule.plan as plan_module
from lightning_sparse import SparseDDPStrategy
from lightning_sparse.compressors import LAGS, ExDyna, TopK
from lightning_sparse.engine import Engine
from lightning_sparse.engine.collectives import Communicator
from lightning_sparse.engine.step.backward import Backward
from lightning_sparse.engine.step.step import Pipeline
from lightning_sparse.testing.tensors import differences
from tests.helpers.resuming import Numbered, fit_numbered

TIMEOUT = 6.0  # timeout of exchanges in seconds, on a busy machine
GROUP_TIMEOUT = timedelta(seconds=15)  # timeout of the process group
SAVED, ARMED = 4, 6  # batches before the checkpoint, batches before the fault is armed


class Point(NamedTuple):
    owner: Any  # class, or name of the module, that holds the function
    name: str  # name of the function
    calls: int = 0  # calls before the fault, once armed
    settings: tuple[str, str] = ("topk", "merged")
    epochs: int = 2  # epochs needed to reach the point
    # The other rank may wait in the end-of-step agreement if the victim has just begun its next step.
    message: str = (
        r"waited in vain in all_gather of (the bucket of \d parameters from|\d+ numbers on which)"
        r".*longer timeout=.*ckpt_path"
    )


_NUMBERS = r"waited in vain in all_reduce of \d+ numbers to average.*longer timeout=.*ckpt_path"
_ANYWHERE = r"waited in vain in \w+.*: another rank has died.*longer timeout=.*ckpt_path"
_SAVING = r"waited in vain in all_gather of errors \(.* was not written\).*: another rank has died.*ckpt_path"
POINTS = {
    "forward": Point(Numbered, "training_step"),
    "hook": Point(Backward, "_enqueue", 1),
    "selection": Point(TopK, "select"),
    "between two collectives": Point(
        Communicator, "issue", 1, ("exdyna", "merged"), message=r"waited in vain in all_\w+ of the bucket of \d param"
    ),
    # The survivors need nothing more in this step. The failure appears in Lightning's next broadcast.
    "commit": Point(Pipeline, "commit", message=_ANYWHERE),
    "planning": Point("lightning_sparse.engine.planner", "averaged", 0, ("topk", "merged"), 6, _NUMBERS),
    # The survivors are in a plain DDP step by then.
    "changing to DDP": Point(Engine, "send_dense", 0, ("lags", "auto"), 12, _ANYWHERE),
    "saving": Point("lightning_sparse.loop.state", "_write", message=_SAVING),
}
SELECTIONS = {"topk": TopK, "lags": LAGS, "exdyna": ExDyna}


class Struck(Numbered):
    def __init__(self, path, arm, saves_again):
        super().__init__(SAVED, path)
        self.saves_again = saves_again
        self.arm = arm

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        if max(self.history) == ARMED:
            self.arm()  # the fault strikes in a later batch
        if self.saves_again and max(self.history) == ARMED + 1:
            self.trainer.save_checkpoint(self.path)


def strike(how):
    if how == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if how == "assertion":
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")
    os.kill(os.getpid(), {"dies": signal.SIGKILL, "stops": signal.SIGSTOP}[how])
    time.sleep(600)  # the kernel may hand the signal to another thread, and this thread would run on for a moment


def strategy_of(point):
    compressor, schedule = point.settings
    return SparseDDPStrategy(compressor, 0.05, schedule=schedule, timeout=timedelta(seconds=TIMEOUT))


@contextmanager
def impatient():
    with ExitStack() as stack:
        for module, values in (
            (plan_module, {"_PARTS": (1, 2)}),
            (planner_module, {"_ROUNDS": 1, "_STEPS": 1}),
            (choice_module, {"_SETTLING_STEPS": 1, "_TIMED_STEPS": 1, "_TURNS": 1}),
        ):
            stack.enter_context(mock.patch.multiple(module, **values))
        yield


def fit_struck(rank, point, victim, how, path):
    """Fit until the fault ends the fit. Return the error's type and message, and the seconds since arming."""
    armed_at = [0.0]

    def arm():
        armed_at[0] = time.monotonic()
        if rank != victim:
            return
        owner = importlib.import_module(point.owner) if isinstance(point.owner, str) else point.owner
        original, calls = getattr(owner, point.name), [0]

        def struck(*args, **kwargs):
            calls[0] += 1
            if calls[0] > point.calls:
                strike(how)
            return original(*args, **kwargs)

        stack.enter_context(mock.patch.object(owner, point.name, struck))

    with ExitStack() as stack:
        stack.enter_context(impatient())
        try:
            fit_numbered(rank, strategy_of(point), Struck(path, arm, point.name == "_write"), max_epochs=point.epochs)
        except RuntimeError as error:
            return type(error).__name__, str(error), time.monotonic() - armed_at[0]
    return "nothing", "", 0.0


def fit_whole(rank, compressor):
    model = Numbered()
    fit_numbered(rank, SparseDDPStrategy(compressor, 0.05), model)
    return model.history


def start_again(rank, point, path, never_stopped):
    model = Numbered()
    fit_numbered(rank, strategy_of(point), model, path)
    return sorted(model.history), differences({seen: never_stopped[seen] for seen in model.history}, model.history)


def processes():
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent, _, session = path.read_text().rpartition(")")[2].split()[:4]
            yield int(path.parent.name), state, int(parent), int(session)
