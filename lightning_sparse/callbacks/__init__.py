"""Callbacks: they show what the engine did, and steer it."""

from lightning_sparse.callbacks.monitor import CompressionMonitor

__all__ = ["CompressionMonitor"]
