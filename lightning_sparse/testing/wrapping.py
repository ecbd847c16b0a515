"""Trainings of the compressor under test, with the engine alone, and copies of gradients and residuals."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Optional, Union
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.compressors import COMPRESSORS, Compressor
from lightning_sparse.compressors.registry import build_by_name
from lightning_sparse.engine import Engine
from lightning_sparse.engine.settings import Settings
from lightning_sparse.engine.step.selecting import BucketSelector
from lightning_sparse.testing.tensors import DEVICE

Tensors = dict[str, Tensor]
Subject = Union[str, Compressor, Callable[[], Compressor]]
_DENSITY = 0.05


def subject_of(compressor: Subject) -> Compressor:
    """Build a compressor from a name, a class or a function, or raise ``TypeError``."""
    choice: Any = compressor
    if callable(choice) and not isinstance(choice, Compressor):
        choice = choice()
    built: Compressor = build_by_name("compressor", Compressor, COMPRESSORS, choice)
    return built


def density_for(compressor: Subject) -> Optional[float]:
    """Return a density at which tests detect wrong residuals, or ``None`` if the compressor has no density."""
    return None if subject_of(compressor).default_density is None else _DENSITY


def settings_of(compressor: Subject, **others: Any) -> dict[str, Any]:
    """Return arguments of :func:`sparse_ddp`, with a density for tests."""
    return {"compressor": compressor, "density": density_for(compressor), **others}


@contextmanager
def sparse_ddp(
    model: nn.Module, compressor: Subject, density: Optional[float] = None, local_world_size: int = 1, **given: Any
) -> Iterator[tuple[DistributedDataParallel, Engine]]:
    """Wrap a model in DDP with an engine, which exchanges the gradients until the context ends.

    ``given`` has further settings of the engine. Invalid selections raise an error, also on a GPU.
    """
    chosen = {"warmup_steps": 0, "optimizer_correction": None, **given}
    ddp = DistributedDataParallel(model.to(DEVICE))
    engine = Engine(
        ddp, Settings.of(subject_of(compressor), density, **chosen), log=print, local_world_size=local_world_size
    )
    try:
        with mock.patch.object(BucketSelector, "checks_on_device", True):
            yield ddp, engine
    finally:
        engine.close()


def backpropagate(ddp: DistributedDataParallel, engine: Engine, loss: Tensor) -> None:
    """Run ``loss.backward()``, which writes means over ranks to ``p.grad``. Raise errors of the exchange."""
    ddp.zero_grad()
    engine.reducer.reduced.drop(ddp.parameters())  # ends the previous step, even without optimizer.step()
    loss.backward()
    engine.worker.raise_error()


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
    is_shared = engine.pipeline.levels.local_world_size > 1
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
