"""Every rank selects elements of its own, and all ranks contribute their values wherever anybody selected."""

from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.selection import (
    FlatSelection,
    Selection,
    SelectionSize,
    end_to_end,
)
from lightning_sparse.engine.wire.base import ExchangeResult, Payload, Phases, Transfer, WireFormat
from lightning_sparse.engine.wire.reduce import ReduceFormat
from lightning_sparse.functional.elements import (
    Counts,
    IndexCodec,
    aligned,
    copied_to,
    index_codec,
    message_of,
    read_as,
    starts_of,
)

_COUNT_BYTES = 8
_FEW = 1 << 14  # positions that are sorted faster than their order is looked for


class UnionFormat(WireFormat):
    """The mean over all ranks of the elements that any rank selected, in two phases.

    1. How many elements each rank selected of the group, 8 bytes, with a step's last message which parameters it used,
       1 byte each, and their positions in the tensors laid end to end (see
       :mod:`lightning_sparse.functional.elements`; all-gather). There is room for some more positions than any rank
       selected in the last steps, filled with positions beyond the last element. Positions for which there is no room
       follow in a phase of their own: in a first step, for one, all of them.
    2. Everybody's values there, by :class:`~lightning_sparse.engine.wire.reduce.ReduceFormat` (all-gather, and
       all-to-all where they are many): a small dense tensor, or one of each tensor where the wire rounds (its place
       does not count). Where nobody selected anything, this is left out.

    Ranks may select different numbers of elements, and the same ones.
    """

    collectives: tuple[str, ...] = ("all_gather", "all_to_all")

    def __init__(self, dtype: torch.dtype, rank: int, ranks: int, bits: Optional[int] = None) -> None:
        super().__init__(dtype, rank, ranks, bits)
        self._values = ReduceFormat(dtype, rank, ranks, gathers_short=True)
        self._room: dict[int, int] = {}  # positions, by place of a group in the step; decides on bytes, never on values
        self._place = 0

    @override
    def exchange(self, selection: Sequence[Selection], accumulated: Sequence[Tensor], used: Optional[Tensor]) -> Phases:
        union, used = yield from self._union(end_to_end(selection), used)
        chosen = FlatSelection.at(accumulated, union.positions, union.counts)
        if len(chosen.values):
            arrival = yield from self._values.average(chosen)
        else:
            finite = torch.ones((), dtype=torch.bool, device=chosen.values.device)
            arrival = ExchangeResult(finite, None, chosen.replaced(chosen.values[None], chosen.indices[None]), chosen)
        return arrival._replace(used=used)

    @override
    def release(self) -> None:
        self._place = 0
        self._values.release()

    def _union(
        self, mine: FlatSelection, used: Optional[Tensor]
    ) -> Generator[Payload, Tensor, tuple["_Union", Optional[Tensor]]]:
        """Return what any rank selected, and whether any rank used each parameter."""
        place, self._place = self._place, self._place + 1
        room, numel = self._room.get(place, 0), sum(mine.numels)
        header = mine.indices.new_full((1,), mine.indices.numel()).view(torch.uint8)
        header = header if used is None else torch.cat([header, used])
        first = _codec_of(numel, room)
        received = yield Payload(
            "all_gather", message_of([header, first.encode(_positions(mine.indices, 0, room, numel))])
        )
        announced = read_as(received[:, :_COUNT_BYTES], torch.int64).flatten()
        found = [first.decode(received[:, header.numel() :])]
        union = _Union.of(found, announced, mine.numels)
        if union.most > room:
            rest = _codec_of(numel, union.most - room)
            written = rest.encode(_positions(mine.indices, room, union.most, numel))
            found.append(rest.decode((yield Payload("all_gather", written))))
            union = _Union.of(found, announced, mine.numels)
        self._room[place] = _room_after(room, union.most)
        return union, None if used is None else received[:, _COUNT_BYTES : header.numel()].bool().any(dim=0)

    @override
    def transfers(self, sizes: Sequence[SelectionSize], flags: int = 0) -> list[Transfer]:
        """Return the transfers of a step in which all ranks select equally many elements, all of them different."""
        numel, selected = sum(size.numel for size in sizes), sum(size.selected for size in sizes)
        room = _room_after(0, -(-selected // self.ranks))
        first = Transfer("all_gather", aligned(_COUNT_BYTES + flags + _codec_of(numel, room).nbytes))
        return [first, *self._values.average_transfers([size.selected for size in sizes])] if selected else [first]


class _Union(NamedTuple):
    """What any rank selected of tensors laid end to end, ascending."""

    positions: Tensor
    counts: Counts  # by tensor
    most: int  # selected by any rank

    @classmethod
    def of(cls, found: Sequence[Tensor], announced: Tensor, numels: Counts) -> "_Union":
        """Unite what ranks have sent, with padding beyond the last element, and read what each has announced."""
        starts = copied_to(starts_of(numels), announced.device)
        ranks = len(announced)
        # Sizes follow from what ranks selected: on a device this is the one time that the host waits for them.
        if starts.device.type == "cpu":
            positions = _different(found, starts)
            told = torch.cat([announced, torch.searchsorted(positions, starts)]).tolist()
            positions = positions[: told[-1]]
        else:
            ordered = torch.cat([positions.flatten() for positions in found]).sort().values
            are_new = torch.ones_like(ordered, dtype=torch.bool)
            torch.ne(ordered[1:], ordered[:-1], out=are_new[1:])
            running = torch.cat([starts.new_zeros(1), are_new.cumsum(0)])
            told = torch.cat([announced, running[torch.searchsorted(ordered, starts)]]).tolist()
            numbers = torch.arange(1, told[-1] + 1, device=ordered.device)
            positions = ordered[torch.searchsorted(running, numbers).sub_(1)]
        counts = tuple(last - first for first, last in pairwise(told[ranks:]))
        return cls(positions, counts, max(told[:ranks]))


def _different(found: Sequence[Tensor], starts: Tensor) -> Tensor:
    """Return the different ones of ascending rows of positions, ascending, on the host."""
    rows = [row for positions in found for row in positions.unbind()]
    if sum(map(len, rows)) > _FEW:  # where ranks look in parts of their own, of each tensor one rank's follow another's
        ends = [torch.searchsorted(row, starts).tolist() for row in rows]
        pieces = [
            row[first:last] for row, places in zip(rows, ends) for first, last in pairwise(places) if first < last
        ]
        heads = torch.cat([rows[0][:0], *(piece[:1] for piece in pieces)]).tolist()
        order = sorted(range(len(pieces)), key=heads.__getitem__)
        joined = torch.cat([rows[0][:0], *(pieces[place] for place in order)])
        if bool((joined[1:] > joined[:-1]).all()):
            return joined
    different: Tensor = torch.cat(rows).unique()
    return different


def _positions(selected: Tensor, first: int, stop: int, numel: int) -> Tensor:
    """Return some of the positions that are selected, filled up with positions beyond the last element."""
    positions = selected[first:stop]
    return torch.cat([positions, torch.arange(numel, numel + stop - first - len(positions), device=positions.device)])


def _codec_of(numel: int, room: int) -> IndexCodec:
    """Return how so many positions are written, filled up with positions beyond the last of ``numel`` elements."""
    return index_codec(numel + room, room)


def _room_after(room: int, most: int) -> int:
    """Return the room of the next step: an eighth above what any rank selected; it shrinks by a sixteenth a step."""
    return max(most + most // 8, room - room // 16)
