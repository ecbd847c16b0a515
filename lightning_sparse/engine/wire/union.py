"""Every rank selects elements of its own, and all ranks contribute their values wherever anybody selected."""

from collections.abc import Generator, Sequence
from typing import Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.selection import FlatSelection, Selection, SelectionSize, end_to_end
from lightning_sparse.engine.wire.base import ExchangeResult, Payload, Phases, Transfer, WireFormat
from lightning_sparse.engine.wire.reduce import ReduceFormat
from lightning_sparse.functional.elements import IndexCodec, aligned, counts_of, index_codec, message_of, read_as

_COUNT_BYTES = 8


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
        selected = end_to_end(selection)
        positions, used = yield from self._positions(selected.indices, sum(selected.numels), used)
        counts = counts_of(positions, selected.numels)
        chosen = FlatSelection.at(accumulated, positions[: sum(counts)], counts)  # without padding, which comes last
        if not len(chosen.values):
            finite = torch.ones((), dtype=torch.bool, device=positions.device)
            return ExchangeResult(finite, used, chosen.replaced(chosen.values[None], chosen.indices[None]), chosen)
        arrival = yield from self._values.average(chosen)
        return arrival._replace(used=used)

    @override
    def release(self) -> None:
        self._place = 0
        self._values.release()

    def _positions(
        self, mine: Tensor, numel: int, used: Optional[Tensor]
    ) -> Generator[Payload, Tensor, tuple[Tensor, Optional[Tensor]]]:
        """Return what any rank selected, ascending, padding last, and whether any rank used each parameter."""
        place, self._place = self._place, self._place + 1
        room = self._room.get(place, 0)
        header = torch.full((1,), mine.numel(), dtype=torch.int64, device=mine.device).view(torch.uint8)
        header = header if used is None else torch.cat([header, used])
        first = _codec_of(numel, room)
        received = yield Payload("all_gather", message_of([header, _written(first, mine[:room])]))
        # Sizes follow from the counts: on a GPU the host has to wait for them here, and for that of the union below.
        most = int(max(read_as(received[:, :_COUNT_BYTES], torch.int64).flatten().tolist()))
        found = [first.decode(received[:, header.numel() :])]
        if most > room:
            rest = _codec_of(numel, most - room)
            found.append(rest.decode((yield Payload("all_gather", _written(rest, mine[room:])))))
        self._room[place] = _room_after(room, most)
        union = torch.cat([positions.flatten() for positions in found]).unique()
        return union, None if used is None else received[:, _COUNT_BYTES : header.numel()].bool().any(dim=0)

    @override
    def transfers(self, sizes: Sequence[SelectionSize], flags: int = 0) -> list[Transfer]:
        """Return the transfers of a step in which all ranks select equally many elements, all of them different."""
        numel, selected = sum(size.numel for size in sizes), sum(size.selected for size in sizes)
        room = _room_after(0, -(-selected // self.ranks))
        first = Transfer("all_gather", aligned(_COUNT_BYTES + flags + _codec_of(numel, room).nbytes))
        return [first, *self._values.average_transfers([size.selected for size in sizes])] if selected else [first]


def _codec_of(numel: int, room: int) -> IndexCodec:
    """Return how so many positions are written, filled up with positions beyond the last of ``numel`` elements."""
    return index_codec(numel + room, room)


def _written(codec: IndexCodec, positions: Tensor) -> Tensor:
    beyond = codec.numel - codec.room
    padding = torch.arange(beyond, codec.numel - len(positions), device=positions.device)
    return codec.encode(torch.cat([positions, padding]))


def _room_after(room: int, most: int) -> int:
    """Return the room of the next step: an eighth above what any rank selected; it shrinks by a sixteenth a step."""
    return max(most + most // 8, room - room // 16)
