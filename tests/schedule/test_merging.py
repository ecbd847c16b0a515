import itertools

import pytest

from lightning_sparse.schedule import plan_buckets
from lightning_sparse.schedule.plan import best_of, equal_plans
from tests.schedule.problems import Problem, published, random_problem, slow_total


def every_plan(tensors):
    for cuts in itertools.product((False, True), repeat=tensors - 1):
        buckets = [[0]]
        for position, cut in enumerate(cuts, start=1):
            if cut:
                buckets.append([])
            buckets[-1].append(position)
        yield buckets


def planned_total(problem):
    buckets = plan_buckets(*problem)
    assert [position for bucket in buckets for position in bucket] == list(range(len(problem.sizes)))
    return slow_total(buckets, problem)


@pytest.mark.parametrize("tensors", range(1, 13))
def test_equals_brute_force(tensors):
    for seed in range(60 if tensors < 10 else 12):
        problem = random_problem(1000 * tensors + seed, tensors)
        best = min(slow_total(buckets, problem) for buckets in every_plan(tensors))
        assert planned_total(problem) == pytest.approx(best, rel=1e-9, abs=1e-15), seed


OPTIMA = {4: 0.159624, 8: 0.180158, 16: 0.248392}  # optima of the published problem, by workers


@pytest.mark.sampled
@pytest.mark.parametrize("workers", [4, 8, 16])
def test_finds_the_optimum_of_the_published_problem(workers):
    assert planned_total(published(workers)) == pytest.approx(OPTIMA[workers], abs=5e-7)


def test_edges():
    free = Problem([0, 0, 0], [0.0, 0.0, 0.0], lambda size: 0.0, lambda size: 0.0)
    assert planned_total(free) == 0
    assert plan_buckets([7], [0.1], lambda size: 1.0, lambda size: 1.0) == [[0]]
    again = random_problem(3, 60)
    assert plan_buckets(*again) == plan_buckets(*again)


@pytest.mark.parametrize("elements", [[1], [7, 7], [1000, 1, 1, 1], [10] * 100, list(range(1, 60))])
def test_every_tensor_is_in_one_group_of_every_grouping_that_is_tried(elements):
    for stops in equal_plans(elements):
        assert list(stops) == sorted(set(stops))
        assert stops[0] > 0
        assert stops[-1] == len(elements)
    assert equal_plans([10] * 100)[:2] == [(100,), (50, 100)]


ONE, THREE = (6,), (2, 4, 6)


@pytest.mark.parametrize(
    ("seconds", "best"),
    [({ONE: 1.03, THREE: 1.0}, THREE), ({ONE: 1.015, THREE: 1.0}, ONE), ({THREE: 1.0, ONE: 1.0}, ONE)],
)
def test_fewer_groups_win_what_a_measurement_does_not_tell_apart(seconds, best):
    assert best_of(seconds) == best
