"""Samples of a step by parameter on this rank: more than every step should cost, so only for those who asked."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor

from lightning_sparse.compressors.group_selection import sent_count
from lightning_sparse.compressors.selection import Selection
from lightning_sparse.functional.histogram import magnitude_histogram

_BINS_OF_A_POWER = 8


class ParameterFacts(NamedTuple):
    """Facts of one parameter in a step, as plain numbers."""

    numel: int
    sent: float  # elements of this rank; NaN if they were not counted
    gradient_norm: float  # of this rank's, before anything was added to it, without the loss scale
    residual_norm: float  # of what is kept after the step; 0 where nothing is
    added_norm: float  # of what the step added to the residual: the gradient, or the update where updates wait


class ParameterSamples:
    """Gather what a step does to each parameter, as tensors of the device, and read it when nobody waits.

    Magnitudes are int64 ``[256]``: in ``[2 ** (k - 127), 2 ** (k - 126))``, first zeros, last what is not finite.
    """

    def __init__(self, has_counts: bool = True, has_histograms: bool = False) -> None:
        self.has_counts = has_counts  # of elements that are sent
        self.has_histograms = has_histograms  # of magnitudes
        self.sent_magnitudes: dict[str, Tensor] = {}  # of this rank
        self.kept_magnitudes: dict[str, Tensor] = {}  # after the step
        self.update_norms: dict[str, Tensor] = {}  # of updates that the step added, where updates wait
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
