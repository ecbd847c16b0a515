"""The model as one flat vector: what everybody may know of it, and equal on all ranks."""

from itertools import accumulate
from typing import NamedTuple

import torch
from torch.nn import Module

from lightning_sparse.functional.elements import held_of


class ModelLayout(NamedTuple):
    """Which parameters are exchanged, and between whom.

    Attributes:
        names: parameter names in the order of their definition, never in that of DDP's buckets.
        numels: for each its number of elements; of the shards that a rank holds where a model is sharded.
        rank: this rank within the process group that exchanges.
        ranks: size of that process group.
        device: where the gradients are.
        frozen: names of the model's other parameters, which are not exchanged now: frozen, or without an element.
    """

    names: tuple[str, ...]
    numels: tuple[int, ...]
    rank: int
    ranks: int
    device: torch.device
    frozen: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements of the whole model."""
        return sum(self.numels)

    def positions(self) -> dict[str, int]:
        """Return for each name its place in the order of definition."""
        return {name: position for position, name in enumerate(self.names)}

    def starts(self) -> dict[str, int]:
        """Return for each name where its elements start when all are laid end to end."""
        return dict(zip(self.names, accumulate(self.numels, initial=0)))


def layout_of(module: Module, rank: int, ranks: int, device: torch.device) -> ModelLayout:
    """Lay out a model whose parameters are exchanged where they require a gradient, and have an element."""
    parameters = dict(module.named_parameters())
    numels = {name: held_of(tensor).numel() for name, tensor in parameters.items() if tensor.requires_grad}
    trained = {name: numel for name, numel in numels.items() if numel}
    frozen = tuple(name for name in parameters if name not in trained)
    return ModelLayout(tuple(trained), tuple(trained.values()), rank, ranks, device, frozen)
