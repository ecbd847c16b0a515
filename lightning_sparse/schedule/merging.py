"""Which gradients travel together, so that the last of them arrives as early as possible: the problem of OMGS-SGD.

Shi et al., INFOCOM 2020; their greedy rule is not optimal, dynamic programming over prefixes is. The clocks are theirs,
from the start of backward. There selecting stops backward; in our engine it runs on the worker, with the exchange.
"""

import math
import numbers
import operator
import reprlib
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from lightning_sparse.compressors.registry import checked_name

SELECTIONS = ("worker", "backward")

Cost = Callable[[int], float]


# One way to send the first tensors, by all that matters to the rest: seconds that selecting has stopped backward, when
# the channel is free; then where its last bucket starts, and the place of the plan that this bucket was added to.
_Plan = tuple[float, float, int, int]


def plan_buckets(
    sizes: Sequence[int],
    backward_seconds: Sequence[float],
    select_cost: Cost,
    exchange_cost: Cost,
    selection: str = "worker",
) -> list[list[int]]:
    """Plan which neighbours in the order of backpropagation are merged, so that the last message arrives earliest.

    The plan is the optimum for any costs that are not negative: they need not be convex, nor rise. Equal arguments give
    equal plans, on every rank. With ``selection="worker"`` the time to find it grows with the square of the number of
    tensors; with ``"backward"`` it takes seconds for the 161 tensors of a ResNet-50, some ten times as long for twice
    as many.

    Args:
        sizes: elements of each tensor, in the order in which backward makes their gradients ready.
        backward_seconds: seconds that backward takes for each tensor.
        select_cost: seconds that selecting takes, of a bucket's number of elements.
        exchange_cost: seconds that the exchange takes, of a bucket's number of elements before selection.
        selection: ``"worker"`` if selecting runs with the exchange, bucket by bucket, while backward goes on;
            ``"backward"`` if it stops backward, as in the paper.

    Returns:
        the positions of each bucket, in the order of exchange.

    Raises:
        ValueError: for an unknown selection, and for what is empty, negative, not finite or of different lengths.

    Example: a message costs as much as ten elements, and backward leaves time for one before the last tensor::

        >>> plan_buckets([10, 10, 10], [1.0, 1.0, 3.0], lambda n: 0.0, lambda n: 1.0 + n / 10.0)
        [[0, 1], [2]]
    """
    elements, ready = _checked_sums(sizes, backward_seconds, selection)
    # Neither clock alone tells which plan of a prefix is best, as selecting from a merged bucket may cost more or less
    # than from its parts: all are kept that no other beats on both. On the worker, only the second clock moves.
    kept: list[list[_Plan]] = [[(0.0, 0.0, 0, 0)]]
    for stop in range(1, len(ready)):
        extended: list[_Plan] = []
        for start, plans in enumerate(kept):
            stopping, sending = _costs(select_cost, exchange_cost, elements[stop] - elements[start], selection)
            for place, (stopped, channel_free, _, _) in enumerate(plans):  # one rises, the other falls
                selected = ready[stop] + stopped + stopping
                extended.append((stopped + stopping, max(channel_free, selected) + sending, start, place))
                if channel_free <= selected:  # the channel waits for this plan, and longer for those behind it
                    break
        undominated: list[_Plan] = []
        for plan in sorted(extended):
            if not undominated or plan[1] < undominated[-1][1]:
                undominated.append(plan)
        kept.append(undominated)
    buckets: list[list[int]] = []
    stop, place = len(sizes), -1  # the last is the one whose channel is free first
    while stop > 0:
        _, _, start, place = kept[stop][place]
        buckets.insert(0, list(range(start, stop)))
        stop = start
    return buckets


def predict(
    buckets: Sequence[Sequence[int]],
    sizes: Sequence[int],
    backward_seconds: Sequence[float],
    select_cost: Cost,
    exchange_cost: Cost,
    selection: str = "worker",
) -> float:
    """Predict the seconds from the start of backward to the end of the last exchange; arguments as ``plan_buckets``."""
    elements, ready = _checked_sums(sizes, backward_seconds, selection)
    if [position for bucket in buckets for position in bucket] != list(range(len(sizes))) or not all(buckets):
        raise ValueError(
            f"buckets={reprlib.repr(buckets)} must hold the positions 0 to {len(sizes) - 1} in this order, and no empty"
            " bucket"
        )
    stopped = end = 0.0
    for bucket in buckets:
        stop = bucket[-1] + 1
        stopping, sending = _costs(select_cost, exchange_cost, elements[stop] - elements[bucket[0]], selection)
        stopped += stopping
        end = max(end, ready[stop] + stopped) + sending
    return end


def _checked_sums(
    sizes: Sequence[int], backward_seconds: Sequence[float], selection: str
) -> tuple[list[int], list[float]]:
    """Return elements of the first k tensors, and seconds until they are ready, for k from 0, of sensible arguments."""
    checked_name("selection", selection, SELECTIONS)
    if len(sizes) == 0:
        raise ValueError("sizes=[] must not be empty: pass the elements of every tensor that has a gradient")
    if len(backward_seconds) != len(sizes):
        raise ValueError(
            f"backward_seconds has {len(backward_seconds)} entries and sizes has {len(sizes)}: pass one each per tensor"
        )
    for position, size in enumerate(sizes):
        if not hasattr(size, "__index__") or size < 0:
            raise ValueError(f"sizes[{position}]={size!r} must be a whole number of elements, at least 0")
    for position, seconds in enumerate[Any](backward_seconds):
        if not isinstance(seconds, numbers.Real) or not 0 <= float(seconds) < math.inf:
            raise ValueError(
                f"backward_seconds[{position}]={seconds!r} must be finite and at least 0; leave disturbed steps out of"
                " the profile"
            )
    return list(accumulate(map(operator.index, sizes), initial=0)), list(accumulate(backward_seconds, initial=0.0))


def _costs(select_cost: Cost, exchange_cost: Cost, elements: int, selection: str) -> tuple[float, float]:
    """Return the seconds for which a bucket stops backward, and for which it takes the channel."""
    select, exchange = select_cost(elements), exchange_cost(elements)
    for noun, seconds in (("select_cost", select), ("exchange_cost", exchange)):
        if not 0 <= seconds < math.inf:
            raise ValueError(f"{noun}({elements})={seconds} must be finite seconds, at least 0")
    return (select, exchange) if selection == "backward" else (0.0, select + exchange)
