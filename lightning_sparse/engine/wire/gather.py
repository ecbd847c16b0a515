"""Every rank's selection travels to every rank: one payload for the group, one all-gather."""

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.end_to_end import EndToEnd, at_once
from lightning_sparse.compressors.selection import Selection, SelectionSize
from lightning_sparse.engine.wire.base import Arrival, Payload, Phases, Transfer, WireFormat
from lightning_sparse.functional import index_codec, read_as, round_to


class GatherFormat(WireFormat):
    """Values and indices of a whole group in one payload.

    The tensors of a group are laid end to end, so that one codec writes all their positions::

        values   count x 2 or 4 bytes
        indices  count x 1 or 2 bytes, and a count for each block (see lightning_sparse.functional.indices)
        used     1 byte a tensor, only where unused parameters are tracked

    All sizes follow from the number of elements selected, which must be the same on all ranks.
    """

    collectives: tuple[str, ...] = ("all_gather",)

    @override
    def exchange(
        self, selections: Sequence[Selection], accumulated: Sequence[Tensor], used: Optional[Tensor]
    ) -> Phases:
        selected = selections if isinstance(selections, EndToEnd) else _end_to_end(selections)
        values, positions, layout = selected.values, selected.positions, selected.layout
        codec = index_codec(layout.numel, layout.selected)
        sent = round_to(_filled(values, selections), self.dtype)
        sections = [sent.view(torch.uint8), codec.encode(positions, layout.numel)]
        wires = yield Payload("all_gather", torch.cat(sections if used is None else [*sections, used]))
        sizes = [section.numel() for section in sections]
        value_bytes, index_bytes, used_bytes = wires.split([*sizes, wires.shape[1] - sum(sizes)], dim=1)
        received = read_as(value_bytes, self.dtype).to(values.dtype)
        received.div_(self.ranks)
        return Arrival(
            finite=received.isfinite().all(),
            used=None if used is None else used_bytes.bool().any(dim=0),
            means=EndToEnd(received, codec.decode(index_bytes, layout.numel, layout.selected), layout),
            kept=EndToEnd(values - sent.to(values.dtype), positions, layout),
        )

    @override
    def transfers(self, sizes: Sequence[SelectionSize]) -> list[Transfer]:
        numel = sum(size.numel for size in sizes)
        count = sum(size.selected for size in sizes)
        return [Transfer("all_gather", count * self.dtype.itemsize + index_codec(numel, count).nbytes(numel, count))]


def _end_to_end(selections: Sequence[Selection]) -> EndToEnd:
    values = torch.cat([selection.values for selection in selections])
    return EndToEnd.laid(values, list(map(_positions, selections)), (selection.numel for selection in selections))


def _filled(values: Tensor, selections: Sequence[Selection]) -> Tensor:
    if all(selection.filled is None for selection in at_once(selections)):
        return values
    masks = [_all_of(selection) if selection.filled is None else selection.filled for selection in selections]
    return torch.where(torch.cat(masks), values, 0.0)


def _all_of(selection: Selection) -> Tensor:
    return torch.ones_like(selection.values, dtype=torch.bool)


def _positions(selection: Selection) -> Tensor:
    if selection.indices is None:
        return torch.arange(selection.numel, device=selection.values.device)
    return selection.indices
