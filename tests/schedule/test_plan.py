import pytest

from lightning_sparse.schedule.plan import best_of, equal_plans


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
