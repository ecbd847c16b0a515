"""The interface of wire formats, which write selections as messages and read received messages."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.selection import Selection, SelectionSize, whole


class Payload(NamedTuple):
    """Input of a collective: name of the collective, and this rank's tensor."""

    collective: str
    tensor: Tensor


class Transfer(NamedTuple):
    """Bytes that a rank passes to a collective."""

    collective: str
    nbytes: int


class ExchangeResult(NamedTuple):
    """Result of an exchange."""

    finite: Tensor  # bool []: whether all messages of all ranks are finite
    used: Optional[Tensor]  # bool: whether any rank used each parameter of the step; None if no flags were sent
    means: Sequence[Selection]  # received elements divided by the world size; the sum over rows (ranks) is the mean
    kept: Sequence[Selection]  # unsent part of each selected element; all other elements are completely unsent


Phases = Generator[Payload, Tensor, ExchangeResult]


class WireFormat(ABC):
    """Write and read messages. Values are sent in ``dtype``, or quantized to ``bits`` bits."""

    def __init__(self, dtype: torch.dtype, rank: int, world_size: int, bits: Optional[int] = None) -> None:
        self.dtype = dtype
        self.rank = rank
        self.world_size = world_size
        self._bits = bits

    @abstractmethod
    def exchange(self, selection: Sequence[Selection], accumulated: Sequence[Tensor], used: Optional[Tensor]) -> Phases:
        """Exchange the selections of a bucket. Each ``yield`` passes input to a collective and receives the output.

        Args:
            selection: the selection of each tensor; a result of :func:`grouped`.
            accumulated: gradients plus residuals. Some formats also send elements that only other ranks selected.
            used: uint8 flags of the parameters that this rank used, in a step's last message; otherwise ``None``.
        """

    def transfers(self, sizes: Sequence[SelectionSize], flags: int = 0) -> list[Transfer]:
        """Return the collectives and bytes of :meth:`exchange` for a bucket. Usage flags take ``flags`` more bytes."""
        raise NotImplementedError(f"the bytes of {type(self).__name__} depend on values, not only on sizes")


class LocalFormat(WireFormat):
    """Send nothing, and return this rank's selections as means. The compressor synchronizes ranks after the step."""

    @override
    def exchange(self, selection: Sequence[Selection], accumulated: Sequence[Tensor], used: Optional[Tensor]) -> Phases:
        yield from ()
        zero = accumulated[0].new_zeros(())
        return ExchangeResult(
            finite=torch.ones((), dtype=torch.bool, device=accumulated[0].device),
            used=None if used is None else used.bool(),  # only this rank's flags, because no rank sends flags
            means=selection,
            kept=whole([zero.expand_as(tensor) for tensor in accumulated]),
        )

    @override
    def transfers(self, sizes: Sequence[SelectionSize], flags: int = 0) -> list[Transfer]:
        return []
