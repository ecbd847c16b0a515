"""Build models behind the engine inside a pool's processes, without a Trainer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.compressors import COMPRESSORS, Compressor
from lightning_sparse.engine import Engine
from lightning_sparse.hook import BUCKET_CAP_MB
from lightning_sparse.schedule import Schedule
from lightning_sparse.settings import Settings
from tests.devices import DEVICE

COMPRESSOR_NAMES = COMPRESSORS.names()
SCHEDULE_NAMES = ["layerwise", "merged", "single"]
WIRES = ["float32", "bfloat16", "float16"]
# Without a density; a sparsifier with its own default would send little enough to hide mistakes in what is kept.
DENSITY = {name: 0.05 if COMPRESSORS.resolve(name).default_density is not None else None for name in COMPRESSOR_NAMES}


def declaring(promise: Callable[[Compressor], bool]) -> list[str]:
    """Return the names of the compressors that declare a property, and so are held to the law that follows from it."""
    return [name for name in COMPRESSOR_NAMES if promise(COMPRESSORS.resolve(name))]


KEEPING_NAMES = declaring(lambda compressor: compressor.feedback.keeps_residual)
# Whoever has no density can only be DDP by sending everything anyway.
EXACT_NAMES = declaring(lambda compressor: compressor.is_lossless or compressor.default_density is not None)
AGREEING_NAMES = declaring(lambda compressor: not compressor.replicas_diverge)
# Whoever selects across the parameters that travel together cannot but depend on which these are.
GROUPING_FREE_NAMES = declaring(lambda compressor: not compressor.selects_across_group)


@contextmanager
def sparse_ddp(
    model: nn.Module,
    compressor: "str | Compressor" = "topk",
    density: Optional[float] = None,
    schedule: "str | Schedule" = "merged",
    wire: str = "float32",
    warmup_epochs: Optional[int] = 0,
    say: Callable[[str], None] = print,
    **ddp_arguments: Any,
) -> Iterator[tuple[DistributedDataParallel, Engine]]:
    """Wrap a model on the device under test, exchange its gradients with an engine, and take the engine down again."""
    arguments = {"gradient_as_bucket_view": True, "bucket_cap_mb": BUCKET_CAP_MB, **ddp_arguments}
    ddp = DistributedDataParallel(model.to(DEVICE), **arguments)
    engine = Engine(ddp, Settings(compressor, density, schedule, wire, warmup_epochs), say=say)
    try:
        yield ddp, engine
    finally:
        engine.close()


class Edges(nn.Module):
    """Parameters of awkward shapes: one element, fewer elements than ranks, a prime size, a matrix, and a tied one."""

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
        """Map ``[batch, 64]`` to one loss; no gradient is all zero, and some are all positive or all negative."""
        hidden = self.decoder(torch.tanh(self.encoder(inputs @ self.matrix)))
        return (
            (hidden * self.scale).square().mean() + self.pair.sum() * inputs.mean() + (self.prime * inputs.max()).sum()
        )


def batch(rank: int, step: int, size: int = 4) -> Tensor:
    """Return inputs that differ between ranks and steps, the same numbers on every device."""
    return torch.randn(size, 64, generator=torch.Generator().manual_seed(1000 * rank + step)).to(DEVICE)


def watch_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return a dictionary that holds, after each backward, this rank's gradients before their exchange.

    The model has to be where it is trained.
    """
    gradients: dict[str, Tensor] = {}

    def watch(name: str, parameter: nn.Parameter) -> None:
        gradients[name] = torch.zeros_like(parameter)
        parameter.register_hook(lambda gradient: gradients[name].copy_(gradient))

    for name, parameter in model.named_parameters():
        watch(name, parameter)
    return gradients


def parameters_of(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    """Copy the parameters, to carry them out of the process."""
    return {name: parameter.detach().clone() for name, parameter in ddp.module.named_parameters()}
