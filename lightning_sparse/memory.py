"""What is KEPT: the part of the gradient that has not been sent yet, one flat tensor for each parameter name."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.functional import copy_elements
from lightning_sparse.selection import Selection


class Memory(ABC):
    """Add what waits to the gradient before selection, and keep what was not sent after it.

    A step is a transaction: :meth:`compensate` changes nothing that is kept, and :meth:`update` is told which tensors'
    exchange counts. A non-finite gradient or an unused parameter therefore leaves the memory bit for bit as it was.
    """

    @abstractmethod
    def compensate(self, names: Sequence[str], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Add what waits to the gradients.

        Args:
            names: parameter names.
            gradients: for each its flat local gradient. Changed in place where its type is wide enough.

        Returns:
            for each the accumulated gradient, in at least fp32; the gradient itself where that was wide enough.
        """

    @abstractmethod
    def update(
        self, names: Sequence[str], accumulated: Sequence[Tensor], kept: Sequence[Selection], accepted: Tensor
    ) -> None:
        """Keep the accumulated gradients, with ``kept`` written over the positions that were sent.

        Args:
            names: parameter names.
            accumulated: what :meth:`compensate` returned; may be changed.
            kept: for each, what is left at the positions that were sent.
            accepted: bool ``[len(names)]``; where false, the memory of that parameter stays as it is.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Return what waits, by parameter name (not copied)."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Replace what waits by a copy of ``state``."""


class NoMemory(Memory):
    """For an exchange that sends everything exactly: nothing ever waits, nothing is allocated."""

    @override
    def compensate(self, names: Sequence[str], gradients: Sequence[Tensor]) -> list[Tensor]:
        return [gradient.to(widened(gradient.dtype)) for gradient in gradients]

    @override
    def update(
        self, names: Sequence[str], accumulated: Sequence[Tensor], kept: Sequence[Selection], accepted: Tensor
    ) -> None:
        pass

    @override
    def state_dict(self) -> dict[str, Tensor]:
        return {}

    @override
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if state:
            raise ValueError(
                f"state for {len(state)} parameters ({', '.join(list(state)[:3])}, ...) was given to an exchange that"
                " keeps none; load it into the compressor and wire it was saved with"
            )


class ResidualMemory(Memory):
    """Error feedback: what was not sent is added to the next gradient.

    The residual of a parameter is allocated when its first gradient arrives, in fp32 (float64 for a float64 gradient),
    and from then on updated in place: 4 bytes an element.

    Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al., arXiv 1901.09847.
    """

    def __init__(self) -> None:
        self._residuals: dict[str, Tensor] = {}

    @override
    def compensate(self, names: Sequence[str], gradients: Sequence[Tensor]) -> list[Tensor]:
        accumulated = [gradient.to(widened(gradient.dtype)) for gradient in gradients]
        torch._foreach_add_(accumulated, self._residuals_of(names, accumulated))
        return accumulated

    @override
    def update(
        self, names: Sequence[str], accumulated: Sequence[Tensor], kept: Sequence[Selection], accepted: Tensor
    ) -> None:
        residuals = self._residuals_of(names, accumulated)
        if accepted.device.type == "cpu":
            decided = zip(accepted.tolist(), residuals, accumulated, kept)
            rows = [row for is_accepted, *row in decided if is_accepted]
            if rows:
                targets, sources, selections = zip(*rows)
                torch._foreach_copy_(targets, sources)
                for target, selection in zip(targets, selections):
                    _overwrite(target, selection)
            return
        # Asking the device for the decision would stop the host; both outcomes cost one pass, so the device chooses.
        for position, (residual, source, selection) in enumerate(zip(residuals, accumulated, kept)):
            torch.where(accepted[position], _overwrite(source, selection), residual, out=residual)

    @override
    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._residuals)

    @override
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._residuals = {name: residual.clone() for name, residual in state.items()}

    def _residuals_of(self, names: Sequence[str], accumulated: Sequence[Tensor]) -> list[Tensor]:
        for name, tensor in zip(names, accumulated):
            if name not in self._residuals:
                self._residuals[name] = torch.zeros_like(tensor)
        return [self._residuals[name] for name in names]


def _overwrite(tensor: Tensor, selection: Selection) -> Tensor:
    if selection.indices is None:
        return copy_elements(selection.values, tensor)
    return tensor.index_copy_(0, selection.indices, selection.values)


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which gradients of a type are accumulated and kept: at least fp32."""
    return torch.promote_types(dtype, torch.float32)
