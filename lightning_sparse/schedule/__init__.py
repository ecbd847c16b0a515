"""Schedules, which divide gradients into buckets by names and sizes, never by values."""

from lightning_sparse.schedule.base import Auto, FixedSize, Layerwise, Merged, Schedule, Single
from lightning_sparse.schedule.plan import Plan, plan_buckets

SCHEDULES: dict[str, type[Schedule]] = {
    "auto": Auto,
    "layerwise": Layerwise,
    "merged": Merged,
    "single": Single,
}

__all__ = [
    "SCHEDULES",
    "Auto",
    "FixedSize",
    "Layerwise",
    "Merged",
    "Plan",
    "Schedule",
    "Single",
    "plan_buckets",
]
