"""Plans survive being written to a file; groupings are about equal."""

import pytest
import torch

from lightning_sparse.schedule.plan import Plan, first_groupings, partly_whole_groupings


@pytest.mark.parametrize("densities", [(), (0.1, 1.0)])
def test_a_plan_is_read_as_it_was_written(densities, tmp_path):
    plan = Plan((("head.weight", "head.bias"), ("body",)), densities, 0.35, 0.04, ((1, 0.4), (2, 0.35)))
    torch.save(plan.state_dict(), tmp_path / "plan.pt")
    assert Plan.of(torch.load(tmp_path / "plan.pt", weights_only=True)) == plan


@pytest.mark.parametrize("elements", [[1], [7, 7], [1000, 1, 1, 1], [10] * 100, list(range(1, 60))])
def test_every_tensor_is_in_one_group_of_every_grouping_that_is_tried(elements):
    for grouping in [*first_groupings(elements), *partly_whole_groupings(elements)]:
        assert list(grouping.stops) == sorted(set(grouping.stops))
        assert grouping.stops[0] > 0
        assert grouping.stops[-1] == len(elements)
        assert len(grouping.densities) in (0, len(grouping.stops))
    one, two, *_ = first_groupings([10] * 100)
    assert (one.stops, two.stops) == ((100,), (50, 100))
