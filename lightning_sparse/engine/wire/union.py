"""Every rank selects elements of its own, and all ranks contribute their values wherever anybody selected."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.selection import Selection, SelectionSize
from lightning_sparse.engine.wire.base import Arrival, Payload, Phases, Transfer, WireFormat
from lightning_sparse.engine.wire.reduce import ReduceFormat
from lightning_sparse.functional import index_codec, read_as

_COUNT_BYTES = 8


class UnionFormat(WireFormat):
    """The mean over all ranks of the elements that any rank selected, in three phases.

    1. How many elements each rank selected of the group, 8 bytes, and whether it used each parameter, 1 byte a tensor,
       only where that is tracked (all-gather).
    2. Which: positions in the tensors of the group laid end to end, as narrow as is exact (see
       :mod:`lightning_sparse.functional.indices`), padded to the largest count with positions beyond the last element
       (all-gather).
    3. Everybody's values there, by :class:`~lightning_sparse.engine.wire.reduce.ReduceFormat` (all-to-all and
       all-gather). To it the chosen elements of each tensor are a small dense tensor, so that with a 16-bit wire, too,
       nothing depends on where in a group a tensor lies.

    Where nobody selected anything, the first phase is the last. Ranks may select different numbers of elements, and the
    same ones.
    """

    collectives: tuple[str, ...] = ("all_gather", "all_to_all")

    def __init__(self, dtype: torch.dtype, rank: int, ranks: int) -> None:
        super().__init__(dtype, rank, ranks)
        self._values = ReduceFormat(dtype, rank, ranks)
        # Groups are the same step after step, until a schedule changes.
        self._layout = lru_cache(maxsize=1024)(_layout)

    @override
    def exchange(
        self, selections: Sequence[Selection], accumulated: Sequence[Tensor], used: Optional[Tensor]
    ) -> Phases:
        layout = self._layout(tuple(tensor.numel() for tensor in accumulated), accumulated[0].device)
        union = layout.positions(selections)
        headers = yield Payload("all_gather", _header(union, used))
        # Nobody knows the sizes of what follows before the counts have travelled. On a GPU the host has to wait for
        # them here, and for the size of the union below.
        counts = _read_counts(headers)
        if max(counts):
            universe = layout.numel + max(counts) - min(counts)
            codec = index_codec(universe, max(counts))
            padding = torch.arange(layout.numel, layout.numel + max(counts) - counts[self.rank], device=union.device)
            wires = yield Payload("all_gather", codec.encode(torch.cat([union, padding]), universe))
            union = codec.decode(wires, universe, max(counts)).unique()
        chosen = layout.split(union)
        values = [
            Selection(tensor.index_select(0, indices), None, indices.numel())
            for tensor, indices in zip(accumulated, chosen)
            if indices.numel()
        ]
        arrival = _NOTHING if not values else (yield from self._values.exchange(values, accumulated, None))
        means = _placed(arrival.means, chosen, accumulated)
        return Arrival(
            finite=arrival.finite.to(union.device),
            used=None if used is None else headers[:, _COUNT_BYTES:].bool().any(dim=0),
            means=[Selection(mean[None], indices[None], numel) for mean, indices, numel in means],
            kept=[Selection(*left) for left in _placed(arrival.kept, chosen, accumulated)],
        )

    @override
    def transfers(self, sizes: Sequence[SelectionSize]) -> list[Transfer]:
        """Return the transfers of a step in which all ranks select equally many elements, all of them different."""
        header = Transfer("all_gather", _COUNT_BYTES)
        numel = sum(size.numel for size in sizes)
        count = -(-sum(size.selected for size in sizes) // self.ranks)
        if not count:
            return [header]
        chosen = [SelectionSize(size.selected, size.selected) for size in sizes if size.selected]
        indices = Transfer("all_gather", index_codec(numel, count).nbytes(numel, count))
        return [header, indices, *self._values.transfers(chosen)]


_NOTHING = Arrival(finite=torch.ones((), dtype=torch.bool), used=None, means=[], kept=[])


class _Layout(NamedTuple):
    """Where the tensors of a group lie when laid end to end."""

    starts: tuple[int, ...]
    numel: int
    bounds: Tensor  # int64 [tensors + 1]: the starts, and where the last tensor ends

    def positions(self, selections: Sequence[Selection]) -> Tensor:
        pieces = [
            selection.indices + start
            for selection, start in zip(selections, self.starts)
            if selection.indices is not None and selection.indices.numel()
        ]
        return torch.cat(pieces) if pieces else self.bounds[:0]

    def split(self, positions: Tensor) -> list[Tensor]:
        # Ascending, so that whatever is padding comes after the last tensor.
        places: list[int] = torch.searchsorted(positions, self.bounds).tolist()
        return [
            positions[first:last] - start if last > first else positions[:0]
            for first, last, start in zip(places, places[1:], self.starts)
        ]


def _layout(numels: tuple[int, ...], device: torch.device) -> _Layout:
    *starts, numel = bounds = [0, *accumulate(numels)]
    return _Layout(tuple(starts), numel, torch.tensor(bounds).to(device))


def _header(positions: Tensor, used: Optional[Tensor]) -> Tensor:
    count = torch.full((1,), positions.numel(), dtype=torch.int64, device=positions.device).view(torch.uint8)
    return count if used is None else torch.cat([count, used])


def _read_counts(headers: Tensor) -> list[int]:
    return [int(count) for count in read_as(headers[:, :_COUNT_BYTES], torch.int64).flatten().tolist()]


def _placed(
    received: Sequence[Selection], chosen: Sequence[Tensor], tensors: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield values, indices and number of elements of each tensor; only where there are indices was anything sent."""
    arrived = iter(received)
    for indices, tensor in zip(chosen, tensors):
        values = next(arrived).values.reshape(-1)[: indices.numel()] if indices.numel() else tensor[:0]
        yield values, indices, tensor.numel()
