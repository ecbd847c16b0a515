"""Which ways of grouping are tried, and which of them is the best."""

from collections.abc import Mapping, Sequence

from lightning_sparse.schedule.plan import Way
from lightning_sparse.schedule.step_profile import equal_parts, run_of

_PARTS = (1, 2, 4, 8, 16)  # groups of the ways that are tried before anything is known
_WHOLE_SHARES = (1 / 64, 1 / 32, 1 / 16)  # of the model, sent whole to see what that takes
_WORTH = 1.05  # times as long a step may be seen to take if it sends more: what should cost nothing, to a measurement
_TIE = 1.02  # times as long it may be seen to take with fewer groups; a measurement hardly tells that from as long


def first_ways(elements: Sequence[int]) -> list[Way]:
    """Return ways of groups of very different sizes, for tensors of so many elements each."""
    return [Way(tuple(equal_parts(elements, parts))) for parts in _PARTS]


def partly_whole_ways(elements: Sequence[int]) -> list[Way]:
    """Return ways that send a few small parts of the model whole, beside the rest as ever."""
    ways = []
    for share in _WHOLE_SHARES:
        start, stop = run_of(elements, share * sum(elements))
        stops = [place for place in (start, stop) if place] + [len(elements)] * (stop < len(elements))
        ways.append(Way(tuple(stops), tuple(1.0 if place == stop else 0.0 for place in stops)))
    return ways


def best_of(seconds: Mapping[Way, float]) -> Way:
    """Return the fastest way; of those that are about as fast, the one of the fewest groups.

    Each message more is one more that a busy network can delay, and the fastest of many is often the luckiest.

    Args:
        seconds: that a step was seen to take, by way. Of a way that sends more than it has to, it may be some more.

    Example::

        >>> best_of({Way((6,)): 0.101, Way((2, 4, 6)): 0.1, Way((1, 6)): 0.12})
        Way(stops=(6,), densities=())
    """
    fastest = min(seconds, key=lambda way: seconds[way] * (1.0 if way.densities else _WORTH))
    sends_more = bool(fastest.densities)
    alike = [way for way in seconds if bool(way.densities) == sends_more and seconds[way] <= _TIE * seconds[fastest]]
    return min(alike, key=lambda way: (len(way.stops), seconds[way]))
