"""Plans survive being written to a file."""

import pytest
import torch

from lightning_sparse.schedule.cost.model import CostModel
from lightning_sparse.schedule.plan import Plan
from lightning_sparse.schedule.step_profile import Profile

SELECT = CostModel(startup=2e-5, per_unit_log=2e-10)
EXCHANGE = CostModel(startup=4e-4, per_unit=2.5e-8, bend=1e6, per_unit_beyond=8e-9)


def planned(dense=False, has_profile=True):
    """Return a plan of three parameters in two groups."""
    whole = CostModel(1e-3, 1e-8) if dense else None
    profile = Profile((0, 10, 30, 60), (0, 1, 3, 6), (0.0, 0.1, 0.2, 0.3), SELECT, EXCHANGE, 0.01, whole)
    return Plan(
        (("head.weight", "head.bias"), ("body",)),
        (0.1, 1.0) if dense else (),
        profile.predict((2, 3)) if has_profile else None,
        0.35,
        0.04,
        ((1, 0.4), (2, 0.35)),
        profile if has_profile else None,
    )


def through_a_file(state, folder):
    """Write and read, without running what a pickle asks for."""
    torch.save(state, folder / "plan.pt")
    return torch.load(folder / "plan.pt", weights_only=True)


@pytest.mark.parametrize("plan", [planned(), planned(dense=True), planned(has_profile=False)])
def test_a_plan_is_read_as_it_was_written(plan, tmp_path):
    assert Plan.of(through_a_file(plan.state_dict(), tmp_path)) == plan
