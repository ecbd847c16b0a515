"""Which ways are tried, and how all ranks come to follow the same."""

from collections.abc import Sequence

from lightning_sparse.collectives import Collectives
from lightning_sparse.planning.plan import Way
from lightning_sparse.schedule.profile import equal_parts, run_of

_PARTS = (1, 2, 4, 8, 16)  # groups of the ways that are tried before anything is known
_WHOLE_SHARES = (1 / 64, 1 / 32, 1 / 16)  # of the model, sent whole to see what that takes


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


def agreed(collectives: Collectives, proposed: Way, tensors: int) -> Way:
    """Return what rank 0 proposes for so many tensors: another machine's logarithms may round otherwise."""
    room = [0.0] * (tensors - len(proposed.stops))
    densities = proposed.densities or (0.0,) * len(proposed.stops)
    numbers = collectives.gather_numbers([*proposed.stops, *room, *densities, *room])[0]
    stops = tuple(int(stop) for stop in numbers[:tensors] if stop)
    return Way(stops, tuple(numbers[tensors:][: len(stops)]) if proposed.densities else ())
