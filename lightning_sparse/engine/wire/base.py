"""The interface of wire formats, which write and read messages, and the formats of one message or of none."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.selection import FlatSelection, Selection, SelectionSize, end_to_end, whole
from lightning_sparse.functional.codes import (
    BIN_MEANS,
    bin_values,
    pack_codes,
    packed_nbytes,
    unpack_codes,
    values_of_bins,
)
from lightning_sparse.functional.elements import aligned, all_finite, index_codec, message_of, read_as, round_to


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


def used_anywhere(used: Optional[Tensor], rows: Tensor) -> Optional[Tensor]:
    """Return whether any rank used each parameter. Each of ``rows`` begins with the flags of one rank."""
    return None if used is None else rows[:, : len(used)].bool().any(dim=0)


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


class GatherFormat(WireFormat):
    """Gather the values and indices of a bucket in one message. Indices are positions in the flattened bucket.

    All sizes follow from the number of selected elements (``count``), which is equal on all ranks::

        values   count x 2 or 4 bytes; with ``bits``, 2 bytes per bin of each tensor, and ``bits`` bits per value
        indices  count x 1, 2 or 4 bytes, and a count for each block (see lightning_sparse.functional.elements)
        used     1 byte for each parameter of the step, only in the last message of a step
        padding  up to a multiple of 16 bytes
    """

    @override
    def exchange(self, selection: Sequence[Selection], accumulated: Sequence[Tensor], used: Optional[Tensor]) -> Phases:
        selected = end_to_end(selection)
        values, indices = selected.values, selected.indices
        codec = index_codec(sum(selected.numels), values.numel())
        written, sent = self._write(selected)
        sections = [written, codec.encode(indices)]
        wires = yield Payload("all_gather", message_of(sections if used is None else [*sections, used]))
        sizes = [section.numel() for section in sections]
        value_bytes, index_bytes, rest = wires.split([*sizes, wires.shape[1] - sum(sizes)], dim=1)
        received = self._read(value_bytes, selected.counts).to(values.dtype) / self.world_size
        return ExchangeResult(
            finite=all_finite(received),
            used=used_anywhere(used, rest),
            means=selected.replaced(received, codec.decode(index_bytes)),
            kept=selected.replaced(values - sent.to(values.dtype), indices),
        )

    def _write(self, selected: FlatSelection) -> tuple[Tensor, Tensor]:
        """Return the selected values as bytes, and the rounded values that a receiver reads from these bytes."""
        if self._bits is None:
            values = selected.values if selected.filled is None else selected.values.where(selected.filled, 0.0)
            sent = round_to(values, self.dtype)
            return sent.view(torch.uint8), sent
        assert selected.filled is None
        codes, means = bin_values(selected.values, selected.counts, self._bits)
        written = torch.cat([means.view(torch.uint8), pack_codes(codes, self._bits)])
        return written, values_of_bins(codes, means, selected.counts, self._bits)

    def _read(self, written: Tensor, counts: Sequence[int]) -> Tensor:
        """Read values of several ranks, uint8 ``[world_size, nbytes]``, as ``[world_size, sum(counts)]``."""
        if self._bits is None:
            return written.view(self.dtype)  # each row starts with the values, so the values are aligned
        packed = packed_nbytes(sum(counts), self._bits)
        means = read_as(written[:, : written.shape[1] - packed], BIN_MEANS)
        room = packed * 8 // self._bits
        codes = unpack_codes(written[:, -packed:].flatten(), self._bits, len(written) * room).view(-1, room)
        return values_of_bins(codes[:, : sum(counts)], means, counts, self._bits)

    @override
    def transfers(self, sizes: Sequence[SelectionSize], flags: int = 0) -> list[Transfer]:
        numel = sum(size.numel for size in sizes)
        count = sum(size.selected for size in sizes)
        nbytes = count * self.dtype.itemsize
        if self._bits is not None:
            nbytes = len(sizes) * BIN_MEANS.itemsize * 2**self._bits + packed_nbytes(count, self._bits)
        return [Transfer("all_gather", aligned(nbytes + index_codec(numel, count).nbytes + flags))]
