"""A model of which every rank holds a shard: its gradients are exchanged between replicas when a backward is over."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import Module

from lightning_sparse.functional.elements import held_of


class ShardedModel:
    """What stands in the place of a DDP wrapper: FSDP averages gradients inside a replica, and never between them."""

    process_group = None  # all ranks
    require_backward_grad_sync = require_forward_param_sync = True

    def __init__(self, module: Module) -> None:
        self.module = module


def cut_modules(module: Module) -> Iterator[Any]:
    """Yield the modules that ``fully_shard`` was called on; to ask for torch's class would import all of FSDP."""
    return (each for each in module.modules() if hasattr(each, "set_requires_gradient_sync"))


def reshard(module: Module) -> None:
    """Have a model hold shards only: after a forward without a backward FSDP leaves the root's parameters whole."""
    for each in cut_modules(module):
        each.reshard()


def shard_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return what this rank holds of a parameter's gradient, flat."""
    if getattr(gradient, "placements", None) != getattr(parameter, "placements", None):
        raise RuntimeError(
            "a gradient is not sharded as its parameter is: backward has to reduce it in the replica"
            " (set_requires_gradient_sync(True), which Lightning's accumulation is left to)"
        )
    return held_of(gradient).view(-1)
