"""What a step did to each parameter: norms and counts, gathered on the device, read between two steps."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor

from lightning_sparse.compressors.selection import Selection, sent_count


class ParameterFacts(NamedTuple):
    """Facts of one parameter in a step, as plain numbers."""

    numel: int
    sent: float  # elements of this rank
    gradient_norm: float  # of this rank's, before anything was added to it, without the loss scale
    residual_norm: float  # of what is kept after the step; 0 where nothing is
    added_norm: float  # of what the step added to the residual: the gradient, or the update where updates wait


class ParameterSamples:
    """Gather what steps do to each parameter, as tensors of the device, and read it when nobody waits.

    Of several exchanges norms of what is new add up as squares: most parameters are used in one of them.
    """

    def __init__(self) -> None:
        self.update_norms: dict[str, Tensor] = {}  # of updates that the step added, where updates wait
        self._numels: dict[str, int] = {}
        self._gradient_norms: dict[str, Tensor] = {}
        self._residual_norms: dict[str, Tensor] = {}
        self._sent: dict[str, Union[int, Tensor]] = {}

    def add_gradients(self, names: Sequence[str], gradients: Sequence[Tensor], scale: Optional[Tensor]) -> None:
        """Record fresh gradients that were multiplied by ``scale`` (``None`` for 1)."""
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(list(gradients))])
        norms = norms if scale is None else norms / scale
        self._gradient_norms.update(_with_earlier(dict(zip(names, norms.unbind())), self._gradient_norms))
        self._numels.update((name, gradient.numel()) for name, gradient in zip(names, gradients))

    def add_sent(self, names: Sequence[str], sent: Sequence[Selection]) -> None:
        """Record what this rank sends of parameters."""
        self._sent.update(zip(names, map(sent_count, sent)))

    def add_kept(self, residuals: Mapping[str, Tensor], update_norms: Mapping[str, Tensor]) -> None:
        """Record what is kept of the parameters whose gradients were seen, and what was added where updates wait."""
        # The memory may know of others, which were frozen before.
        norms = {name: norm.float() for name, norm in update_norms.items() if name in self._gradient_norms}
        self.update_norms.update(_with_earlier(norms, self.update_norms))
        names = [name for name in self._gradient_norms if name in residuals]
        if names:
            kept = torch._foreach_norm([residuals[name] for name in names])
            self._residual_norms.update((name, norm.float()) for name, norm in zip(names, kept))

    def facts(self) -> dict[str, ParameterFacts]:
        """Return plain numbers by parameter name; on a device this waits for them."""
        gradients, residuals = self._gradient_norms, self._residual_norms
        if not gradients:
            return {}
        nothing = torch.zeros_like(next(iter(gradients.values())))
        kinds = [gradients, {name: residuals.get(name, nothing) for name in gradients}, gradients | self.update_norms]
        columns = torch.stack([torch.stack([norms[name] for name in gradients]) for norms in kinds]).double().tolist()
        sent = (float(self._sent[name]) for name in gradients)
        return {name: ParameterFacts(self._numels[name], *row) for name, *row in zip(gradients, sent, *columns)}


def _with_earlier(norms: dict[str, Tensor], earlier: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the norms of vectors at right angles to those of ``earlier`` norms, together with them."""
    return {name: norm.hypot(earlier[name]) if name in earlier else norm for name, norm in norms.items()}
