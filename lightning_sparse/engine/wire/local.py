"""Nothing travels group by group: what a compressor selects stays here, until the step is over."""

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.group_selection import GroupSelection, WholeSelection
from lightning_sparse.compressors.selection import SelectionSize
from lightning_sparse.engine.wire.base import Arrival, Phases, Transfer, WireFormat


class LocalFormat(WireFormat):
    """Hand selections back as means, all counting as sent, for a method whose ranks agree only at the end of a step."""

    collectives: tuple[str, ...] = ()

    @override
    def exchange(self, selection: GroupSelection, accumulated: Sequence[Tensor], used: Optional[Tensor]) -> Phases:
        yield from ()
        return Arrival(
            finite=torch.ones((), dtype=torch.bool, device=accumulated[0].device),
            used=None,
            means=selection,
            kept=WholeSelection.of([tensor.new_zeros(()).expand_as(tensor) for tensor in accumulated]),
        )

    @override
    def transfers(self, sizes: Sequence[SelectionSize]) -> list[Transfer]:
        return []
