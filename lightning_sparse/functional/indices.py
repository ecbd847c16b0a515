"""Indices as narrow as is exact: ascending positions written as an offset inside a block, and a count for each block.

A position costs 2 bytes in blocks of 65 536 elements, plus 4 a block; 1 byte in blocks of 256, plus 2 a block, which is
less above a density of about 0.8 %; 4 bytes below one of 0.003 %, where most blocks hold nothing. Sizes follow from
``numel`` and ``count``, so every rank knows them without asking.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparse.functional.copying import read_as


class IndexCodec(NamedTuple):
    """A way to write ascending positions as bytes; a block holds ``2 ** block_bits`` elements."""

    block_bits: int
    offset_dtype: torch.dtype
    count_dtype: torch.dtype

    def nbytes(self, numel: int, count: int) -> int:
        """Return the bytes that ``count`` positions below ``numel`` take."""
        return count * self.offset_dtype.itemsize + self._blocks(numel) * self.count_dtype.itemsize

    def encode(self, indices: Tensor, numel: int) -> Tensor:
        """Write positions, int64 ``[count]``, ascending and below ``numel``, as uint8 ``[nbytes(numel, count)]``."""
        return self.encode_rows(indices.unsqueeze(0), numel).squeeze(0)

    def encode_rows(self, indices: Tensor, numel: int) -> Tensor:
        """Write several rows of positions, int64 ``[rows, count]``, as uint8 ``[rows, nbytes(numel, count)]``."""
        rows, blocks = len(indices), self._blocks(numel)
        starts = torch.arange(rows * blocks + 1, device=indices.device) << self.block_bits
        laid = indices
        if rows > 1:
            laid = indices + starts[: rows * blocks : blocks].unsqueeze(1)
        counts = torch.searchsorted(laid.flatten(), starts).diff().to(self.count_dtype).view(rows, blocks)
        offsets = ((indices & self._mask) + torch.iinfo(self.offset_dtype).min).to(self.offset_dtype)
        return torch.cat([offsets.view(torch.uint8), counts.view(torch.uint8)], dim=1)

    def decode(self, wires: Tensor, numel: int, count: int) -> Tensor:
        """Read what ranks have written, uint8 ``[ranks, nbytes(numel, count)]``, as int64 ``[ranks, count]``."""
        ranks = len(wires)
        offset_bytes = count * self.offset_dtype.itemsize
        offsets = read_as(wires[:, :offset_bytes], self.offset_dtype).long() - torch.iinfo(self.offset_dtype).min
        counts = read_as(wires[:, offset_bytes:], self.count_dtype).long()
        starts = torch.arange(self._blocks(numel), device=wires.device) << self.block_bits
        # The size is known, so a GPU need not be asked for it.
        block_starts = torch.repeat_interleave(starts.repeat(ranks), counts.flatten(), output_size=ranks * count)
        return offsets.add_(block_starts.view(ranks, count))

    @property
    def _mask(self) -> int:
        return (1 << self.block_bits) - 1

    def _blocks(self, numel: int) -> int:
        return (numel + self._mask) >> self.block_bits


_CODECS = (
    IndexCodec(16, torch.int16, torch.int32),
    IndexCodec(8, torch.uint8, torch.int16),
    IndexCodec(32, torch.int32, torch.int32),
)


def index_codec(numel: int, count: int) -> IndexCodec:
    """Choose the narrowest codec for ``count`` positions below ``numel``."""
    return min(_CODECS, key=lambda codec: codec.nbytes(numel, count))
