"""Samples of a step by parameter on this rank: more than every step should cost, so only for those who asked."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor

from lightning_sparse.compressors.group_selection import FlatSelection
from lightning_sparse.compressors.selection import Selection
from lightning_sparse.functional import magnitude_histogram

_BINS_OF_A_POWER = 8


class ParameterFacts(NamedTuple):
    """Facts of one parameter in a step, as plain numbers.

    Attributes:
        numel: its elements.
        sent: elements that this rank sent.
        union: elements that any rank sent.
        gradient_norm: of this rank's gradient, before anything was added to it, without the loss scale.
        residual_norm: of what is kept after the step; 0 where nothing is.
        added_norm: of what the step added to what waits: the gradient, or the update where updates wait.
    """

    numel: int
    sent: float
    union: float
    gradient_norm: float
    residual_norm: float
    added_norm: float


class ParameterSamples:
    """Gather what a step does to each parameter, as tensors of the device, and read it when nobody waits.

    Args:
        has_counts: take note of how many elements are sent, which holds what has arrived until :meth:`facts` is asked.
        has_histograms: count the magnitudes of what is sent and kept.

    Attributes:
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
        self._arrived: dict[str, Union[int, Tensor, Selection]] = {}

    def add_gradients(self, names: Sequence[str], gradients: Sequence[Tensor], scale: Optional[Tensor]) -> None:
        """Record fresh gradients that were multiplied by ``scale`` (``None`` for 1)."""
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(list(gradients))])
        self._gradient_norms.update(zip(names, (norms if scale is None else norms / scale).unbind()))
        self._numels.update((name, gradient.numel()) for name, gradient in zip(names, gradients))

    def add_sent(self, names: Sequence[str], sent: Sequence[Selection], means: Sequence[Selection]) -> None:
        """Record what this rank sends of parameters, and of what arrived of them from all ranks."""
        for name, selection, mean in zip(names, sent, means):
            if self.has_counts:
                self._sent[name] = sent_count(selection)
                self._arrived[name] = _arrived(selection, mean)
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

    def norms_by_parameter(self) -> dict[str, tuple[float, float, float]]:
        """Return three norms of each parameter on this rank; on a device this waits.

        They are those of its gradient, of what is kept, and of what the step added to that.
        """
        numbers = iter(_numbers([norm for name in self._gradient_norms for norm in self._norms(name)]))
        return dict(zip(self._gradient_norms, zip(numbers, numbers, numbers)))

    def _norms(self, name: str) -> tuple[Tensor, Union[Tensor, float], Tensor]:
        gradient = self._gradient_norms[name]
        return gradient, self._residual_norms.get(name, 0.0), self.update_norms.get(name, gradient)

    @staticmethod
    def stacked(magnitudes: Mapping[str, Tensor]) -> tuple[list[str], Tensor]:
        """Return names in alphabetical order, which all ranks share, and their counts, int64 ``[names, 256]``."""
        names = sorted(magnitudes)
        return names, torch.stack([magnitudes[name] for name in names]) if names else torch.zeros(0, 256)

    def facts(self) -> dict[str, ParameterFacts]:
        """Return plain numbers by parameter name, if they were counted; on a device this waits for them."""
        facts: list[Union[int, float, Tensor]] = []
        for name, arrived in self._arrived.items():
            union = self._arrived[name] = union_count(arrived) if isinstance(arrived, Selection) else arrived
            facts.extend((self._sent[name], union, *self._norms(name)))
        numbers = iter(_numbers(facts))
        rows = zip(*[numbers] * 5)
        return {name: ParameterFacts(self._numels[name], *row) for name, row in zip(self._arrived, rows)}


def sent_count(selection: Union[Selection, FlatSelection]) -> Union[int, Tensor]:
    """Return how many elements a rank sends, without asking the device for it."""
    return selection.values.numel() if selection.filled is None else selection.filled.sum()


def union_count(mean: Union[Selection, FlatSelection]) -> int:
    """Return how many elements any rank has sent of what arrived, which costs a sort and a look at the device."""
    if mean.indices is None:
        return mean.numel
    return int(mean.indices[mean.values != 0].unique().numel())


def _numbers(facts: Sequence[Union[int, float, Tensor]]) -> list[float]:
    """Ask the device for all of its numbers at once."""
    tensors = [fact.double() for fact in facts if isinstance(fact, Tensor)]
    asked = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(asked) if isinstance(fact, Tensor) else float(fact) for fact in facts]


def _arrived(sent: Selection, mean: Selection) -> Union[int, Tensor, Selection]:
    if mean.indices is not None:
        return mean
    # Of a merged group a whole mean arrives, in working memory that the next step writes over.
    return mean.numel if sent.indices is None else torch.count_nonzero(mean.values)


def _sent_values(selection: Selection) -> Tensor:
    values = selection.values.reshape(-1)
    if selection.quantization is not None:
        scales = selection.quantization.scales.repeat_interleave(selection.quantization.bucket_size)
        return values[: selection.numel] * scales[: selection.numel] / selection.quantization.levels
    return values if selection.filled is None else values.where(selection.filled, 0.0)


def _powers_of_two(values: Tensor) -> Tensor:
    return magnitude_histogram(values).view(-1, _BINS_OF_A_POWER).sum(dim=1)
