"""Buckets with the earliest end of the last exchange: the optimization problem of OMGS-SGD.

The greedy rule of the paper (Shi et al., INFOCOM 2020) is not optimal. The dynamic programming here is optimal. All
times are seconds from the start of backward. In the paper, backward stops during selection. In this engine a thread,
the worker, selects and exchanges bucket after bucket while backward runs.
"""

import math
import numbers
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

Cost = Callable[[int], float]


def plan_buckets(
    sizes: Sequence[int], backward_seconds: Sequence[float], select_cost: Cost, exchange_cost: Cost
) -> list[list[int]]:
    """Divide tensors, in the order of backward, into buckets with the earliest end of the last exchange.

    The plan is optimal for any nonnegative costs; convex or monotonic costs are not required. Equal arguments give
    equal plans on every rank. The run time grows with the square of the number of tensors.

    Args:
        sizes: elements of each tensor, in the order of backward.
        backward_seconds: seconds of backward from the previous gradient to the gradient of each tensor.
        select_cost: seconds of selection, as a function of a bucket's elements.
        exchange_cost: seconds of the exchange, as a function of a bucket's elements before selection.

    Returns:
        the tensor indices of each bucket, in the order of exchange.

    Raises:
        ValueError: for empty, negative, non-finite or mismatched arguments.

    Example: an exchange takes 1 s plus 0.1 s per element. Backward of the last tensor hides the first exchange::

        >>> plan_buckets([10, 10, 10], [1.0, 1.0, 3.0], lambda n: 0.0, lambda n: 1.0 + n / 10.0)
        [[0, 1], [2]]
    """
    elements, ready = _checked_sums(sizes, backward_seconds)
    # For the first n tensors: when the worker is free at the earliest, and the first tensor of the last bucket then.
    best: list[tuple[float, int]] = [(0.0, 0)]
    for stop in range(1, len(ready)):
        costs = (_cost(select_cost, exchange_cost, elements[stop] - elements[start]) for start in range(stop))
        best.append(min((max(best[start][0], ready[stop]) + cost, start) for start, cost in enumerate(costs)))
    buckets: list[list[int]] = []
    stop = len(sizes)
    while stop > 0:
        start = best[stop][1]
        buckets.insert(0, list(range(start, stop)))
        stop = start
    return buckets


def _checked_sums(sizes: Sequence[int], backward_seconds: Sequence[float]) -> tuple[list[int], list[float]]:
    if len(sizes) == 0 or len(backward_seconds) != len(sizes):
        raise ValueError(
            f"sizes has {len(sizes)} entries and backward_seconds {len(backward_seconds)}: pass both for each tensor,"
            " and at least one tensor"
        )
    for position, size in enumerate(sizes):
        if not hasattr(size, "__index__") or size < 0:
            raise ValueError(f"sizes[{position}]={size!r} must be an integer number of elements, at least 0")
    for position, seconds in enumerate[Any](backward_seconds):
        if not isinstance(seconds, numbers.Real) or not 0 <= float(seconds) < math.inf:
            raise ValueError(
                f"backward_seconds[{position}]={seconds!r} must be finite and at least 0; exclude disturbed steps from"
                " the profile"
            )
    return list(accumulate(map(operator.index, sizes), initial=0)), list(accumulate(backward_seconds, initial=0.0))


def _cost(select_cost: Cost, exchange_cost: Cost, elements: int) -> float:
    """Return for how many seconds a bucket occupies the worker."""
    select, exchange = select_cost(elements), exchange_cost(elements)
    for noun, seconds in (("select_cost", select), ("exchange_cost", exchange)):
        if not 0 <= seconds < math.inf:
            raise ValueError(f"{noun}({elements})={seconds} must be finite seconds, at least 0")
    return select + exchange
