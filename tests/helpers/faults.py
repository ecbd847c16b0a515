"""Fits in which one rank dies, stops, or runs out of something, at a point of the step that can be chosen."""

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
from lightning_sparse.engine.step.reducer import Backward
from lightning_sparse.engine.step.step import Pipeline
from lightning_sparse.testing.tensors import differences
from tests.helpers.resuming import Numbered, fit_numbered

TIMEOUT = 6.0  # seconds that an exchange waits for its peers, on a machine that may be busy with other tests
GROUP_TIMEOUT = timedelta(seconds=15)  # of the process group, to which a user's strategy gives its own
SAVED, ARMED = 4, 6  # batches after which a checkpoint is written, and from which on the fault may strike


class Point(NamedTuple):
    owner: Any  # class, or name of the module, with the function that it strikes in
    name: str  # of the function
    calls: int = 0  # that have to come first, once armed
    settings: tuple[str, str] = ("topk", "merged")
    epochs: int = 2  # that it takes to get there
    # A rank that has just begun its next step may leave the other one in what ranks agree on at the end of the last.
    message: str = (
        r"waited in vain in all_gather of (the group of \d parameters from|\d+ numbers on which)"
        r".*longer timeout=.*ckpt_path"
    )


_NUMBERS = r"waited in vain in all_gather of \d+ numbers on which ranks agree.*longer timeout=.*ckpt_path"
_ANYWHERE = r"waited in vain in \w+.*: another rank has died.*longer timeout=.*ckpt_path"
_SAVING = r"waited in vain in all_gather of errors \(.* was not written\).*: another rank has died.*ckpt_path"
POINTS = {
    "forward": Point(Numbered, "training_step"),
    "hook": Point(Backward, "_enqueue", 1),
    "selection": Point(TopK, "select"),
    "between two collectives": Point(
        Communicator, "issue", 1, ("exdyna", "merged"), message=r"waited in vain in all_\w+ of the group of \d param"
    ),
    # The others have all they need of this step, and hear of it in what Lightning itself broadcasts before the next.
    "commit": Point(Pipeline, "commit", message=_ANYWHERE),
    "planning": Point("lightning_sparse.engine.planner", "averaged", 0, ("topk", "merged"), 6, _NUMBERS),
    # The others are in a step of plain DDP by then.
    "changing to DDP": Point(Engine, "send_dense", 0, ("lags", "auto"), 12, _ANYWHERE),
    "saving": Point("lightning_sparse.loop.state", "_write", message=_SAVING),
}
SELECTIONS = {"topk": TopK, "lags": LAGS, "exdyna": ExDyna}


class Struck(Numbered):
    """A model that saves after one of its batches, arms a fault after another, and may then save once more."""

    def __init__(self, path, arm, saves_again):
        super().__init__(SAVED, path)
        self.saves_again = saves_again
        self.arm = arm

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        if max(self.history) == ARMED:
            self.arm()  # strikes within the batches that follow
        if self.saves_again and max(self.history) == ARMED + 1:
            self.trainer.save_checkpoint(self.path)


def strike(how):
    if how == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if how == "assertion":
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")
    os.kill(os.getpid(), {"dies": signal.SIGKILL, "stops": signal.SIGSTOP}[how])


def strategy_of(point):
    compressor, schedule = point.settings
    return SparseDDPStrategy(compressor, 0.05, schedule=schedule, timeout=timedelta(seconds=TIMEOUT))


@contextmanager
def impatient():
    """Plan after a few steps, and decide after a few more; the same on every rank."""
    with ExitStack() as stack:
        for module, values in (
            (plan_module, {"_PARTS": (1, 2)}),
            (planner_module, {"_ROUNDS": 1, "_STEPS": 1}),
            (choice_module, {"_SETTLING_STEPS": 1, "_TIMED_STEPS": 1, "_TURNS": 1, "_MAX_TURNS": 1}),
        ):
            stack.enter_context(mock.patch.multiple(module, **values))
        yield


def fit_struck(rank, point, victim, how, path):
    """Fit until the fault ends it; return kind and message of what was raised, and how long that took once armed."""
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
    """Go on from the checkpoint; return the batches gone through, and where they differ from a fit without a fault."""
    model = Numbered()
    fit_numbered(rank, strategy_of(point), model, path)
    return sorted(model.history), differences({seen: never_stopped[seen] for seen in model.history}, model.history)


def processes():
    """Yield number, state, parent and session of every process; of those that have ended as ``Z``."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent, _, session = path.read_text().rpartition(")")[2].split()[:4]
            yield int(path.parent.name), state, int(parent), int(session)
