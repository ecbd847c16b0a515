"""Indices as narrow as is exact: sorted positions written as an offset inside a block, and a count for each block.

A position below ``numel`` costs 8 bytes as int64 and 4 as int32. Cut into blocks of 65 536 elements it costs 2 bytes,
plus 4 for each block; cut into blocks of 256 it costs 1 byte, plus 2 for each block, which is less above a density of
about 0.8 %. Below one of 0.003 %, where most blocks hold nothing, it costs 4 bytes. All sizes follow from ``numel`` and
``count``, so every rank knows them without asking.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparse.functional.copying import read_as


class IndexCodec(NamedTuple):
    """A way to write ascending positions as bytes.

    Attributes:
        block_bits: a block holds ``2 ** block_bits`` elements.
        offset_dtype: integer type that holds a position inside a block.
        count_dtype: integer type that holds the number of positions in a block.
    """

    block_bits: int
    offset_dtype: torch.dtype
    count_dtype: torch.dtype

    def nbytes(self, numel: int, count: int) -> int:
        """Return the bytes that ``count`` positions below ``numel`` take."""
        return count * self.offset_dtype.itemsize + self._blocks(numel) * self.count_dtype.itemsize

    def encode(self, indices: Tensor, numel: int) -> Tensor:
        """Write positions as bytes.

        Args:
            indices: int64 ``[count]``, ascending, each in ``[0, numel)``.
            numel: number of elements that the positions point into.

        Returns:
            uint8 tensor of shape ``[nbytes(numel, count)]``.

        Example::

            >>> codec = index_codec(numel=100_000, count=3)
            >>> wire = codec.encode(torch.tensor([5, 70_000, 70_001]), numel=100_000)
            >>> wire.numel()
            14
            >>> codec.decode(wire.unsqueeze(0), numel=100_000, count=3)
            tensor([[    5, 70000, 70001]])
        """
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
        """Read what ``encode`` wrote on several ranks.

        Args:
            wires: uint8 ``[ranks, nbytes(numel, count)]``.
            numel: as given to ``encode``.
            count: number of positions of each rank.

        Returns:
            int64 ``[ranks, count]``.
        """
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
    """Choose the narrowest codec for ``count`` positions below ``numel``.

    Example::

        >>> index_codec(numel=1_000_000, count=1_000).offset_dtype, index_codec(1_000_000, 50_000).offset_dtype
        (torch.int16, torch.uint8)
    """
    return min(_CODECS, key=lambda codec: codec.nbytes(numel, count))
