"""Which groupings of grouping are tried, and which of them is the best."""

from collections.abc import Mapping, Sequence

from lightning_sparse.schedule.plan import Grouping
from lightning_sparse.schedule.step_profile import equal_parts, run_of

_PARTS = (1, 2, 4, 8, 16)  # groups of the groupings that are tried before anything is known
_WHOLE_SHARES = (1 / 64, 1 / 32, 1 / 16)  # of the model, sent whole to see what that takes
_WORTH = 1.05  # times as long a step may be seen to take if it sends more: what should cost nothing, to a measurement
_TIE = 1.02  # times as long it may be seen to take with fewer groups; a measurement hardly tells that from as long


def first_groupings(elements: Sequence[int]) -> list[Grouping]:
    """Return groupings of groups of very different sizes, for tensors of so many elements each."""
    return [Grouping(tuple(equal_parts(elements, parts))) for parts in _PARTS]


def partly_whole_groupings(elements: Sequence[int]) -> list[Grouping]:
    """Return groupings that send a few small parts of the model whole, beside the rest as ever."""
    groupings = []
    for share in _WHOLE_SHARES:
        start, stop = run_of(elements, share * sum(elements))
        stops = [place for place in (start, stop) if place] + [len(elements)] * (stop < len(elements))
        groupings.append(Grouping(tuple(stops), tuple(1.0 if place == stop else 0.0 for place in stops)))
    return groupings


def best_of(seconds: Mapping[Grouping, float]) -> Grouping:
    """Return the fastest grouping by the seconds of a step; of those about as fast, the one of the fewest groups.

    A busy network can delay each message, and the fastest of many is often the luckiest. A grouping that sends more
    than it has to may be seen to take some more.

    >>> best_of({Grouping((6,)): 0.101, Grouping((2, 4, 6)): 0.1, Grouping((1, 6)): 0.12})
    Grouping(stops=(6,), densities=())
    """
    fastest = min(seconds, key=lambda grouping: seconds[grouping] * (1.0 if grouping.densities else _WORTH))
    of_kind = [grouping for grouping in seconds if bool(grouping.densities) == bool(fastest.densities)]
    alike = [grouping for grouping in of_kind if seconds[grouping] <= _TIE * seconds[fastest]]
    return min(alike, key=lambda grouping: (len(grouping.stops), seconds[grouping]))
