"""Samples of a step by parameter on this rank: more than every step should cost, so only for those who asked."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor

from lightning_sparse.compressors.selection import Selection
from lightning_sparse.engine.observe.facts import sent_count
from lightning_sparse.functional import magnitude_histogram

_BINS_OF_A_POWER = 8


class ParameterFacts(NamedTuple):
    """Facts of one parameter in a step, as plain numbers.

    Attributes:
        numel: its elements.
        sent: elements that this rank sent; NaN if they were not counted.
        gradient_norm: of this rank's gradient, before anything was added to it, without the loss scale.
        residual_norm: of what is kept after the step; 0 where nothing is.
        added_norm: of what the step added to the residual: the gradient, or the update where updates wait.
    """

    numel: int
    sent: float
    gradient_norm: float
    residual_norm: float
    added_norm: float


class ParameterSamples:
    """Gather what a step does to each parameter, as tensors of the device, and read it when nobody waits.

    Attributes:
        has_counts: whether it is counted how many elements are sent.
        has_histograms: whether the magnitudes of what is sent and kept are counted.
        sent_magnitudes: by parameter name, int64 ``[256]``: how many of the values that this rank sent lie in
            ``[2 ** (k - 127), 2 ** (k - 126))``; the first place holds zeros, the last what is not finite.
        kept_magnitudes: the same of what is kept after the step.
        update_norms: by name of the parameters of which updates wait, the norm of those that the step added.
    """

    def __init__(self, has_counts: bool = True, has_histograms: bool = False) -> None:
        self.has_counts = has_counts
        self.has_histograms = has_histograms
        self.sent_magnitudes: dict[str, Tensor] = {}
        self.kept_magnitudes: dict[str, Tensor] = {}
        self.update_norms: dict[str, Tensor] = {}
        self._numels: dict[str, int] = {}
        self._gradient_norms: dict[str, Tensor] = {}
        self._residual_norms: dict[str, Tensor] = {}
        self._sent: dict[str, Union[int, Tensor]] = {}

    def add_gradients(self, names: Sequence[str], gradients: Sequence[Tensor], scale: Optional[Tensor]) -> None:
        """Record fresh gradients that were multiplied by ``scale`` (``None`` for 1)."""
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(list(gradients))])
        self._gradient_norms.update(zip(names, (norms if scale is None else norms / scale).unbind()))
        self._numels.update((name, gradient.numel()) for name, gradient in zip(names, gradients))

    def add_sent(self, names: Sequence[str], sent: Sequence[Selection]) -> None:
        """Record what this rank sends of parameters."""
        for name, selection in zip(names, sent):
            if self.has_counts:
                self._sent[name] = sent_count(selection)
            if self.has_histograms:
                self.sent_magnitudes[name] = _powers_of_two(_sent_values(selection))

    def add_kept(self, residuals: Mapping[str, Tensor], update_norms: Mapping[str, Tensor]) -> None:
        """Record what is kept of the parameters whose gradients were seen, and what was added where updates wait."""
        self.update_norms.update((name, norm.float()) for name, norm in update_norms.items())
        names = [name for name in self._gradient_norms if name in residuals]
        if not names:
            return
        kept = [residuals[name] for name in names]
        self._residual_norms.update((name, norm.float()) for name, norm in zip(names, torch._foreach_norm(kept)))
        if self.has_histograms:
            self.kept_magnitudes.update((name, _powers_of_two(residuals[name])) for name in names)

    def norms(self) -> tuple[float, float]:
        """Return the norms of the whole gradient of this rank, and of all that it keeps; on a device this waits."""
        gradient, residual = (
            torch.stack(list(norms.values())).double().norm() if norms else torch.zeros(())
            for norms in (self._gradient_norms, self._residual_norms)
        )
        return float(gradient), float(residual)

    def facts(self) -> dict[str, ParameterFacts]:
        """Return plain numbers by parameter name; on a device this waits for them, all at once."""
        facts: list[Union[int, float, Tensor]] = []
        for name, gradient in self._gradient_norms.items():
            norms = gradient, self._residual_norms.get(name, 0.0), self.update_norms.get(name, gradient)
            facts.extend((self._sent.get(name, math.nan), *norms))
        tensors = [fact.double() for fact in facts if isinstance(fact, Tensor)]
        asked = iter(torch.stack(tensors).tolist() if tensors else [])
        numbers = iter([next(asked) if isinstance(fact, Tensor) else float(fact) for fact in facts])
        rows = zip(*[numbers] * 4)
        return {name: ParameterFacts(self._numels[name], *row) for name, row in zip(self._gradient_norms, rows)}


def _sent_values(selection: Selection) -> Tensor:
    values = selection.values.reshape(-1)
    return values if selection.filled is None else values.where(selection.filled, 0.0)


def _powers_of_two(values: Tensor) -> Tensor:
    return magnitude_histogram(values).view(-1, _BINS_OF_A_POWER).sum(dim=1)
