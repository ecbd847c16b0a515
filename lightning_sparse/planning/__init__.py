"""Planning: what was measured in the steps before decides how the next ones travel."""

from lightning_sparse.planning.plain import plain
from lightning_sparse.planning.plan import Plan, Way
from lightning_sparse.planning.planner import StepPlanner

__all__ = ["Plan", "StepPlanner", "Way", "plain"]
