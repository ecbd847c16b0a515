"""The planner against every grouping there is, and against the published figures."""

import itertools
import math

import pytest

from lightning_sparse.schedule import plan_groups
from lightning_sparse.schedule.merging import predict
from tests.schedule.greedy import greedy_groups
from tests.schedule.problems import Problem, published, random_problem

SELECTIONS = ("worker", "backward")


def every_grouping(tensors):
    for cuts in itertools.product((False, True), repeat=tensors - 1):
        groups = [[0]]
        for position, cut in enumerate(cuts, start=1):
            if cut:
                groups.append([])
            groups[-1].append(position)
        yield groups


def slow_total(groups, problem, selection):
    """Say when the last message has arrived, event by event, as the paper's recurrences have it."""
    backward = channel = 0.0
    for group in groups:
        elements = sum(problem.sizes[position] for position in group)
        select_seconds, exchange_seconds = problem.select_cost(elements), problem.exchange_cost(elements)
        for position in group:
            backward += problem.backward_seconds[position]
        if selection == "backward":
            backward += select_seconds
            channel = max(channel, backward) + exchange_seconds
        else:
            channel = max(channel, backward) + select_seconds + exchange_seconds
    return channel


def planned_total(problem, selection):
    groups = plan_groups(*problem, selection=selection)
    assert [position for group in groups for position in group] == list(range(len(problem.sizes)))
    return slow_total(groups, problem, selection)


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("tensors", range(1, 13))
def test_equals_brute_force(tensors, selection):
    for seed in range(60 if tensors < 10 else 12):
        problem = random_problem(1000 * tensors + seed, tensors)
        best = min(slow_total(groups, problem, selection) for groups in every_grouping(tensors))
        assert planned_total(problem, selection) == pytest.approx(best, rel=1e-9, abs=1e-15), seed


OPTIMA = {  # of the published problem, by selection and workers
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
        others = [slow_total(groups, problem, selection) for groups in (layerwise, single, greedy_groups(*problem))]
        assert planned_total(problem, selection) <= min(others) * (1 + 1e-9)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_edges(selection):
    free = Problem([0, 0, 0], [0.0, 0.0, 0.0], lambda size: 0.0, lambda size: 0.0)
    assert planned_total(free, selection) == 0
    assert plan_groups([7], [0.1], lambda size: 1.0, lambda size: 1.0, selection) == [[0]]
    again = random_problem(3, 60)
    assert plan_groups(*again, selection=selection) == plan_groups(*again, selection=selection)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_predicts_when_the_last_message_has_arrived(selection):
    for seed in range(30):
        problem = random_problem(seed, 15)
        for groups in (plan_groups(*problem), greedy_groups(*problem), [list(range(15))]):
            assert predict(groups, *problem, selection=selection) == pytest.approx(
                slow_total(groups, problem, selection)
            )


def test_the_greedy_rule_decides_as_published_and_is_not_optimal():
    # Totals and group counts of the released code on this problem.
    for workers, total, count in ((4, 0.2623, 2), (8, 0.2902, 1), (16, 0.3353, 1)):
        problem = published(workers)
        groups = greedy_groups(*problem)
        assert len(groups) == count
        assert slow_total(groups, problem, "backward") == pytest.approx(total, abs=5e-5)
        assert slow_total(groups, problem, "backward") > 1.1 * OPTIMA["backward"][workers]


@pytest.mark.parametrize("plan", [plan_groups, lambda *arguments: predict([[0], [1]], *arguments)])
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
        plan_groups(*problem, selection="wroker")
    with pytest.raises(ValueError, match="selection='gpu' is unknown"):
        predict([[0, 1]], *problem, selection="gpu")
    for groups in ([], [[0]], [[1], [0]], [[0], [], [1]], [[0, 1], [1]]):
        with pytest.raises(ValueError, match=r"groups=.* must hold the positions 0 to 1"):
            predict(groups, *problem)
