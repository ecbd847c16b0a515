"""Dense all-reduce, and union: an all-reduce of the values at every index that any rank selected."""

from abc import abstractmethod
from collections.abc import Generator, Sequence
from typing import Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.selection import (
    FlatSelection,
    Selection,
    SelectionSize,
    end_to_end,
    overwrite,
    whole,
)
from lightning_sparse.engine.wire.base import ExchangeResult, Payload, Phases, Transfer, WireFormat, used_anywhere
from lightning_sparse.functional.codes import BLOCK, dequantize, quantize, quantized_nbytes
from lightning_sparse.functional.elements import (
    Counts,
    aligned,
    all_finite,
    counts_of,
    cut_into,
    index_codec,
    mean_of_rows,
    message_of,
    read_as,
    round_to,
    shard_numel,
)

_COUNT_BYTES = 8  # bytes of a number of selected elements
Positions = Generator[Payload, Tensor, tuple[Tensor, Counts, Optional[Tensor]]]


class ReduceFormat(WireFormat):
    """Compute a dense mean in two collectives, with as many bytes as a ring all-reduce.

    1. Every rank owns a shard of every tensor, and receives this shard from all ranks (all-to-all).
    2. The owner adds up the shards rank by rank, in the residual's dtype. All ranks receive the means (all-gather).

    The sum has a fixed order, so the result does not depend on a tensor's position in the bucket. With 16 bits, values
    are rounded twice instead of at every hop of a ring. The residual of the sender stores the first rounding error, and
    the residual of the owner the second (the "server error" of 1-bit Adam, arXiv 2102.02888). With ``bits``, values are
    sent as codes in blocks with a shared scale (:mod:`lightning_sparse.functional.codes`), and a shard consists of
    whole blocks. Usage flags are sent like another tensor, or with ``bits`` in a third collective.
    """

    def __init__(self, dtype: torch.dtype, rank: int, world_size: int, bits: Optional[int] = None) -> None:
        super().__init__(dtype, rank, world_size, bits)
        self._multiple = 1 if bits is None else BLOCK

    @override
    def exchange(self, selection: Sequence[Selection], accumulated: Sequence[Tensor], used: Optional[Tensor]) -> Phases:
        # Without ``bits``, usage flags are sent like a tensor. Quantization could round flags to zero.
        flags = [] if used is None or self._bits is not None else [used.to(selection[0].values.dtype)]
        values = self._cut([*(each.values for each in selection), *flags])
        written, sent = self._write(values)
        parts = self._read((yield Payload("all_to_all", written)), values)
        mean = mean_of_rows(parts, values.dtype)
        written, returned = self._write(mean.unsqueeze(0))
        received = self._read((yield Payload("all_gather", written.squeeze(0))), values).to(values.dtype)
        numels = [*(each.numel for each in selection), *map(Tensor.numel, flags)]
        arrived = self._split(received, numels)
        unsent = self._split(self._unsent(values, sent, mean, returned.squeeze(0)), numels[: len(selection)])
        if flags and used is not None:
            used = arrived.pop().values.reshape(-1)[: len(used)] > 0
        elif used is not None:
            used = (yield Payload("all_gather", used)).bool().any(dim=0)
        return ExchangeResult(all_finite(received), used, means=arrived, kept=unsent)

    @override
    def transfers(self, sizes: Sequence[SelectionSize], flags: int = 0) -> list[Transfer]:
        if flags and self._bits is not None:
            return [*self.transfers(sizes), Transfer("all_gather", flags)]
        shard = sum(self._shard_numel(numel) for numel in (*(size.numel for size in sizes), flags))
        nbytes = aligned(shard * self.dtype.itemsize if self._bits is None else quantized_nbytes(shard, self._bits))
        return [Transfer("all_to_all", nbytes * self.world_size), Transfer("all_gather", nbytes)]

    def _write(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bytes or numbers to send, and the rounded values that a receiver reads from the message."""
        if self._bits is None:
            sent = round_to(values, self.dtype)
            return sent, sent
        quantized = quantize(values, self._bits)
        return message_of([quantized]), dequantize(quantized, self._bits)

    def _read(self, received: Tensor, values: Tensor) -> Tensor:
        if self._bits is None:
            return received
        return dequantize(received[:, : quantized_nbytes(values.shape[1], self._bits)], self._bits)

    def _cut(self, tensors: Sequence[Tensor]) -> Tensor:
        numels = map(Tensor.numel, tensors)
        columns = sum(map(self._shard_numel, numels))
        if self._bits is None:  # With ``bits``, message_of() adds padding.
            columns = aligned(columns * self.dtype.itemsize) // self.dtype.itemsize
        return cut_into(tensors[0].new_empty(self.world_size, columns), tensors, self._multiple)

    def _shard_numel(self, numel: int) -> int:
        return shard_numel(numel, self.world_size, self._multiple)

    def _split(self, shards: Tensor, numels: Sequence[int]) -> list[Selection]:
        widths = list(map(self._shard_numel, numels))
        pieces = shards[:, : sum(widths)].split(widths, dim=1)
        return [Selection(piece, None, numel) for piece, numel in zip(pieces, numels)]

    def _unsent(self, values: Tensor, sent: Tensor, mean: Tensor, returned: Tensor) -> Tensor:
        if sent is values:
            return values.new_zeros(()).expand_as(values)
        unsent = values - sent.to(values.dtype)
        unsent[self.rank] += (mean - returned.to(mean.dtype)).mul_(self.world_size)
        return unsent


class PositionsFormat(WireFormat):
    """Average over ranks the values at positions in the flattened bucket, on which ranks agree first."""

    def __init__(self, dtype: torch.dtype, rank: int, world_size: int, bits: Optional[int] = None) -> None:
        super().__init__(dtype, rank, world_size, bits)
        self._values = ReduceFormat(dtype, rank, world_size)

    @abstractmethod
    def agree(self, selected: FlatSelection, used: Optional[Tensor]) -> Positions:
        """Return positions (ascending, equal on all ranks), number per tensor, and whether any rank used parameters."""

    @override
    def exchange(self, selection: Sequence[Selection], accumulated: Sequence[Tensor], used: Optional[Tensor]) -> Phases:
        indices, counts, used = yield from self.agree(end_to_end(selection), used)
        chosen = FlatSelection.at(accumulated, indices, counts)
        if not len(indices):
            means = chosen.replaced(chosen.values[None], indices[None])
            return ExchangeResult(all_finite(chosen.values), used, means, chosen)
        is_exact = chosen.values.dtype is self.dtype  # rounded values are divided into shards tensor by tensor
        pieces = [chosen.values] if is_exact else [each for each in chosen.values.split(counts) if each.numel()]
        result = yield from self._values.exchange(whole(pieces), pieces, None)
        means = chosen.replaced(_concatenated(result.means)[None], indices[None])
        kept = chosen.replaced(_concatenated(result.kept), indices)
        return ExchangeResult(result.finite, used, means, kept)


class UnionFormat(PositionsFormat):
    """Average over ranks the elements that any rank selected, in three phases.

    1. Each rank sends the number of selected elements in the bucket (all-gather, 8 bytes). The last message of a step
       also has a usage flag per parameter.
    2. Each rank sends the selected indices in the flattened bucket (all-gather). All messages have the length of the
       longest message. Indices beyond the last element are padding (see :mod:`lightning_sparse.functional.elements`).
    3. All ranks average the values at all selected indices, as :class:`ReduceFormat` does.

    Selections of the ranks may differ in size, and may overlap. Without selected elements, only phase 1 runs.
    """

    @override
    def agree(self, selected: FlatSelection, used: Optional[Tensor]) -> Positions:
        own = selected.indices
        header = own.new_full((1,), len(own)).view(torch.uint8)
        headers = yield Payload("all_gather", message_of([header] if used is None else [header, used]))
        most = int(read_as(headers[:, :_COUNT_BYTES], torch.int64).max())
        rows, numel = own[None], sum(selected.numels)
        if most:
            codec = index_codec(numel + most, most)
            padding = torch.arange(numel, numel + most - len(own), device=own.device)
            written = codec.encode(torch.cat([own, padding]))
            rows = codec.decode((yield Payload("all_gather", message_of([written]))))
        positions = rows.flatten().unique()
        counts = counts_of(positions, selected.numels)  # number of indices per tensor, without the padding
        return positions[: sum(counts)], counts, used_anywhere(used, headers[:, _COUNT_BYTES:])


def _concatenated(received: Sequence[Selection]) -> Tensor:
    numels = [each.numel for each in received]
    laid = received[0].values.new_empty(sum(numels))
    overwrite(laid.split(numels), received)
    return laid
