"""The contract of a wire format, which decides how a selection is WRITTEN, phase by phase."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.selection import Selection, SelectionSize, whole


class Payload(NamedTuple):
    """One collective's worth of bytes: which of a communicator's, this rank's tensor, and memory for the result."""

    collective: str
    tensor: Tensor
    out: Optional[Tensor] = None


class Transfer(NamedTuple):
    """Bytes that one rank hands to one collective."""

    collective: str
    nbytes: int


class ExchangeResult(NamedTuple):
    """Result of an exchange; values are divided by the number of ranks before they are added: sums stay finite."""

    finite: Tensor  # bool []: whether everything that any rank sent is
    used: Optional[Tensor]  # bool: which parameters of the step any rank used; None where none was told
    means: Sequence[Selection]  # of each tensor the received elements: rows add up to the mean over ranks
    kept: Sequence[Selection]  # of each tensor what stays here at the places sent; elsewhere all does


Phases = Generator[Payload, Tensor, ExchangeResult]


class WireFormat(ABC):
    """Write selections as payloads of ``collectives``, values as ``dtype`` or in ``bits``, and read what arrives."""

    collectives: tuple[str, ...]

    def __init__(self, dtype: torch.dtype, rank: int, world_size: int, bits: Optional[int] = None) -> None:
        self.dtype = dtype
        self.rank = rank
        self.world_size = world_size
        self._bits = bits

    @abstractmethod
    def exchange(self, selection: Sequence[Selection], accumulated: Sequence[Tensor], used: Optional[Tensor]) -> Phases:
        """Write :func:`grouped` selections; each ``yield`` is one collective and receives its result. Changes nothing.

        ``accumulated`` is selected from, for formats in which ranks send at each other's choices; ``used``, uint8, says
        with a step's last message which of its parameters this rank has used, and is ``None`` with all others.
        """

    def release(self) -> None:
        """End a step: memory that none of its buckets needed may be given back."""
        return

    @abstractmethod
    def transfers(self, sizes: Sequence[SelectionSize], flags: int = 0) -> list[Transfer]:
        """Return what :meth:`exchange` hands to collectives for a bucket, with so many ``flags`` of what was used."""


class LocalFormat(WireFormat):
    """Hand selections back as means, all counting as sent, for a method whose ranks agree only at the end of a step."""

    collectives: tuple[str, ...] = ()

    @override
    def exchange(self, selection: Sequence[Selection], accumulated: Sequence[Tensor], used: Optional[Tensor]) -> Phases:
        yield from ()
        zero = accumulated[0].new_zeros(())
        return ExchangeResult(
            finite=torch.ones((), dtype=torch.bool, device=accumulated[0].device),
            used=None if used is None else used.bool(),  # each rank steps by itself
            means=selection,
            kept=whole([zero.expand_as(tensor) for tensor in accumulated]),
        )

    @override
    def transfers(self, sizes: Sequence[SelectionSize], flags: int = 0) -> list[Transfer]:
        return []
