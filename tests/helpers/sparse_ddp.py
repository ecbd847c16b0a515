# ruff: noqa: F401

from contextlib import contextmanager
from dataclasses import replace

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.compressors import COMPRESSORS
from lightning_sparse.engine import Engine
from lightning_sparse.engine.settings import DEFAULTS, Settings
from lightning_sparse.engine.wire import WIRES as _WIRES
from lightning_sparse.loop.optimizers import OptimizerView
from lightning_sparse.testing.invariants import GivenGradients, is_exact
from lightning_sparse.testing.tensors import DEVICE
from lightning_sparse.testing.wrapping import (
    Edges,
    backpropagate,
    batch,
    booked_step,
    density_for,
    parameters_of,
    subject_of,
    watch_gradients,
)
from tests.helpers.trainers import learning_in_turns

COMPRESSOR_NAMES = sorted(COMPRESSORS)
SCHEDULE_NAMES = ["merged", "layerwise", "single"]
WIRES = list(_WIRES)


@contextmanager
def sparse_ddp(
    model,
    compressor="topk",
    density=None,
    schedule="merged",
    log=print,
    correction=None,
    local_steps=None,
    local_world_size=1,
    **given,
):
    """Wrap a model in DDP with an engine, which exchanges the gradients. At the end of the context the engine closes.

    ``given`` has further settings of the engine and further arguments of DDP.
    """
    chosen = {name: given.pop(name) for name in DEFAULTS.keys() & given.keys()}
    chosen |= {"schedule": schedule, "optimizer_correction": correction, "local_steps": local_steps or 1}
    ddp = DistributedDataParallel(model.to(DEVICE), **given)
    settings = Settings.of(subject_of(compressor), density, **{"warmup_steps": 0, **chosen})
    settings = replace(settings, local_steps=local_steps)  # `Settings.of` drops `LocalSteps(1)`
    settings = settings.correcting_adam([True])
    engine = Engine(ddp, settings, log=log, local_world_size=local_world_size)
    engine.settings = settings  # for tests that build an OptimizerView
    if engine.rounds is not None:
        engine.rounds.begin_round()
    try:
        yield ddp, engine
    finally:
        engine.close()


def sgd_steps(ddp, engine, losses, **settings):
    """Make an SGD step for each loss, and yield the number of the step. ``losses`` may compute each loss lazily."""
    optimizer = torch.optim.SGD(ddp.parameters(), **settings)
    for step, loss in enumerate(losses):
        backpropagate(ddp, engine, loss)
        optimizer.step()
        yield step


def corrected_steps(rank, correction, kind, settings, arguments, steps, poisoned=None, learns=True):
    """Train with a corrected optimizer, without a Trainer. Yield before the first step and after every step.

    The gradient of step ``poisoned`` is non-finite on rank 1, and the optimizer skips that step.
    """
    torch.manual_seed(0)
    with learning_in_turns(learns), sparse_ddp(Edges(), correction=correction, **settings) as (ddp, engine):
        optimizer = kind(ddp.parameters(), **{"lr": 1e-3, **arguments})
        parameters = dict(ddp.module.named_parameters())
        view = OptimizerView(
            parameters, [optimizer], engine.settings.feedback, engine.densities.target, engine.memory, print
        )
        gradients = watch_gradients(ddp.module)
        yield ddp, engine, optimizer, gradients
        for step in range(steps):
            engine.begin_backward(view.next_step())
            is_poisoned = step == poisoned
            factor = float("nan") if is_poisoned and rank == 1 else 1.0
            backpropagate(ddp, engine, ddp(batch(rank, step)) * factor)
            if view.adam is not None:
                view.adam.store_updates(None)
            if not is_poisoned:
                optimizer.step()
            yield ddp, engine, optimizer, gradients
        view.close()


def train_branches(rank, settings, user=0):
    """Train 3 steps. After step 0, only rank ``user`` uses the parameter ``sometimes``, and no rank uses ``never``."""
    book = []
    names = ("shared", "sometimes", "never")
    with sparse_ddp(GivenGradients(dict.fromkeys(names, torch.zeros(300))), **settings) as (ddp, engine):
        gradients = watch_gradients(ddp.module)
        for step, uses in enumerate([3, 2 if rank == user else 1, 2 if rank == user else 1]):
            inputs = torch.randn(300, generator=torch.Generator().manual_seed(10 * rank + step)).to(DEVICE)
            entry = booked_step(ddp, engine, gradients, ddp(dict.fromkeys(names[:uses], inputs)))
            book.append({kind: {name[8:]: each for name, each in of.items()} for kind, of in entry.items()})
    return book


def declaring(promise):
    return [name for name in COMPRESSOR_NAMES if promise(subject_of(name))]


# LAGS selects as top-k, MiCRO as ExDyna, and QSGD is dense with a wire of four bits.
DIFFERENT_NAMES = [name for name in COMPRESSOR_NAMES if name not in ("lags", "micro", "qsgd")]
DENSITY = {name: density_for(name) for name in COMPRESSOR_NAMES}
KEEPING_NAMES = declaring(lambda each: each.feedback.keeps_residual)
EXACT_NAMES = declaring(is_exact)
AGREEING_NAMES = declaring(lambda each: not each.replicas_diverge)
GROUPING_FREE_NAMES = declaring(lambda each: not each.selects_across_bucket)
