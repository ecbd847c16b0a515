"""Union: all ranks send their values at every index that any rank selected."""

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.selection import Selection, SelectionSize, end_to_end
from lightning_sparse.engine.wire.base import Payload, Phases, Transfer, WireFormat
from lightning_sparse.engine.wire.reduce import ReduceFormat
from lightning_sparse.functional.elements import aligned, counts_of, index_codec, message_of, read_as

_COUNT_BYTES = 8


class UnionFormat(WireFormat):
    """Average over ranks the elements that any rank selected, in three phases.

    1. Each rank sends the number of selected elements in the bucket (all-gather, 8 bytes). The last message of a step
       also has a usage flag per parameter.
    2. Each rank sends the selected indices in the flattened bucket (all-gather). All messages have the length of the
       longest message. Indices beyond the last element are padding (see :mod:`lightning_sparse.functional.elements`).
    3. All ranks average the values at all selected indices, by
       :meth:`~lightning_sparse.engine.wire.reduce.ReduceFormat.average_at`.

    Ranks may select different numbers of elements, and the same elements. Without selected elements only phase 1 runs.
    """

    def __init__(self, dtype: torch.dtype, rank: int, world_size: int, bits: Optional[int] = None) -> None:
        super().__init__(dtype, rank, world_size, bits)
        self._values = ReduceFormat(dtype, rank, world_size)

    @override
    def exchange(self, selection: Sequence[Selection], accumulated: Sequence[Tensor], used: Optional[Tensor]) -> Phases:
        mine = end_to_end(selection)
        header = mine.indices.new_full((1,), len(mine.indices)).view(torch.uint8)
        headers = yield Payload("all_gather", message_of([header] if used is None else [header, used]))
        most = int(read_as(headers[:, :_COUNT_BYTES], torch.int64).max())
        rows, numel = mine.indices[None], sum(mine.numels)
        if most:
            codec = index_codec(numel + most, most)
            padding = torch.arange(numel, numel + most - len(mine.indices), device=mine.indices.device)
            written = codec.encode(torch.cat([mine.indices, padding]))
            rows = codec.decode((yield Payload("all_gather", message_of([written]))))
        positions = rows.flatten().unique()
        counts = counts_of(positions, mine.numels)  # number of indices per tensor, without the padding
        result = yield from self._values.average_at(accumulated, positions[: sum(counts)], counts)
        if used is None:
            return result
        return result._replace(used=headers[:, _COUNT_BYTES : _COUNT_BYTES + len(used)].bool().any(dim=0))

    @override
    def transfers(self, sizes: Sequence[SelectionSize], flags: int = 0) -> list[Transfer]:
        """Return estimated transfers, as if ranks selected equally many elements, and no element in common."""
        numel, selected = sum(size.numel for size in sizes), sum(size.selected for size in sizes)
        first, most = Transfer("all_gather", aligned(_COUNT_BYTES + flags)), -(-selected // self.world_size)
        if not most:
            return [first]
        positions = Transfer("all_gather", aligned(index_codec(numel + most, most).nbytes))
        return [first, positions, *self._values.average_transfers([size.selected for size in sizes])]
