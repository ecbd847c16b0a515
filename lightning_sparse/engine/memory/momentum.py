"""Momentum correction: momentum is accumulated before selection instead of after it.

Lin et al., "Deep Gradient Compression" (arXiv 1712.01887), sections 3.1 and 3.3: in the optimizer, an element sent
after many steps meets a momentum that has forgotten it; here, the residual is what dense training would have applied.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.selection import Selection
from lightning_sparse.engine.memory.residual import (
    Hyperparameters,
    MemoryState,
    ResidualMemory,
    kept_like,
    laid_clones,
    overwrite_accepted,
)


class MomentumMemory(ResidualMemory):
    """Accumulate velocity instead of gradient: ``u = m u + g``, ``v = v + u``, send of ``v``; 12 bytes an element.

    With Nesterov ``u = m (u + g)``, ``v = v + u + g``. With ``masks_momentum`` a sent element's ``u`` starts again from
    zero (momentum factor masking), unless its parameter is sent whole: that is dense momentum SGD. Of several exchanges
    of one step the first that counts decays ``u``. ``follows_learning_rate`` rescales the residual alone, as SGD would.
    """

    def __init__(
        self,
        without_optimizer: Hyperparameters,
        masks_momentum: bool = True,
        local_clip_norm: Optional[float] = None,
        follows_learning_rate: bool = False,
    ) -> None:
        super().__init__(local_clip_norm, follows_learning_rate)
        self._without_optimizer = without_optimizer
        self._masks_momentum = masks_momentum
        self._momenta: dict[str, Tensor] = {}
        self._in_flight: dict[str, Tensor] = {}
        self._decayed: dict[str, Tensor] = {}  # whether in this optimizer step, bool
        self._undecayed: set[str] = set()  # at the save in the midst of a step that training goes on from
        self._masked: dict[str, Tensor] = {}

    @override
    def _accumulate(
        self, names: Sequence[str], gradients: list[Tensor], hyperparameters: Mapping[str, Hyperparameters]
    ) -> None:
        """Turn gradients into velocities, in place, and add the residuals; the momenta of this step stay in flight."""
        momenta = kept_like(self._momenta, names, gradients)
        in_flight = kept_like(self._in_flight, names, gradients)
        torch._foreach_copy_(in_flight, momenta)
        decayed: list[tuple[Tensor, Tensor]] = []
        rows: defaultdict[bool, list[tuple[Tensor, Tensor, float]]] = defaultdict(list)
        for name, momentum, gradient in zip(names, in_flight, gradients):
            settings = hyperparameters.get(name, self._without_optimizer)
            if settings.continues_step:
                # What is there has been decayed, and added to the residual: it is left out meanwhile.
                if name not in self._decayed:
                    self._decayed[name] = torch.full_like(gradient[:1], name not in self._undecayed, dtype=torch.bool)
                before = momentum * self._decayed[name]
                momentum.sub_(before)
                decayed.append((momentum, before))
            else:
                self._decayed.pop(name, None)
            rows[settings.nesterov].append((momentum, gradient, settings.momentum))
        for is_nesterov, some in rows.items():
            # On a CPU each by itself, while a cache holds it.
            for together in [[row] for row in some] if gradients[0].device.type == "cpu" else [some]:
                velocities, inputs, factors = map(list, zip(*together))
                _accumulate_alike(velocities, inputs, factors, is_nesterov)
        for momentum, before in decayed:
            momentum.add_(before)
        super()._accumulate(names, gradients, hyperparameters)

    @override
    def update(
        self, names: Sequence[str], accumulated: Sequence[Tensor], kept: Sequence[Selection], accepted: Tensor
    ) -> None:
        in_flight = kept_like(self._in_flight, names, accumulated)
        if self._masks_momentum:
            for name, momentum, tensor, selection in zip(names, in_flight, accumulated, kept):
                is_whole = _mask_sent(momentum, tensor, selection)
                if self.is_watched and is_whole is not None:
                    self._masked[name] = is_whole.logical_not().sum()
        momenta = kept_like(self._momenta, names, accumulated)
        overwrite_accepted(momenta, in_flight, accepted)
        for name, is_accepted in zip(names, accepted.expand(len(names)).unbind()):
            known = self._decayed.get(name)
            self._decayed[name] = is_accepted if known is None else known | is_accepted
        super().update(names, accumulated, kept, accepted)

    @override
    def statistics(self) -> dict[str, Tensor]:
        """Return also ``momentum_norm``, of all that is accumulated here, and ``masked_fraction`` of its elements."""
        momenta = list(self._momenta.values())
        if not momenta:
            return super().statistics()
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(momenta)])
        statistics = {**super().statistics(), "momentum_norm": norms.norm()}
        if self._masks_momentum:
            masked, self._masked = self._masked, {}
            elements = sum(momentum.numel() for momentum in momenta)
            statistics["masked_fraction"] = sum(masked.values(), norms.new_zeros(())) / elements
        return statistics

    @override
    def state_dict(self) -> MemoryState:
        return {**super().state_dict(), "momentum": dict(self._momenta)}

    @override
    def load_state_dict(self, state: MemoryState) -> None:
        super().load_state_dict(state)
        self._momenta = laid_clones(state.get("momentum", {}))
        self._decayed = {}

    @override
    def undecayed(self) -> list[str]:
        return [name for name, is_decayed in self._decayed.items() if not is_decayed]

    @override
    def restore_undecayed(self, names: Iterable[str]) -> None:
        self._undecayed = set(names)


def _accumulate_alike(momenta: list[Tensor], gradients: list[Tensor], factors: list[float], is_nesterov: bool) -> None:
    """Turn gradients into velocities, in place, as their momenta."""
    if is_nesterov:
        torch._foreach_add_(momenta, gradients)
        torch._foreach_mul_(momenta, factors)
        torch._foreach_add_(gradients, momenta)
    else:
        torch._foreach_mul_(momenta, factors)
        torch._foreach_add_(momenta, gradients)
        torch._foreach_copy_(gradients, momenta)


def _mask_sent(momentum: Tensor, accumulated: Tensor, kept: Selection) -> Optional[Tensor]:
    """Set to zero the momentum of what was sent, in place; return which of the selected places were not sent."""
    if kept.indices is None or kept.indices.numel() == kept.numel:
        return None
    # What stays whole at its place was not sent: the place was not taken, or the value too small for the wire.
    is_whole = kept.values == accumulated.index_select(0, kept.indices)
    momentum.index_copy_(0, kept.indices, momentum.index_select(0, kept.indices) * is_whole)
    return is_whole
