"""Buckets with the earliest end of the last exchange: the optimization problem of OMGS-SGD.

The greedy rule of the paper (Shi et al., INFOCOM 2020) is not optimal. The dynamic programming here is optimal. All
times are seconds from the start of backward. In the paper, backward stops during selection. In this engine a thread,
the worker, selects and exchanges bucket after bucket while backward runs.
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


# A plan for the first tensors has: seconds for which selections have stopped backward, the time when the channel
# (worker or network) is free, the first tensor of the last bucket, and the index of the plan for earlier tensors.
_Plan = tuple[float, float, int, int]


def plan_buckets(
    sizes: Sequence[int],
    backward_seconds: Sequence[float],
    select_cost: Cost,
    exchange_cost: Cost,
    selection: str = "worker",
) -> list[list[int]]:
    """Divide tensors, in the order of backward, into buckets with the earliest end of the last exchange.

    The plan is optimal for any nonnegative costs; convex or monotonic costs are not required. Equal arguments give
    equal plans on every rank. With ``selection="worker"`` the run time grows with the square of the number of tensors.
    With ``"backward"`` the 161 tensors of a ResNet-50 take seconds, and twice as many tensors ten times as long.

    Args:
        sizes: elements of each tensor, in the order of backward.
        backward_seconds: seconds of backward from the previous gradient to the gradient of each tensor.
        select_cost: seconds of selection, as a function of a bucket's elements.
        exchange_cost: seconds of the exchange, as a function of a bucket's elements before selection.
        selection: ``"worker"`` if a thread selects and exchanges bucket after bucket while backward runs;
            ``"backward"`` if backward waits for each selection, as in the paper.

    Returns:
        the tensor indices of each bucket, in the order of exchange.

    Raises:
        ValueError: for an unknown selection, and for empty, negative, non-finite or mismatched arguments.

    Example: an exchange takes 1 s plus 0.1 s per element. Backward of the last tensor hides the first exchange::

        >>> plan_buckets([10, 10, 10], [1.0, 1.0, 3.0], lambda n: 0.0, lambda n: 1.0 + n / 10.0)
        [[0, 1], [2]]
    """
    elements, ready = _checked_sums(sizes, backward_seconds, selection)
    # `kept[n]` has plans for the first n tensors. A plan is dropped if another plan stops backward for no more seconds
    # and frees the channel no later. With "worker", selection never stops backward, so a single plan remains.
    kept: list[list[_Plan]] = [[(0.0, 0.0, 0, 0)]]
    for stop in range(1, len(ready)):
        extended: list[_Plan] = []
        for start, plans in enumerate(kept):
            stopping, sending = _costs(select_cost, exchange_cost, elements[stop] - elements[start], selection)
            for place, (stopped, channel_free, _, _) in enumerate(plans):  # `stopped` rises, `channel_free` falls
                selected = ready[stop] + stopped + stopping
                extended.append((stopped + stopping, max(channel_free, selected) + sending, start, place))
                if channel_free <= selected:  # all later plans would only finish selection later
                    break
        undominated: list[_Plan] = []
        for plan in sorted(extended):
            if not undominated or plan[1] < undominated[-1][1]:
                undominated.append(plan)
        kept.append(undominated)
    buckets: list[list[int]] = []
    stop, place = len(sizes), -1  # the last plan in a list frees the channel first
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
    """Return seconds from the start of backward to the end of the last exchange. Arguments as in ``plan_buckets``."""
    elements, ready = _checked_sums(sizes, backward_seconds, selection)
    if [position for bucket in buckets for position in bucket] != list(range(len(sizes))) or not all(buckets):
        raise ValueError(
            f"buckets={reprlib.repr(buckets)} must have the positions 0 to {len(sizes) - 1} in this order, and no empty"
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
    checked_name("selection", selection, SELECTIONS)
    if len(sizes) == 0:
        raise ValueError("sizes=[] must not be empty: pass the elements of every tensor with a gradient")
    if len(backward_seconds) != len(sizes):
        raise ValueError(
            f"backward_seconds has {len(backward_seconds)} entries and sizes {len(sizes)}: pass both for each tensor"
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


def _costs(select_cost: Cost, exchange_cost: Cost, elements: int, selection: str) -> tuple[float, float]:
    """Return the seconds for which a bucket stops backward, and the seconds for which the channel is busy."""
    select, exchange = select_cost(elements), exchange_cost(elements)
    for noun, seconds in (("select_cost", select), ("exchange_cost", exchange)):
        if not 0 <= seconds < math.inf:
            raise ValueError(f"{noun}({elements})={seconds} must be finite seconds, at least 0")
    return (select, exchange) if selection == "backward" else (0.0, select + exchange)
