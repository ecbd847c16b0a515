"""Momentum correction: each rank applies momentum before selection, in place of the optimizer.

Lin et al., "Deep Gradient Compression" (arXiv 1712.01887), sections 3.1 and 3.3. If the optimizer applied momentum, an
element sent after many steps would lack the momentum of these steps. Here, unsent elements accumulate momentum, too.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.selection import Selection
from lightning_sparse.engine.memory.residual import (
    Hyperparameters,
    Memory,
    MemoryState,
    cloned,
    overwrite_accepted,
    state_like,
)
from lightning_sparse.functional.elements import in_batches


class MomentumMemory(Memory):
    """Apply momentum ``m`` to each gradient ``g``, and add the momentum buffer ``u`` to the residual ``v``.

    Each step computes ``u = m u + g``, then ``v = v + u``. With Nesterov momentum, ``u = m (u + g)``, then
    ``v = v + u + g``. The compressor selects elements of ``v``. The memory takes 12 bytes per element, or 4 without
    momentum. With ``masks_momentum``, ``u`` becomes zero at sent elements (momentum factor masking). If all elements of
    a parameter are sent, ``u`` is not masked, as in momentum SGD. ``rescale_on_lr_change`` rescales ``v``, and not
    ``u``.
    """

    def __init__(
        self,
        without_optimizer: Hyperparameters,
        masks_momentum: bool = True,
        local_clip_norm: Optional[float] = None,
        rescale_on_lr_change: bool = False,
    ) -> None:
        super().__init__(local_clip_norm, rescale_on_lr_change)
        self._without_optimizer = without_optimizer
        self._masks_momentum = masks_momentum
        self._momenta: dict[str, Tensor] = {}
        self._in_flight: dict[str, Tensor] = {}

    @override
    def _accumulate(
        self, names: Sequence[str], gradients: list[Tensor], hyperparameters: Mapping[str, Hyperparameters]
    ) -> None:
        """Add momenta and residuals to gradients, in place. ``_in_flight`` stores the new momenta."""
        settings = {name: hyperparameters.get(name, self._without_optimizer) for name in names}
        # Without momentum, no momentum buffer is necessary.
        if not (self._momenta or any(each.momentum for each in settings.values())):
            super()._accumulate(names, gradients, hyperparameters)
            return
        momenta, in_flight = (state_like(state, names, gradients) for state in (self._momenta, self._in_flight))
        residuals = self._waiting(names, gradients, hyperparameters)
        rows: defaultdict[bool, list[tuple[Any, ...]]] = defaultdict(list)
        for own, *tensors in zip(settings.values(), momenta, in_flight, gradients, residuals):
            rows[own.nesterov].append((*tensors, own.momentum))
        for is_nesterov, alike in rows.items():
            _add_momentum(alike, is_nesterov)

    @override
    def update_residual(
        self, names: Sequence[str], accumulated: list[Tensor], kept: Sequence[Selection], accepted: Tensor
    ) -> None:
        if self._in_flight.keys() >= set(names):
            in_flight = [self._in_flight[name] for name in names]
            if self._masks_momentum:
                for velocity, each, unsent in zip(in_flight, accumulated, kept):
                    _mask_sent(velocity, each, unsent)
            overwrite_accepted([self._momenta[name] for name in names], in_flight, accepted)
        super().update_residual(names, accumulated, kept, accepted)

    @override
    def state_dict(self) -> MemoryState:
        return {**super().state_dict(), "momentum": dict(self._momenta)}

    @override
    def load_state_dict(self, state: MemoryState) -> None:
        super().load_state_dict(state)
        self._momenta = cloned(state.get("momentum", {}))
        self._in_flight = {}  # Loaded momenta may have other shapes.


def _add_momentum(rows: Sequence[Sequence[Any]], is_nesterov: bool) -> None:
    """Write ``u`` of :class:`MomentumMemory` to the velocities, and ``v`` to the gradients."""
    for momenta, velocities, gradients, residuals, factors in in_batches(*zip(*rows)):
        torch._foreach_copy_(velocities, momenta)
        if is_nesterov:
            torch._foreach_add_(velocities, gradients)
            torch._foreach_mul_(velocities, factors)
            torch._foreach_add_(gradients, velocities)
        else:
            torch._foreach_mul_(velocities, factors)
            torch._foreach_add_(velocities, gradients)
            torch._foreach_copy_(gradients, velocities)
        torch._foreach_add_(gradients, residuals)


def _mask_sent(momentum: Tensor, accumulated: Tensor, kept: Selection) -> None:
    """Set the momentum of sent elements to zero, in place."""
    if kept.indices is None or kept.indices.numel() == kept.numel:
        return
    # Momentum stays if a selected value was not sent, because the message was full or the value was rounded to 0.
    is_whole = kept.values == accumulated.index_select(0, kept.indices)
    momentum.index_copy_(0, kept.indices, momentum.index_select(0, kept.indices) * is_whole)
