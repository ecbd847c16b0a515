"""The exact optimum of the published OMGS problem (Shi et al., INFOCOM 2020), in which selecting stops backward.

A plan of the first tensors matters to the rest only by when backward is free again, and when the channel is. Neither
alone is enough, since a merged selection may cost more or less than its parts. So each prefix keeps all plans that no
other one beats on both clocks.
"""

from lightning_sparse.schedule.merge.simulator import MergeProblem

_Label = tuple[float, float, int, int]  # backward free, channel free, where the last group starts, index of its parent


def plan_in_backward(problem: MergeProblem) -> list[int]:
    """Return where the groups of the best plan stop."""
    frontiers: list[list[_Label]] = [[(0.0, 0.0, 0, 0)]]
    for stop in range(1, problem.tensors + 1):
        candidates: list[_Label] = []
        for start, frontier in enumerate(frontiers):
            _extend(problem, frontier, start, stop, candidates)
        candidates.sort()
        frontiers.append(_undominated(candidates))
    stops, stop, index = [], problem.tensors, -1  # the last of a frontier is the one whose channel is free first
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


def _undominated(candidates: list[_Label]) -> list[_Label]:
    """Keep, of plans that rise in the first clock, those that improve on the second."""
    kept: list[_Label] = []
    for label in candidates:
        if not kept or label[1] < kept[-1][1]:
            kept.append(label)
    return kept
