"""Which gradients travel together, so that the last of them arrives as early as possible: the exact answer.

It is dynamic programming over prefixes for the problem of OMGS-SGD (Shi et al., INFOCOM 2020), whose greedy rule is not
optimal.
"""

from collections.abc import Callable, Sequence

from lightning_sparse.registry import one_of
from lightning_sparse.schedule.merge.frontier import plan_in_backward
from lightning_sparse.schedule.merge.simulator import SELECTIONS, Cost, MergeProblem, checked_problem, checked_seconds

_NEVER = float("inf")


def plan_groups(
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
        select_cost: seconds that selecting takes, of a group's number of elements.
        exchange_cost: seconds that the exchange takes, of a group's number of elements before selection.
        selection: ``"worker"`` if selecting runs with the exchange, group by group, while backward goes on;
            ``"backward"`` if it stops backward, as in the paper.

    Returns:
        the positions of each group, in the order of exchange.

    Raises:
        ValueError: for an unknown selection, and for what is empty, negative, not finite or of different lengths.

    Example: a message costs as much as ten elements, and backward leaves time for one before the last tensor::

        >>> plan_groups([10, 10, 10], [1.0, 1.0, 3.0], lambda n: 0.0, lambda n: 1.0 + n / 10.0)
        [[0, 1], [2]]
    """
    one_of("selection", selection, SELECTIONS)
    problem = checked_problem(sizes, backward_seconds, select_cost, exchange_cost)
    if selection == "worker":
        return groups_between(earliest_stops(problem.ready, _task_seconds(problem)))
    return groups_between(plan_in_backward(problem))


def earliest_stops(ready: Sequence[float], task_seconds: Callable[[int, int], float]) -> list[int]:
    """Return where the groups of the plan stop that ends first, with selection on the worker.

    Backward does not depend on the plan here, so of each prefix the plan that frees the worker first is enough.
    ``ready`` is that of a :class:`~lightning_sparse.schedule.merge.simulator.Problem`, ``task_seconds`` a group's.
    """
    free, starts = [0.0], [0]
    for stop in range(1, len(ready)):
        best, best_start, all_ready = _NEVER, 0, ready[stop]
        for start, begin in enumerate(free):
            begin = begin if begin > all_ready else all_ready
            if begin < best:
                end = begin + task_seconds(start, stop)
                if end < best:
                    best, best_start = end, start
        free.append(best)
        starts.append(best_start)
    stops = [len(ready) - 1]
    while starts[stops[-1]] > 0:
        stops.append(starts[stops[-1]])
    return stops[::-1]


def groups_between(stops: Sequence[int]) -> list[list[int]]:
    """Return the positions of each group, given where each stops."""
    return [list(range(start, stop)) for start, stop in zip([0, *stops], stops)]


def _task_seconds(problem: MergeProblem) -> Callable[[int, int], float]:
    elements, select_cost, exchange_cost = problem.elements, problem.select_cost, problem.exchange_cost

    def seconds(start: int, stop: int) -> float:
        size = elements[stop] - elements[start]
        select_seconds, exchange_seconds = select_cost(size), exchange_cost(size)
        if not (0 <= select_seconds < _NEVER and 0 <= exchange_seconds < _NEVER):
            checked_seconds("select_cost", select_cost, size)
            checked_seconds("exchange_cost", exchange_cost, size)
        return select_seconds + exchange_seconds

    return seconds
