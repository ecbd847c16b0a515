"""The interface of a wire format, which writes and reads selections, phase by phase."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.selection import Selection, SelectionSize, whole


class Payload(NamedTuple):
    """Input of a collective: name, this rank's tensor, and memory for the result."""

    collective: str
    tensor: Tensor
    out: Optional[Tensor] = None


class Transfer(NamedTuple):
    """Bytes that a rank passes to a collective."""

    collective: str
    nbytes: int


class ExchangeResult(NamedTuple):
    """Result of an exchange. Values are divided by the world size before the sum, so that sums stay finite."""

    finite: Tensor  # bool []: whether all messages of all ranks are finite
    used: Optional[Tensor]  # bool: whether any rank used each parameter of the step; None without flags
    means: Sequence[Selection]  # received elements of each tensor; the sum of the rows is the mean over ranks
    kept: Sequence[Selection]  # unsent part at the selected indices; the rest is unsent


Phases = Generator[Payload, Tensor, ExchangeResult]


class WireFormat(ABC):
    """Write selections as payloads of ``collectives``, with values of ``dtype`` or in ``bits``, and read results."""

    collectives: tuple[str, ...]

    def __init__(self, dtype: torch.dtype, rank: int, world_size: int, bits: Optional[int] = None) -> None:
        self.dtype = dtype
        self.rank = rank
        self.world_size = world_size
        self._bits = bits

    @abstractmethod
    def exchange(self, selection: Sequence[Selection], accumulated: Sequence[Tensor], used: Optional[Tensor]) -> Phases:
        """Exchange :func:`grouped` selections. Each ``yield`` is a collective, and returns the result. Pure.

        Args:
            selection: the selection of each tensor.
            accumulated: the tensors of the selections, for formats that send at indices selected by other ranks.
            used: uint8, whether this rank used each parameter, with the last message of a step; otherwise ``None``.
        """

    def release(self) -> None:
        """End a step. Unused buffers may be freed."""
        return

    @abstractmethod
    def transfers(self, sizes: Sequence[SelectionSize], flags: int = 0) -> list[Transfer]:
        """Return the transfers of :meth:`exchange` for a bucket, with ``flags`` bytes of usage flags."""


class LocalFormat(WireFormat):
    """Return selections as means, with all elements counted as sent, for a method that synchronizes after a step."""

    collectives: tuple[str, ...] = ()

    @override
    def exchange(self, selection: Sequence[Selection], accumulated: Sequence[Tensor], used: Optional[Tensor]) -> Phases:
        yield from ()
        zero = accumulated[0].new_zeros(())
        return ExchangeResult(
            finite=torch.ones((), dtype=torch.bool, device=accumulated[0].device),
            used=None if used is None else used.bool(),  # each rank steps alone
            means=selection,
            kept=whole([zero.expand_as(tensor) for tensor in accumulated]),
        )

    @override
    def transfers(self, sizes: Sequence[SelectionSize], flags: int = 0) -> list[Transfer]:
        return []
