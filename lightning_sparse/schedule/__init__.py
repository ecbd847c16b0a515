"""Schedules: WHEN gradients travel and WITH WHOM. They see names and sizes, never values."""

from lightning_sparse.named import NamedTable
from lightning_sparse.schedule.base import ClosingAfter, FixedSize, Layerwise, Schedule, Single
from lightning_sparse.schedule.overlap import ExchangeWorker
from lightning_sparse.schedule.planned import Auto, Greedy, Merged
from lightning_sparse.schedule.planner import plan_groups

SCHEDULES: NamedTable[Schedule] = NamedTable(
    "schedule",
    Schedule,
    {"auto": Auto, "greedy": Greedy, "layerwise": Layerwise, "merged": Merged, "single": Single},
    former={"omgs": "greedy"},  # sparse_omgs does not use it
)

__all__ = [
    "SCHEDULES",
    "Auto",
    "ClosingAfter",
    "ExchangeWorker",
    "FixedSize",
    "Greedy",
    "Layerwise",
    "Merged",
    "Schedule",
    "Single",
    "plan_groups",
]
