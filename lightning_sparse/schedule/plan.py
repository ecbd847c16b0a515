"""Plans, which divide gradients into buckets: plans to try, the optimum of OMGS-SGD, and the plan in use."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

Cost = Callable[[int], float]  # seconds by a number of elements
Stops = tuple[int, ...]  # a plan: the end index of each bucket, among the gradients in the order of backward

_PARTS = (1, 2, 4, 8, 16)  # numbers of buckets to try
_TIE = 1.02  # largest ratio of step times that may be a measurement error; within this ratio, fewer buckets win


class Plan(NamedTuple):
    """The buckets in use, and times measured when this plan was chosen.

    Attributes:
        buckets: names of the parameters of each bucket.
        densities: density of each bucket, or empty if the plan changes no density.
        seconds: median time from the start of backward until all means are written to the gradients.
        exposed_seconds: median part of ``seconds`` after backward has computed the last gradient.
        tried: number of buckets and ``seconds`` of each tried plan.
    """

    buckets: tuple[tuple[str, ...], ...]
    densities: tuple[float, ...]
    seconds: float
    exposed_seconds: float
    tried: tuple[tuple[int, float], ...]

    def __str__(self) -> str:
        tried = ", ".join(f"{1e3 * seconds:.1f} ms with {buckets}" for buckets, seconds in self.tried)
        buckets = "1 bucket" if len(self.buckets) == 1 else f"{len(self.buckets)} buckets"
        return (
            f"gradients are exchanged in {buckets}; backward and exchange take"
            f" {1e3 * self.seconds:.1f} ms, and {1e3 * self.exposed_seconds:.1f} ms of this are exposed (measured, by"
            f" number of buckets: {tried})"
        )


def equal_plans(elements: Sequence[int]) -> list[Stops]:
    """Return plans of at most 1, 2, 4, 8 and 16 buckets of about equal size, for tensors of the given ``elements``."""
    return [_stops_of(elements, -(-sum(elements) // parts)) for parts in _PARTS]


def _stops_of(sizes: Sequence[int], least: int) -> Stops:
    stops, held = [], 0
    for stop, size in enumerate(sizes, start=1):
        held += size
        if held >= least or stop == len(sizes):
            stops.append(stop)
            held = 0
    return tuple(stops)


def best_of(seconds: Mapping[Stops, float]) -> Stops:
    """Return the plan with the fewest buckets among all plans at most 2 % slower than the fastest.

    A busy network delays some messages at random, so the fastest of many plans is often fastest by chance.

    >>> best_of({(6,): 0.101, (2, 4, 6): 0.1, (1, 6): 0.12})
    (6,)
    """
    limit = _TIE * min(seconds.values())
    return min((stops for stops in seconds if seconds[stops] <= limit), key=lambda stops: (len(stops), seconds[stops]))


def plan_buckets(
    sizes: Sequence[int], backward_seconds: Sequence[float], select_cost: Cost, exchange_cost: Cost
) -> list[list[int]]:
    """Divide tensors, in the order of backward, into buckets, so that the last exchange ends as early as possible.

    This is the optimization problem of OMGS-SGD. The greedy rule of the paper (Shi et al., INFOCOM 2020) is not
    optimal. In the paper, backward stops during selection. In this engine a thread, the worker, selects and exchanges
    bucket after bucket while backward runs.

    The plan is optimal for any nonnegative costs; convex or monotonic costs are not required. Equal arguments give
    equal plans on every rank. The run time grows with the square of the number of tensors.

    Args:
        sizes: elements of each tensor, in the order of backward.
        backward_seconds: seconds of backward from the previous gradient to the gradient of each tensor.
        select_cost: seconds of selection, as a function of a bucket's elements.
        exchange_cost: seconds of the exchange, as a function of a bucket's elements before selection.

    Returns:
        the tensor indices of each bucket, in the order of exchange.

    Example: an exchange takes 1 s plus 0.1 s per element. Backward of the last tensor hides the first exchange::

        >>> plan_buckets([10, 10, 10], [1.0, 1.0, 3.0], lambda n: 0.0, lambda n: 1.0 + n / 10.0)
        [[0, 1], [2]]
    """
    elements, ready = list(accumulate(sizes, initial=0)), list(accumulate(backward_seconds, initial=0.0))
    # best[n], for the first n tensors: the earliest time when the worker is free, and the last bucket's first tensor.
    best: list[tuple[float, int]] = [(0.0, 0)]
    for stop in range(1, len(ready)):
        sizes_of_last = (elements[stop] - elements[start] for start in range(stop))
        costs = (select_cost(size) + exchange_cost(size) for size in sizes_of_last)
        best.append(min((max(best[start][0], ready[stop]) + cost, start) for start, cost in enumerate(costs)))
    buckets: list[list[int]] = []
    stop = len(sizes)
    while stop > 0:
        start = best[stop][1]
        buckets.insert(0, list(range(start, stop)))
        stop = start
    return buckets
