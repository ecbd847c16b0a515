"""Two roads: tensors that are sent whole travel by one format, those of which some elements are sent by another."""

from collections.abc import Sequence
from typing import Optional

from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.end_to_end import EndToEnd
from lightning_sparse.compressors.selection import Selection, SelectionSize
from lightning_sparse.engine.wire.base import Arrival, Phases, Transfer, WireFormat


class RoutedFormat(WireFormat):
    """Send each selection by the format that suits it, one exchange after the other; an empty one is left out.

    A gather hands every rank's part to every rank, ``ranks - 1`` times the volume of a tensor, and its indices; a
    reduction of the whole tensor takes ``2 (ranks - 1) / ranks``. Which way a tensor goes depends on itself alone, so
    that it does not matter which others it travels with.

    Args:
        sparse: for selections with indices.
        dense: for selections without indices, which stand for every element.
    """

    def __init__(self, sparse: WireFormat, dense: WireFormat) -> None:
        super().__init__(sparse.dtype, sparse.rank, sparse.ranks)
        self._sparse = sparse
        self._dense = dense
        self.collectives = tuple(dict.fromkeys((*sparse.collectives, *dense.collectives)))

    @override
    def exchange(
        self, selections: Sequence[Selection], accumulated: Sequence[Tensor], used: Optional[Tensor]
    ) -> Phases:
        if isinstance(selections, EndToEnd):
            return (yield from self._sparse.exchange(selections, accumulated, used))
        sparse = [position for position, selection in enumerate(selections) if selection.indices is not None]
        dense = [position for position, selection in enumerate(selections) if selection.indices is None]
        arrivals: list[Arrival] = []
        order: list[int] = []
        for positions, wire in ((sparse, self._sparse), (dense, self._dense)):
            if positions:
                # What is known of the whole group travels once, with whichever goes first.
                arrival = yield from wire.exchange(
                    [selections[position] for position in positions],
                    [accumulated[position] for position in positions],
                    None if arrivals else used,
                )
                arrivals.append(arrival)
                order.extend(positions)
        return _joined(arrivals, order)

    @override
    def end_step(self) -> None:
        self._sparse.end_step()
        self._dense.end_step()

    @override
    def transfers(self, sizes: Sequence[SelectionSize]) -> list[Transfer]:
        sparse = [size for size in sizes if not size.is_whole]
        dense = [size for size in sizes if size.is_whole]
        roads = ((sparse, self._sparse), (dense, self._dense))
        return [transfer for part, wire in roads if part for transfer in wire.transfers(part)]


def _joined(arrivals: Sequence[Arrival], order: Sequence[int]) -> Arrival:
    first, *others = arrivals
    if not others:
        return first
    finite = first.finite
    for other in others:
        finite = finite & other.finite
    return Arrival(
        finite=finite,
        used=first.used,
        means=_put_back([mean for arrival in arrivals for mean in arrival.means], order),
        kept=_put_back([kept for arrival in arrivals for kept in arrival.kept], order),
    )


def _put_back(selections: Sequence[Selection], order: Sequence[int]) -> list[Selection]:
    by_position = dict(zip(order, selections))
    return [by_position[position] for position in range(len(order))]
