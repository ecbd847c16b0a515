"""Schedules: WHEN gradients travel and WITH WHOM. They see names and sizes, never values."""

from lightning_sparse.named import NamedTable
from lightning_sparse.schedule.base import Layerwise, Merged, Schedule, Single
from lightning_sparse.schedule.overlap import ExchangeWorker
from lightning_sparse.schedule.planner import plan_groups

SCHEDULES: NamedTable[Schedule] = NamedTable(
    "schedule", Schedule, {"layerwise": Layerwise, "merged": Merged, "single": Single}
)

__all__ = ["SCHEDULES", "ExchangeWorker", "Layerwise", "Merged", "Schedule", "Single", "plan_groups"]
