"""The model as one flat vector: what everybody may know of it, and equal on all ranks."""

from typing import NamedTuple

import torch


class ModelLayout(NamedTuple):
    """Which parameters are exchanged, and between whom.

    Attributes:
        names: parameter names in the order of their definition, never in that of DDP's buckets.
        numels: for each its number of elements.
        rank: this rank within the process group that exchanges.
        ranks: size of that process group.
        device: where the gradients are.
    """

    names: tuple[str, ...]
    numels: tuple[int, ...]
    rank: int
    ranks: int
    device: torch.device

    @property
    def numel(self) -> int:
        """Number of elements of the whole model."""
        return sum(self.numels)

    def positions(self) -> dict[str, int]:
        """Return for each name its place in the order of definition."""
        return {name: position for position, name in enumerate(self.names)}

    def starts(self) -> dict[str, int]:
        """Return for each name where its elements start when all are laid end to end.

        Example::

            >>> ModelLayout(("weight", "bias"), (6, 3), 0, 2, torch.device("cpu")).starts()
            {'weight': 0, 'bias': 6}
        """
        starts, start = {}, 0
        for name, numel in zip(self.names, self.numels):
            starts[name] = start
            start += numel
        return starts
