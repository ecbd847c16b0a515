"""Every rank's selection travels to every rank: one payload for the group, one all-gather."""

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.group_selection import GroupSelection
from lightning_sparse.compressors.selection import SelectionSize
from lightning_sparse.engine.wire.base import Arrival, Payload, Phases, Transfer, WireFormat, aligned, message_of
from lightning_sparse.functional import index_codec, read_as, round_to


class GatherFormat(WireFormat):
    """Values and indices of a whole group in one payload.

    The tensors of a group are laid end to end, so that one codec writes all their positions::

        values   count x 2 or 4 bytes
        indices  count x 1 or 2 bytes, and a count for each block (see lightning_sparse.functional.indices)
        used     1 byte a tensor, only where unused parameters are tracked
        padding  up to a multiple of 16 bytes

    All sizes follow from the number of elements selected, which must be the same on all ranks.
    """

    collectives: tuple[str, ...] = ("all_gather",)

    @override
    def exchange(self, selection: GroupSelection, accumulated: Sequence[Tensor], used: Optional[Tensor]) -> Phases:
        selected = selection.flat()
        values, indices, numel = selected.values, selected.indices, selected.numel
        codec = index_codec(numel, values.numel())
        sent = round_to(values if selected.filled is None else values.where(selected.filled, 0.0), self.dtype)
        sections = [sent.view(torch.uint8), codec.encode(indices, numel)]
        wires = yield Payload("all_gather", message_of(sections if used is None else [*sections, used]))
        sizes = [section.numel() for section in sections]
        value_bytes, index_bytes, rest = wires.split([*sizes, wires.shape[1] - sum(sizes)], dim=1)
        received = read_as(value_bytes, self.dtype).to(values.dtype)
        received.div_(self.ranks)
        return Arrival(
            finite=received.isfinite().all(),
            used=None if used is None else rest[:, : used.numel()].bool().any(dim=0),
            means=selected.replaced(received, codec.decode(index_bytes, numel, values.numel())),
            kept=selected.replaced(values - sent.to(values.dtype), indices),
        )

    @override
    def transfers(self, sizes: Sequence[SelectionSize]) -> list[Transfer]:
        numel = sum(size.numel for size in sizes)
        count = sum(size.selected for size in sizes)
        nbytes = count * self.dtype.itemsize + index_codec(numel, count).nbytes(numel, count)
        return [Transfer("all_gather", aligned(nbytes))]
