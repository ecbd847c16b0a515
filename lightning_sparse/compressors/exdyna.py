"""ExDyna: each rank selects in a partition of its own, cut so that all find equally much.

Yoon and Oh, "Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed Deep Learning", CCGrid 2024
(arXiv 2402.13781).
"""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.exclusive import ExclusiveSelection
from lightning_sparse.compressors.exclusive.partitions import (
    Partitions,
    balanced_cuts,
    even_cuts,
    published_edges,
    shifted_cuts,
    spread_edges,
)
from lightning_sparse.compressors.layout import ModelLayout

_LOAD_MEMORY = 0.95  # of a block's load, a step; a step alone selects too few elements to tell blocks apart
_STEPS_BETWEEN_CUTS = 16


class ExDyna(ExclusiveSelection):
    """Send what reaches one threshold, each rank looking in a part of the model that is cut to hold as much as others.

    The flat vector is cut into some 1024 blocks, and runs of them are the partitions. All ranks know the union of all
    choices, so each knows what every block held, and cuts as all others do without asking.

    Differs from the paper, unless ``mode="paper"``, in three things:

    * the threshold starts and moves as in :class:`~lightning_sparse.compressors.micro.MiCRO`;
    * partitions are cut at equal sums of a moving average of the blocks' loads, every 16 steps, instead of moving one
      block between neighbours each step: that takes hundreds of steps where loads are uneven, and stops at a floor;
    * blocks differ by one element at most, instead of leaving up to 32 767 elements to the last one.

    In both modes it differs as MiCRO does, and small models have fewer blocks, down to one for each rank.

    Args:
        mode: ``"default"`` or ``"paper"``.

    Raises:
        ValueError: if the mode is unknown.

    Example::

        >>> layout = ModelLayout(("weight",), (4,), rank=0, ranks=2, device=torch.device("cpu"))
        >>> exdyna = ExDyna()
        >>> exdyna.begin(layout)
        >>> exdyna.select(["weight"], [torch.tensor([0.1, -3.0, 2.0, -0.5])], counts=[2])[0].values
        tensor([-3.])
    """

    @override
    def _first_partitions(self, layout: ModelLayout) -> Partitions:
        edges = (published_edges if self.mode == "paper" else spread_edges)(layout.numel, layout.ranks)
        self._loads = torch.zeros(len(edges) - 1, dtype=torch.float64, device="cpu")
        return Partitions(edges, even_cuts(len(edges) - 1, layout.ranks))

    @override
    def _next_partitions(self, positions: Tensor) -> None:
        loads = self._partitions.block_loads(positions)
        if self.mode == "paper":
            cuts = shifted_cuts(self._partitions, loads.tolist())
            self._partitions = self._partitions._replace(cuts=cuts)
            return
        self._loads = self._loads.mul(_LOAD_MEMORY).add_(loads, alpha=1 - _LOAD_MEMORY)
        if (self._step + 1) % _STEPS_BETWEEN_CUTS == 0 and self._loads.any():
            cuts = balanced_cuts(self._loads, self._layout.ranks)
            self._partitions = self._partitions._replace(cuts=cuts)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the step counter, the threshold (0 for none), where partitions are cut, and the load of each block."""
        return {**super().state_dict(), "loads": self._loads}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state["loads"].numel() == self._loads.numel():
            self._loads = state["loads"].clone()
