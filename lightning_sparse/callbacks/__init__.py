"""Callbacks: they show what the engine did, and steer it."""

from lightning_sparse.callbacks.monitor import CompressionMonitor
from lightning_sparse.callbacks.requeue import RequeueAtStepEnd

__all__ = ["CompressionMonitor", "RequeueAtStepEnd"]
