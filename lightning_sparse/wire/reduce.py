"""Everything travels, and is added on the way: shards go to their owner, sums come back."""

from collections.abc import Sequence
from typing import ClassVar, Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.functional import round_to
from lightning_sparse.selection import Selection
from lightning_sparse.wire.base import Arrival, Payload, Phases, WireFormat


class ReduceFormat(WireFormat):
    """A dense sum in two phases, of the same volume as a ring all-reduce.

    1. Every rank owns one shard of the group and is sent everybody's part of it (all-to-all).
    2. The owner adds them rank by rank, in the type of the residual, and the sums go to everybody (all-gather).

    The order of the sum is fixed, so the result does not depend on where in the group an element lies, and a 16-bit
    wire rounds twice instead of at every hop: what the first rounding drops stays with the sender, what the second
    drops stays with the owner (the "server error" of 1-bit Adam, arXiv 2102.02888).
    """

    collectives: ClassVar[tuple[str, ...]] = ("all_to_all", "all_gather")

    @override
    def exchange(self, selections: Sequence[Selection], used: Optional[Tensor]) -> Phases:
        values = self._end_to_end([selection.values for selection in selections])
        sent = round_to(values, self.dtype)
        parts = yield Payload("all_to_all", sent.view(self.ranks, -1))
        total = _ordered_sum(parts, values.dtype)
        returned = round_to(total, self.dtype)
        received = (yield Payload("all_gather", returned)).flatten().to(values.dtype)
        used_by_any = None if used is None else (yield Payload("all_gather", used)).any(dim=0)
        return Arrival(
            finite=torch.stack(torch.aminmax(received)).isfinite().all(),
            used=used_by_any,
            received=received,
            sums=_split(received, selections),
            kept=_split(self._left_here(values, sent, total, returned), selections),
        )

    def _end_to_end(self, tensors: list[Tensor]) -> Tensor:
        numel = sum(tensor.numel() for tensor in tensors)
        padding = tensors[0].new_zeros(-numel % self.ranks)
        return torch.cat([*tensors, padding])

    def _left_here(self, values: Tensor, sent: Tensor, total: Tensor, returned: Tensor) -> Tensor:
        if sent is values:
            return values.new_zeros(()).expand_as(values)
        left = values - sent.to(values.dtype)
        left.view(self.ranks, -1)[self.rank] += total - returned.to(total.dtype)
        return left


def _ordered_sum(parts: Tensor, dtype: torch.dtype) -> Tensor:
    total = parts[0].to(dtype, copy=True)
    for part in parts[1:]:
        total += part
    return total


def _split(flat: Tensor, selections: Sequence[Selection]) -> list[Selection]:
    numels = [selection.numel for selection in selections]
    pieces = flat[: sum(numels)].split(numels)
    return [Selection(piece, None, numel) for piece, numel in zip(pieces, numels)]
