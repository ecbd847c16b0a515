"""The contract of a wire format, which decides how a selection is WRITTEN, phase by phase."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from lightning_sparse.compressors.group_selection import GroupSelection
from lightning_sparse.compressors.selection import SelectionSize


class Payload(NamedTuple):
    """One collective's worth of bytes.

    Attributes:
        collective: name of the collective that carries it, a method of
            :class:`~lightning_sparse.engine.collectives.Collectives`.
        tensor: what this rank hands in.
        out: where the result goes, if the format keeps memory for it.
    """

    collective: str
    tensor: Tensor
    out: Optional[Tensor] = None


class Transfer(NamedTuple):
    """Bytes that one collective carries.

    Attributes:
        collective: name as in :class:`Payload`.
        nbytes: what one rank hands in.
    """

    collective: str
    nbytes: int


class Arrival(NamedTuple):
    """Result of an exchange.

    Attributes:
        finite: bool ``[]``, equal on all ranks: whether everything that any rank sent is finite.
        used: bool ``[tensors]``, equal on all ranks: whether any rank used the parameter; ``None`` where that is not
            tracked.
        means: for each tensor the received elements, each already divided by the number of ranks (before they are
            added, so that a sum of large values stays finite, as in DDP); rows add up to the mean over ranks.
        kept: for each tensor what stays here at the positions that were sent; what was not sent stays whole.
    """

    finite: Tensor
    used: Optional[Tensor]
    means: GroupSelection
    kept: GroupSelection


_ALIGNMENT = 16  # bytes that NCCL copies at a time, from addresses that are multiples of it; else it is far slower


def aligned(nbytes: int) -> int:
    """Return the size of a message of so many bytes, so that what comes behind it starts aligned.

    Example::

        >>> aligned(33)
        48
    """
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def message_of(sections: Sequence[Tensor]) -> Tensor:
    """Lay sections, uint8 ``[..., nbytes]``, end to end, up to an aligned size."""
    nbytes = sum(section.shape[-1] for section in sections)
    padding = sections[0].new_zeros(*sections[0].shape[:-1], aligned(nbytes) - nbytes)
    return torch.cat([*sections, padding], dim=-1)


Phases = Generator[Payload, Tensor, Arrival]


class WireFormat(ABC):
    """Write selections as payloads, and read what arrives.

    Args:
        dtype: floating-point type of the values that travel.
        rank: this rank within its process group.
        ranks: size of the process group.

    Attributes:
        collectives: names of the collectives that it asks for.
    """

    collectives: tuple[str, ...]

    def __init__(self, dtype: torch.dtype, rank: int, ranks: int) -> None:
        self.dtype = dtype
        self.rank = rank
        self.ranks = ranks

    @abstractmethod
    def exchange(self, selection: GroupSelection, accumulated: Sequence[Tensor], used: Optional[Tensor]) -> Phases:
        """Write what is selected of a group; each ``yield`` is one collective and receives its result.

        Args:
            selection: what is sent of each tensor of the group; not changed.
            accumulated: what was selected from, for a format in which one rank asks for the values of another's
                choice; not changed.
            used: uint8 ``[tensors]``, whether this rank used each parameter; ``None`` where that is not tracked.

        Returns:
            what arrived, as the generator's return value.
        """

    def end_step(self) -> None:
        """End a step: memory that none of its groups needed may be given back."""
        return

    @abstractmethod
    def transfers(self, sizes: Sequence[SelectionSize]) -> list[Transfer]:
        """Return what :meth:`exchange` hands to collectives for a group in which unused parameters are not tracked.

        Args:
            sizes: of the selection of each tensor of the group.
        """
