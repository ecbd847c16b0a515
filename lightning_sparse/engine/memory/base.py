"""The contract of a memory, which decides what is KEPT."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Optional

import torch
from torch import Tensor

from lightning_sparse.compressors.feedback import Hyperparameters
from lightning_sparse.compressors.group_selection import GroupSelection
from lightning_sparse.compressors.selection import Selection

MemoryState = dict[str, dict[str, Tensor]]


class Memory(ABC):
    """Add what waits to the gradient before selection, and keep what was not sent after it.

    A step is a transaction: :meth:`compensate` changes nothing that is kept, and :meth:`update` is told which tensors'
    exchange counts. A non-finite gradient or an unused parameter therefore leaves the memory bit for bit as it was.

    Attributes:
        clips_gradients: whether the norm of the whole gradient has to be known before the first group is compensated.
        gradient_norm: that norm in this step, a tensor of one element; only set where ``clips_gradients``.
        is_watched: whether to take note of what :meth:`statistics` tells; to be set before a step.
    """

    clips_gradients: bool = False
    gradient_norm: Optional[Tensor] = None
    is_watched: bool = False

    @abstractmethod
    def compensate(
        self, names: Sequence[str], gradients: Sequence[Tensor], hyperparameters: Mapping[str, Hyperparameters]
    ) -> list[Tensor]:
        """Add what waits to the gradients.

        Args:
            names: parameter names.
            gradients: for each its flat local gradient. Changed in place where its type is wide enough.
            hyperparameters: by parameter name; empty where no optimizer is known.

        Returns:
            for each the accumulated gradient, in at least fp32; the gradient itself where that was wide enough.
        """

    @abstractmethod
    def update(
        self, names: Sequence[str], accumulated: Sequence[Tensor], kept: GroupSelection, accepted: Tensor
    ) -> None:
        """Keep the accumulated gradients, with ``kept`` written over the positions that were sent.

        Args:
            names: parameter names.
            accumulated: what :meth:`compensate` returned; may be changed.
            kept: for each, what is left at the positions that were sent.
            accepted: bool ``[len(names)]``, or ``[]`` for all of them; where false, nothing of a parameter changes.
        """

    def to_gradients(self, names: Sequence[str], updates: Sequence[Tensor], means: Sequence[Selection]) -> None:
        """Turn means of what was accumulated into gradients, in place, where that is something else.

        Args:
            names: parameter names.
            updates: for each the mean over ranks of what was sent, flat.
            means: for each what arrived, which is where its mean is not zero.
        """
        return

    def take_local_gradients(self) -> dict[str, Tensor]:
        """Return, by parameter name, those of this rank's gradients whose mean over ranks is wanted after this step.

        Asked for once a step, after all of its gradients were compensated; the names are the same on all ranks.
        """
        return {}

    def learn(self, names: Sequence[str], means: Sequence[Tensor], squared_norms: Optional[Tensor]) -> None:
        """Learn from means over ranks, of a step that is accepted; all arguments are the same on all ranks.

        Args:
            names: some of those of :meth:`take_local_gradients`.
            means: for each the mean over ranks, rounded to 16 bits. May be changed.
            squared_norms: for each the mean over ranks of the squared norm, fp32 ``[len(names)]``; ``None`` where
                gradients are not clipped.
        """
        raise NotImplementedError

    def statistics(self) -> dict[str, Tensor]:
        """Return what was done to the gradients in the last step, if it was watched, as tensors of one element."""
        return {}

    def update_norms(self) -> dict[str, Tensor]:
        """Return, where updates wait and not gradients, the norm of those that the last step added, if it was watched.

        By parameter name; of gradients the norms are known without the memory.
        """
        return {}

    @abstractmethod
    def state_dict(self) -> MemoryState:
        """Return what is kept, as ``{kind: {parameter name: flat tensor}}`` (not copied).

        The kind ``"residual"`` is what has not been sent.
        """

    @abstractmethod
    def load_state_dict(self, state: MemoryState) -> None:
        """Replace what is kept by a copy of ``state``."""


@cache
def widened(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which gradients of a type are accumulated and kept: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def in_widened(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients in the type in which they are accumulated; those that have it are not copied."""
    wide = [widened(gradient.dtype) for gradient in gradients]
    return [gradient if gradient.dtype is dtype else gradient.to(dtype) for gradient, dtype in zip(gradients, wide)]
