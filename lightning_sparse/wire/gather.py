"""Every rank's selection travels to every rank: one payload for the group, one all-gather."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.functional import IndexCodec, index_codec, read_as, round_to
from lightning_sparse.selection import Selection, SelectionSize
from lightning_sparse.wire.base import Arrival, Payload, Phases, Transfer, WireFormat


class GatherFormat(WireFormat):
    """Values and indices of a whole group in one payload.

    The tensors of a group are laid end to end, so that one codec writes all their positions::

        values   count x 2 or 4 bytes
        indices  count x 1 or 2 bytes, and a count for each block (see lightning_sparse.functional.indices)
        used     1 byte a tensor, only where unused parameters are tracked

    All sizes follow from the number of elements selected, which must be the same on all ranks.
    """

    collectives: tuple[str, ...] = ("all_gather",)

    def __init__(self, dtype: torch.dtype, rank: int, ranks: int) -> None:
        super().__init__(dtype, rank, ranks)
        # Groups are the same step after step, until a schedule or a density changes.
        self._layout = lru_cache(maxsize=1024)(_layout)

    @override
    def exchange(
        self, selections: Sequence[Selection], accumulated: Sequence[Tensor], used: Optional[Tensor]
    ) -> Phases:
        layout = self._layout(
            tuple(selection.numel for selection in selections),
            tuple(selection.values.numel() for selection in selections),
            selections[0].values.device,
        )
        values = torch.cat([selection.values for selection in selections])
        sent = round_to(_filled(values, selections), self.dtype)
        places = [_positions(selection) for selection in selections]
        indices = torch.cat(places)
        sections = [sent.view(torch.uint8), layout.codec.encode(indices + layout.starts, layout.numel)]
        wires = yield Payload("all_gather", torch.cat(sections if used is None else [*sections, used]))
        return self._read(layout, wires, used is not None, places, values, sent)

    @override
    def transfers(self, sizes: Sequence[SelectionSize]) -> list[Transfer]:
        numel = sum(size.numel for size in sizes)
        count = sum(size.selected for size in sizes)
        return [Transfer("all_gather", count * self.dtype.itemsize + index_codec(numel, count).nbytes(numel, count))]

    def _read(
        self, layout: "_Layout", wires: Tensor, has_used: bool, places: Sequence[Tensor], values: Tensor, sent: Tensor
    ) -> Arrival:
        count = values.numel()
        sizes = [count * self.dtype.itemsize, layout.codec.nbytes(layout.numel, count)]
        value_bytes, index_bytes, used = wires.split([*sizes, wires.shape[1] - sum(sizes)], dim=1)
        received = read_as(value_bytes, self.dtype).to(values.dtype)
        received.div_(self.ranks)
        positions = layout.codec.decode(index_bytes, layout.numel, count).sub_(layout.starts)
        left = values - sent.to(values.dtype)
        return Arrival(
            finite=received.isfinite().all(),
            used=used.bool().any(dim=0) if has_used else None,
            means=layout.split(received, positions.split(layout.counts, -1)),
            kept=layout.split(left, places),
        )


class _Layout(NamedTuple):
    """Where the tensors of a group, and what is sent of them, lie when laid end to end."""

    numels: tuple[int, ...]
    counts: tuple[int, ...]
    numel: int
    starts: Tensor  # int64 [count]: for each element sent, where its tensor starts
    codec: IndexCodec

    def split(self, values: Tensor, indices: Iterable[Tensor]) -> list[Selection]:
        pieces = zip(values.split(self.counts, -1), indices, self.numels)
        return [Selection(*piece) for piece in pieces]


def _layout(numels: tuple[int, ...], counts: tuple[int, ...], device: torch.device) -> _Layout:
    starts = torch.tensor((0, *numels[:-1])).cumsum(0).repeat_interleave(torch.tensor(counts)).to(device)
    return _Layout(numels, counts, sum(numels), starts, index_codec(sum(numels), sum(counts)))


def _filled(values: Tensor, selections: Sequence[Selection]) -> Tensor:
    if all(selection.filled is None for selection in selections):
        return values
    masks = [_all_of(selection) if selection.filled is None else selection.filled for selection in selections]
    return torch.where(torch.cat(masks), values, 0.0)


def _all_of(selection: Selection) -> Tensor:
    return torch.ones_like(selection.values, dtype=torch.bool)


def _positions(selection: Selection) -> Tensor:
    if selection.indices is None:
        return torch.arange(selection.numel, device=selection.values.device)
    return selection.indices
