"""Trainings with the engine alone, without a Trainer, and copies of gradients and residuals."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.engine import Engine
from lightning_sparse.engine.adam.correction import AdamCorrection
from lightning_sparse.engine.settings import DEFAULTS, LocalSteps, Settings
from lightning_sparse.schedule import Schedule
from lightning_sparse.testing.subjects import Subject, subject_of
from lightning_sparse.testing.tensors import DEVICE

Tensors = dict[str, Tensor]


@contextmanager
def sparse_ddp(
    model: nn.Module,
    compressor: Subject = "topk",
    density: Optional[float] = None,
    schedule: "str | Schedule" = "merged",
    log: Callable[[str], None] = print,
    correction: Optional[AdamCorrection] = None,
    local_steps: Optional[LocalSteps] = None,
    local_world_size: int = 1,
    **given: Any,
) -> Iterator[tuple[DistributedDataParallel, Engine]]:
    """Wrap a model in DDP with an engine, which exchanges the gradients. At the end of the context the engine closes.

    ``given`` has further settings of the engine and further arguments of DDP.
    """
    chosen = {name: given.pop(name) for name in DEFAULTS.keys() & given.keys()}
    chosen |= {"schedule": schedule, "optimizer_correction": correction, "local_steps": local_steps or 1}
    ddp = DistributedDataParallel(model.to(DEVICE), **given)
    settings = Settings.of(subject_of(compressor), density, **{"warmup_steps": 0, **chosen})
    settings = replace(settings, local_steps=local_steps)  # `Settings.of` drops `LocalSteps(1)`
    if settings.can_correct_adam:
        settings = settings.correcting_adam()
    engine = Engine(ddp, settings, log=log, local_world_size=local_world_size)
    if engine.rounds is not None:
        engine.rounds.begin_round()
    try:
        yield ddp, engine
    finally:
        engine.close()


def backpropagate(ddp: DistributedDataParallel, engine: Engine, loss: Tensor) -> None:
    """Run ``loss.backward()``, which writes means over ranks to ``p.grad``. Raise errors of the exchange."""
    ddp.zero_grad()
    engine.reducer.reduced.forget(ddp.parameters())  # ends the previous step, even without optimizer.step()
    loss.backward()
    engine.worker.raise_error()


def sgd_steps(ddp: DistributedDataParallel, engine: Engine, losses: Iterable[Tensor], **settings: Any) -> Iterator[int]:
    """Make an SGD step for each loss, and yield the number of the step. ``losses`` may compute each loss lazily."""
    optimizer = torch.optim.SGD(ddp.parameters(), **settings)
    for step, loss in enumerate(losses):
        backpropagate(ddp, engine, loss)
        optimizer.step()
        yield step


class Edges(nn.Module):
    """Parameters of awkward shapes: a scalar, fewer elements than ranks, a prime size, a matrix, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.pair = nn.Parameter(torch.randn(2))
        self.prime = nn.Parameter(torch.randn(997))
        self.matrix = nn.Parameter(torch.randn(64, 40))
        self.encoder = nn.Linear(40, 40, bias=False)
        self.decoder = nn.Linear(40, 40)
        self.decoder.weight = self.encoder.weight

    def forward(self, inputs: Tensor) -> Tensor:
        """Map ``[batch, 64]`` to a loss. No gradient is all zero. Some gradients have only one sign."""
        hidden = self.decoder(torch.tanh(self.encoder(inputs @ self.matrix)))
        loss: Tensor = (hidden * self.scale).square().mean()
        return loss + self.pair.sum() * inputs.mean() + (self.prime * inputs.max()).sum()


def batch(rank: int, step: int, size: int = 4) -> Tensor:
    """Return random inputs for a rank and a step. The numbers are equal on every device."""
    return torch.randn(size, 64, generator=torch.Generator().manual_seed(1000 * rank + step)).to(DEVICE)


def watch_gradients(model: nn.Module) -> Tensors:
    """Return this rank's gradients before the exchange, by name. Every backward updates the result in place."""
    gradients = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.register_hook(gradients[name].copy_)
    return gradients


def residuals_like(engine: Engine, gradients: Tensors) -> Tensors:
    """Copy the residual of each parameter (zeros if not allocated). With two levels, copies are flat."""
    state = engine.memory.state_dict().get("residual", {})
    kept = {name: state.get(name, torch.zeros_like(gradient)).clone() for name, gradient in gradients.items()}
    is_shared = engine.levels.local_world_size > 1
    return {name: each.flatten() if is_shared else each.view_as(gradients[name]) for name, each in kept.items()}


def booked_step(ddp: DistributedDataParallel, engine: Engine, gradients: Tensors, loss: Tensor) -> dict[str, Tensors]:
    """Run backward. Return this rank's gradients, the exchanged gradients, and residuals before and after."""
    before = residuals_like(engine, gradients)
    for gradient in gradients.values():
        gradient.zero_()  # hooks do not overwrite gradients of unused parameters
    backpropagate(ddp, engine, loss)
    nothing = {name: torch.zeros_like(gradient) for name, gradient in gradients.items()}
    return {
        "gradient": {name: gradient.clone() for name, gradient in gradients.items()},
        "before": before,
        "applied": nothing | gradients_of(ddp),
        "after": residuals_like(engine, gradients),
    }


def gradients_of(ddp: DistributedDataParallel) -> Tensors:
    """Return copies of all gradients that exist, by name."""
    parameters = ddp.module.named_parameters()
    return {name: parameter.grad.clone() for name, parameter in parameters if parameter.grad is not None}


def parameters_of(ddp: DistributedDataParallel) -> Tensors:
    """Return copies of the parameters, by name."""
    return {name: parameter.detach().clone() for name, parameter in ddp.module.named_parameters()}
