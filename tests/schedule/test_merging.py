import itertools
import math

import pytest

from lightning_sparse.schedule import plan_buckets
from lightning_sparse.schedule.merging import predict
from tests.schedule.greedy import greedy_buckets
from tests.schedule.problems import Problem, published, random_problem

SELECTIONS = ("worker", "backward")


def every_plan(tensors):
    for cuts in itertools.product((False, True), repeat=tensors - 1):
        buckets = [[0]]
        for position, cut in enumerate(cuts, start=1):
            if cut:
                buckets.append([])
            buckets[-1].append(position)
        yield buckets


def slow_total(buckets, problem, selection):
    """Return the arrival of the last message, event by event, with the paper's recurrences."""
    backward = channel = 0.0
    for bucket in buckets:
        elements = sum(problem.sizes[position] for position in bucket)
        select_seconds, exchange_seconds = problem.select_cost(elements), problem.exchange_cost(elements)
        for position in bucket:
            backward += problem.backward_seconds[position]
        if selection == "backward":
            backward += select_seconds
            channel = max(channel, backward) + exchange_seconds
        else:
            channel = max(channel, backward) + select_seconds + exchange_seconds
    return channel


def planned_total(problem, selection):
    buckets = plan_buckets(*problem, selection=selection)
    assert [position for bucket in buckets for position in bucket] == list(range(len(problem.sizes)))
    return slow_total(buckets, problem, selection)


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("tensors", range(1, 13))
def test_equals_brute_force(tensors, selection):
    for seed in range(60 if tensors < 10 else 12):
        problem = random_problem(1000 * tensors + seed, tensors)
        best = min(slow_total(buckets, problem, selection) for buckets in every_plan(tensors))
        assert planned_total(problem, selection) == pytest.approx(best, rel=1e-9, abs=1e-15), seed


OPTIMA = {  # optima of the published problem, by selection and workers
    "backward": {4: 0.237302, 8: 0.241253, 16: 0.263407},
    "worker": {4: 0.159624, 8: 0.180158, 16: 0.248392},
}


@pytest.mark.sampled
@pytest.mark.parametrize("workers", [4, 8, 16])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_finds_the_optimum_of_the_published_problem(selection, workers):
    assert planned_total(published(workers), selection) == pytest.approx(OPTIMA[selection][workers], abs=5e-7)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("selection", SELECTIONS)
def test_is_never_worse_than_what_anybody_would_try(selection):
    for seed in range(300):
        problem = random_problem(seed, 4 + int(196 * (seed / 299) ** 4))
        count = len(problem.sizes)
        layerwise, single = [[position] for position in range(count)], [list(range(count))]
        others = [slow_total(buckets, problem, selection) for buckets in (layerwise, single, greedy_buckets(*problem))]
        assert planned_total(problem, selection) <= min(others) * (1 + 1e-9)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_edges(selection):
    free = Problem([0, 0, 0], [0.0, 0.0, 0.0], lambda size: 0.0, lambda size: 0.0)
    assert planned_total(free, selection) == 0
    assert plan_buckets([7], [0.1], lambda size: 1.0, lambda size: 1.0, selection) == [[0]]
    again = random_problem(3, 60)
    assert plan_buckets(*again, selection=selection) == plan_buckets(*again, selection=selection)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_predicts_when_the_last_message_has_arrived(selection):
    for seed in range(30):
        problem = random_problem(seed, 15)
        for buckets in (plan_buckets(*problem), greedy_buckets(*problem), [list(range(15))]):
            assert predict(buckets, *problem, selection=selection) == pytest.approx(
                slow_total(buckets, problem, selection)
            )


def test_the_greedy_rule_decides_as_published_and_is_not_optimal():
    # Totals and bucket counts of the released code on this problem.
    for workers, total, count in ((4, 0.2623, 2), (8, 0.2902, 1), (16, 0.3353, 1)):
        problem = published(workers)
        buckets = greedy_buckets(*problem)
        assert len(buckets) == count
        assert slow_total(buckets, problem, "backward") == pytest.approx(total, abs=5e-5)
        assert slow_total(buckets, problem, "backward") > 1.1 * OPTIMA["backward"][workers]


@pytest.mark.parametrize("plan", [plan_buckets, lambda *arguments: predict([[0], [1]], *arguments)])
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("sizes", []),
        ("sizes", [1, -1]),
        ("sizes", [1, 1.5]),
        ("backward_seconds", [1.0]),
        ("backward_seconds", [math.inf, 1.0]),
        ("backward_seconds", [None, 1.0]),
        ("select_cost", lambda size: math.nan),
        ("exchange_cost", lambda size: -1.0),
    ],
)
def test_bad_input_is_refused_by_name(plan, argument, value):
    problem = Problem([10, 10], [1.0, 1.0], lambda size: 0.1, lambda size: 0.1)._replace(**{argument: value})
    with pytest.raises(ValueError, match=argument):
        plan(*problem)


def test_unknown_selection_and_groups_that_are_none_are_refused():
    problem = Problem([10, 10], [1.0, 1.0], lambda size: 0.1, lambda size: 0.1)
    with pytest.raises(ValueError, match=r"selection='wroker' is unknown.*did you mean 'worker'"):
        plan_buckets(*problem, selection="wroker")
    with pytest.raises(ValueError, match="selection='gpu' is unknown"):
        predict([[0, 1]], *problem, selection="gpu")
    for buckets in ([], [[0]], [[1], [0]], [[0], [], [1]], [[0, 1], [1]]):
        with pytest.raises(ValueError, match=r"buckets=.* must have the positions 0 to 1"):
            predict(buckets, *problem)
