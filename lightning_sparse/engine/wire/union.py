"""Every rank selects elements of its own, and all ranks contribute their values wherever anybody selected."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.group_selection import FlatSelection, GroupSelection, on_device, starts_of
from lightning_sparse.compressors.selection import SelectionSize
from lightning_sparse.engine.wire.base import Arrival, Payload, Phases, Transfer, WireFormat
from lightning_sparse.engine.wire.reduce import ReduceFormat
from lightning_sparse.functional.elements import index_codec, read_as

_COUNT_BYTES = 8


class UnionFormat(WireFormat):
    """The mean over all ranks of the elements that any rank selected, in three phases.

    1. How many elements each rank selected of the group, 8 bytes, and whether it used each parameter, 1 byte a tensor
       where that is tracked (all-gather). Where nobody selected anything, this is all.
    2. Their positions in the tensors laid end to end (see :mod:`lightning_sparse.functional.elements`), padded to the
       largest count with positions beyond the last element (all-gather).
    3. Everybody's values there, by :class:`~lightning_sparse.engine.wire.reduce.ReduceFormat` (all-to-all and
       all-gather): a small dense tensor, or one of each tensor where the wire rounds (its place does not count).

    Ranks may select different numbers of elements, and the same ones.
    """

    collectives: tuple[str, ...] = ("all_gather", "all_to_all")

    def __init__(self, dtype: torch.dtype, rank: int, ranks: int) -> None:
        super().__init__(dtype, rank, ranks)
        self._values = ReduceFormat(dtype, rank, ranks)

    @override
    def exchange(self, selection: GroupSelection, accumulated: Sequence[Tensor], used: Optional[Tensor]) -> Phases:
        union = selection.flat().indices
        headers = yield Payload("all_gather", _header(union, used))
        # Sizes follow from the counts: on a GPU the host has to wait for them here, and for that of the union below.
        counts = _read_counts(headers)
        if max(counts):
            universe = selection.numel + max(counts) - min(counts)
            codec = index_codec(universe, max(counts))
            padding = torch.arange(
                selection.numel, selection.numel + max(counts) - counts[self.rank], device=union.device
            )
            wires = yield Payload("all_gather", codec.encode(torch.cat([union, padding]), universe))
            union = codec.decode(wires, universe, max(counts)).unique()
        chosen = FlatSelection.at(accumulated, *_cut(union, selection.numels))
        used_by_any = None if used is None else headers[:, _COUNT_BYTES:].bool().any(dim=0)
        if not len(chosen.values):
            finite = torch.ones((), dtype=torch.bool, device=union.device)
            return Arrival(finite, used_by_any, chosen.replaced(chosen.values[None], chosen.indices[None]), chosen)
        arrival = yield from self._values.average(chosen)
        return arrival._replace(used=used_by_any)

    @override
    def transfers(self, sizes: Sequence[SelectionSize]) -> list[Transfer]:
        """Return the transfers of a step in which all ranks select equally many elements, all of them different."""
        header = Transfer("all_gather", _COUNT_BYTES)
        numel = sum(size.numel for size in sizes)
        count = -(-sum(size.selected for size in sizes) // self.ranks)
        if not count:
            return [header]
        indices = Transfer("all_gather", index_codec(numel, count).nbytes(numel, count))
        return [header, indices, *self._values.average_transfers([size.selected for size in sizes])]


def _cut(positions: Tensor, numels: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
    """Return ascending positions in tensors laid end to end, without padding, and how many lie in each tensor."""
    # Ascending, so that whatever is padding comes after the last tensor.
    places: list[int] = torch.searchsorted(positions, on_device(starts_of(numels), positions.device)).tolist()
    return positions[: places[-1]], tuple(last - first for first, last in pairwise(places))


def _header(positions: Tensor, used: Optional[Tensor]) -> Tensor:
    count = torch.full((1,), positions.numel(), dtype=torch.int64, device=positions.device).view(torch.uint8)
    return count if used is None else torch.cat([count, used])


def _read_counts(headers: Tensor) -> list[int]:
    return [int(count) for count in read_as(headers[:, :_COUNT_BYTES], torch.int64).flatten().tolist()]
