"""Metrics about compression itself."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override


class LayerDelta(Metric):
    """Average ``delta`` of every layer: how much a selection leaves over, next to a random one of the same size.

    The convergence proof of LAGS-SGD (arXiv 1911.08727) asks for ``delta <= 1`` in every layer. Feed it with
    :meth:`Engine.layer_deltas <lightning_sparse.engine.Engine.layer_deltas>` in those steps for which they were asked.
    The values are equal on all ranks, so nothing has to be reduced between them.

    Args:
        names: of the layers.

    Example::

        >>> metric = LayerDelta(["weight", "bias"])
        >>> metric.update({"weight": torch.tensor(0.5), "bias": torch.tensor(0.75)})
        >>> metric.update({"weight": torch.tensor(1.0), "bias": torch.tensor(0.25)})
        >>> metric.compute()
        {'weight': tensor(0.7500), 'bias': tensor(0.5000)}
    """

    full_state_update = False
    higher_is_better = False
    sums: Tensor
    steps: Tensor

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = list(names)
        self.add_state("sums", torch.zeros(len(self.names)), dist_reduce_fx="mean")
        self.add_state("steps", torch.zeros(()), dist_reduce_fx="mean")

    @override
    def update(self, deltas: Mapping[str, Tensor]) -> None:
        """Add the deltas of one step.

        Args:
            deltas: by layer name, tensors of one element; those of other layers are left aside.

        Raises:
            KeyError: if a layer is missing.
        """
        self.sums += torch.stack([deltas[name] for name in self.names]).to(self.sums.device)
        self.steps += 1

    @override
    def compute(self) -> dict[str, Tensor]:
        """Return the average over steps, by layer name."""
        return dict(zip(self.names, (self.sums / self.steps).unbind()))
