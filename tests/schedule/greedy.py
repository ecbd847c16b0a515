"""The published greedy merge of OMGS-SGD, for comparison with the exact planner.

Shi et al., "Communication-efficient distributed deep learning with merged gradient sparsification on GPUs",
INFOCOM 2020. This code follows the released code (github.com/HKBU-HPML/OMGS-SGD). It is not optimal for four reasons:

1. The first tensor of backpropagation always joins the second tensor's bucket, but the clocks ignore this merge.
2. The extra wait of a merge excludes the selection of the next tensor alone, so the code merges too much.
3. An idle channel before the next tensor is ready makes merging useless, but the rule does not check this.
4. The rule looks one tensor ahead and rejects merges that pay only together with the next merge.
"""

from itertools import accumulate, pairwise
from typing import NamedTuple

from lightning_sparse.schedule.plan import Cost


class Problem(NamedTuple):
    """Sums over the first k tensors, for k from 0, and element costs."""

    elements: list[int]
    ready: list[float]
    select_cost: Cost
    exchange_cost: Cost

    def select_seconds(self, start, stop):
        """Return the cost of a merged selection from the tensors ``start`` to ``stop - 1``."""
        return self.select_cost(self.elements[stop] - self.elements[start])

    def exchange_seconds(self, start, stop):
        return self.exchange_cost(self.elements[stop] - self.elements[start])


def greedy_buckets(sizes, backward_seconds, select_cost, exchange_cost):
    """Merge as OMGS-SGD does, with the arguments of :func:`~lightning_sparse.schedule.plan_buckets`."""
    elements, ready = list(accumulate(sizes, initial=0)), list(accumulate(backward_seconds, initial=0.0))
    stops = greedy_stops(Problem(elements, ready, select_cost, exchange_cost))
    return [list(range(*edges)) for edges in pairwise((0, *stops))]


def greedy_stops(problem):
    """Return the bucket ends of the released code. As in the paper, selection stops backward."""
    tensors = len(problem.ready) - 1
    if tensors <= 2:
        return [tensors]
    backward_free = problem.ready[1] + problem.select_seconds(0, 1)
    channel_free = backward_free + problem.exchange_seconds(0, 1)
    stops, start = [], 1
    for stop in range(2, tensors):
        selected = backward_free + problem.ready[stop] - problem.ready[start] + problem.select_seconds(start, stop)
        if _extra_wait(problem, start, stop, max(0.0, channel_free - selected)) >= _saved(problem, start, stop):
            backward_free = selected
            channel_free = max(channel_free, selected) + problem.exchange_seconds(start, stop)
            stops.append(stop)
            start = stop
    return [*stops, tensors]


def _extra_wait(problem, start, stop, queued):
    """Return the additional delay of the bucket's message if the next tensor joins."""
    selects_more = problem.select_seconds(start, stop + 1) - problem.select_seconds(start, stop)
    alone = problem.select_seconds(stop, stop + 1)
    return problem.ready[stop + 1] - problem.ready[stop] + selects_more - alone - queued


def _saved(problem, start, stop):
    apart = problem.exchange_seconds(start, stop) + problem.exchange_seconds(stop, stop + 1)
    return apart - problem.exchange_seconds(start, stop + 1)
