"""Callbacks: they show what the engine did, and steer it."""

from lightning_sparse.callbacks.assumption import AssumptionMonitor
from lightning_sparse.callbacks.density import AdaptiveDensity
from lightning_sparse.callbacks.momentum import MomentumCorrection
from lightning_sparse.callbacks.monitor import CompressionMonitor
from lightning_sparse.callbacks.requeue import RequeueAtStepEnd
from lightning_sparse.callbacks.sentinel import ReplicaSentinel
from lightning_sparse.callbacks.timeline import OverlapTimeline

__all__ = [
    "AdaptiveDensity",
    "AssumptionMonitor",
    "CompressionMonitor",
    "MomentumCorrection",
    "OverlapTimeline",
    "ReplicaSentinel",
    "RequeueAtStepEnd",
]
