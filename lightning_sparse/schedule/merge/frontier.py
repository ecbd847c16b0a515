"""The exact optimum of the published OMGS problem, in which selecting stops backward.

Shi et al., INFOCOM 2020, give a greedy rule for it (see ``greedy.py``). A plan of the first tensors matters to the rest
only by two clocks: when backward is free again, and when the channel is. Neither alone is enough, since a merged
selection may cost more or less than its parts. So each prefix keeps all plans that no other one beats on both clocks.

What keeps this fast: no plan ends before backward, all selections and the last exchange are over, nor before the
channel is free and has done all exchanges to come; nor, then, before ``w`` times the one plus ``1 - w`` times the
other, for any weight ``w`` from 0 to 1. The least that the ways to go on can add to that sum is a shortest path, the
same for all plans of a prefix. A plan that cannot beat the best known one even so is dropped.
"""

from typing import NamedTuple

from lightning_sparse.schedule.merge.greedy import greedy_stops
from lightning_sparse.schedule.merge.simulator import MergeProblem, simulate

_WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)  # more of them drop hardly any more plans
_FIRST_TOLERANCE = 0.3  # of a quick search, whose plan lets the real one drop many more
_ROUNDING = 1 + 1e-12  # sums in another order may differ by this; nothing may be dropped for it

_Label = tuple[float, float, int, int]  # backward free, channel free, where the last group starts, index of its parent
_Bound = tuple[float, float, float]  # weights of the two clocks, and what their sum may be to beat the known plan


class _Rest(NamedTuple):
    """What all ways to go on from a prefix have in common, for one weight."""

    weight: float
    seconds: list[float]  # by prefix: no way to go on adds less to the weighted clocks
    stops: list[int]  # of the groups of the way, from the start, that adds least


def plan_in_backward(problem: MergeProblem, tolerance: float = 0.0) -> list[int]:
    """Return where the groups of the best plan stop.

    Args:
        problem: what to plan for.
        tolerance: how much longer than the optimum the plan may take, as a fraction of the optimum; 0 is exact.
    """
    rests = [_rest_of(problem, weight) for weight in _WEIGHTS]
    known = [greedy_stops(problem), [problem.tensors], list(range(1, problem.tensors + 1))]
    best = min([*known, *(rest.stops for rest in rests)], key=lambda stops: _total(problem, stops))
    for allowed in (_FIRST_TOLERANCE, tolerance):
        if allowed >= tolerance and _total(problem, best) > _lower_bound(rests) * (1 + allowed) * _ROUNDING:
            found = _search(problem, rests, _total(problem, best), allowed)
            best = min(best, found, key=lambda stops: _total(problem, stops)) if found else best
    return best


def _search(problem: MergeProblem, rests: list[_Rest], known: float, tolerance: float) -> list[int]:
    """Extend the undominated plans prefix by prefix; empty if none can beat the known one.

    A plan may be given up for one whose channel is free a little later, not more in total than the tolerance: as
    clocks only add and take maxima, what is lost on the way never grows. Each prefix has its share by its length, so
    that a group may spend the shares of the tensors in it.
    """
    slack = tolerance * _lower_bound(rests) / problem.tensors
    frontiers: list[list[_Label]] = [[(0.0, 0.0, 0, 0)]]
    for stop in range(1, problem.tensors + 1):
        bounds = [(rest.weight, 1 - rest.weight, known * _ROUNDING - rest.seconds[stop]) for rest in rests]
        candidates: list[_Label] = []
        for start in range(stop):
            if frontiers[start]:
                _extend(problem, frontiers[start], start, stop, candidates)
        candidates.sort()
        frontiers.append(_undominated(candidates, stop, bounds, slack))
    if not frontiers[-1]:
        return []
    stops, stop, index = [], problem.tensors, len(frontiers[-1]) - 1
    while stop > 0:
        stops.append(stop)
        *_, stop, index = frontiers[stop][index]
    return stops[::-1]


def _extend(problem: MergeProblem, frontier: list[_Label], start: int, stop: int, candidates: list[_Label]) -> None:
    """Add one group to each plan of a frontier, which rises in the first clock and falls in the second."""
    exchange_seconds = problem.exchange_seconds(start, stop)
    stopped = problem.ready[stop] - problem.ready[start] + problem.select_seconds(start, stop)
    for index, (backward_free, channel_free, _, _) in enumerate(frontier):
        selected = backward_free + stopped
        if channel_free <= selected:  # the channel waits for this plan, and longer for those behind it
            candidates.append((selected, selected + exchange_seconds, start, index))
            return
        candidates.append((selected, channel_free + exchange_seconds, start, index))


def _undominated(candidates: list[_Label], stop: int, bounds: list[_Bound], slack: float) -> list[_Label]:
    """Keep, of plans that rise in the first clock, those that improve on the second and may yet beat the known one."""
    kept: list[_Label] = []
    earliest = float("inf")
    for label in candidates:
        backward_free, channel_free, start, _ = label
        if channel_free < earliest - slack * (stop - start) and _may_win(backward_free, channel_free, bounds):
            kept.append(label)
            earliest = channel_free
    return kept


def _may_win(backward_free: float, channel_free: float, bounds: list[_Bound]) -> bool:
    return all(weight * backward_free + other * channel_free <= most for weight, other, most in bounds)


def _rest_of(problem: MergeProblem, weight: float) -> _Rest:
    last = problem.tensors
    seconds, next_stop = [0.0] * (last + 1), [last] * (last + 1)
    for start in range(last - 1, -1, -1):
        best = float("inf")
        for stop in range(start + 1, last + 1):
            exchange_seconds = problem.exchange_seconds(start, stop)
            backward = problem.ready[stop] - problem.ready[start] + problem.select_seconds(start, stop)
            after = weight * exchange_seconds if stop == last else seconds[stop]
            total = weight * backward + (1 - weight) * exchange_seconds + after
            if total < best:
                best, next_stop[start] = total, stop
        seconds[start] = best
    stops = [next_stop[0]]
    while stops[-1] < last:
        stops.append(next_stop[stops[-1]])
    return _Rest(weight, seconds, stops)


def _lower_bound(rests: list[_Rest]) -> float:
    return max(rest.seconds[0] for rest in rests)


def _total(problem: MergeProblem, stops: list[int]) -> float:
    return simulate(problem, stops, "backward").total
