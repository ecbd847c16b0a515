"""Gradient norms and sent elements of each parameter in a step, computed on the device, and read between steps."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor

from lightning_sparse.compressors.selection import Selection, sent_count


class ParameterFacts(NamedTuple):
    """Norms and counts of one parameter in a step, as plain numbers."""

    numel: int
    sent: float  # number of elements that this rank sent
    gradient_norm: float  # norm of this rank's unscaled gradient, without the residual
    residual_norm: float  # norm of the residual after the step; 0 without a residual
    added_norm: float  # norm of the tensor added to the residual: the gradient, or with AdamCorrection the update


class ParameterSamples:
    """Collect norms and counts as tensors on the device, so that only :meth:`facts` waits for the device.

    With several exchanges in a step, a norm is the root of the sum of the squared norms of all exchanges.
    """

    def __init__(self) -> None:
        self.update_norms: dict[str, Tensor] = {}  # norms of updates, with AdamCorrection
        self._numels: dict[str, int] = {}
        self._gradient_norms: dict[str, Tensor] = {}
        self._residual_norms: dict[str, Tensor] = {}
        self._sent: dict[str, Union[int, Tensor]] = {}

    def add_gradients(self, names: Sequence[str], gradients: Sequence[Tensor], scale: Optional[Tensor]) -> None:
        """Record the norms of gradients before the residual is added. ``scale`` is the loss scale, ``None`` for 1."""
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(list(gradients))])
        norms = norms if scale is None else norms / scale
        self._gradient_norms.update(_with_earlier(dict(zip(names, norms.unbind())), self._gradient_norms))
        self._numels.update((name, gradient.numel()) for name, gradient in zip(names, gradients))

    def add_sent(self, names: Sequence[str], sent: Sequence[Selection]) -> None:
        """Record how many elements of each parameter this rank sent."""
        self._sent.update(zip(names, map(sent_count, sent)))

    def add_kept(self, residuals: Mapping[str, Tensor], update_norms: Mapping[str, Tensor]) -> None:
        """Record the norms of residuals and, with AdamCorrection, of updates."""
        # ``update_norms`` may still have parameters that are frozen now.
        norms = {name: norm.float() for name, norm in update_norms.items() if name in self._gradient_norms}
        self.update_norms.update(_with_earlier(norms, self.update_norms))
        names = [name for name in self._gradient_norms if name in residuals]
        if names:
            kept = torch._foreach_norm([residuals[name] for name in names])
            self._residual_norms.update((name, norm.float()) for name, norm in zip(names, kept))

    def facts(self) -> dict[str, ParameterFacts]:
        """Return norms and counts as numbers, by parameter name. The host waits for the device."""
        gradients, residuals = self._gradient_norms, self._residual_norms
        if not gradients:
            return {}
        nothing = torch.zeros_like(next(iter(gradients.values())))
        kinds = [gradients, {name: residuals.get(name, nothing) for name in gradients}, gradients | self.update_norms]
        columns = torch.stack([torch.stack([norms[name] for name in gradients]) for norms in kinds]).double().tolist()
        sent = (float(self._sent[name]) for name in gradients)
        return {name: ParameterFacts(self._numels[name], *row) for name, *row in zip(gradients, sent, *columns)}


def _with_earlier(norms: dict[str, Tensor], earlier: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Combine each norm with an earlier norm of the same name: return the root of the sum of squares."""
    return {name: norm.hypot(earlier[name]) if name in earlier else norm for name, norm in norms.items()}
