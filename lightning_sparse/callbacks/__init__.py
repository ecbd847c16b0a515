"""Callbacks that observe and control the engine, and the density rules of :class:`AdaptiveDensity`."""

from typing import NoReturn

from lightning_sparse.callbacks.adaptive_density import AdaptiveDensity
from lightning_sparse.callbacks.compression_monitor import CompressionMonitor
from lightning_sparse.callbacks.momentum_correction import MomentumCorrection
from lightning_sparse.callbacks.overlap_timeline import OverlapTimeline
from lightning_sparse.callbacks.replica_sentinel import ReplicaSentinel
from lightning_sparse.compressors.density import DensityRule, ErrorBudget, Measurement, RuleContext
from lightning_sparse.removed import refuse_removed


def __getattr__(name: str) -> NoReturn:
    refuse_removed(f"{__name__}.{name}", name, ImportError)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AdaptiveDensity",
    "CompressionMonitor",
    "DensityRule",
    "ErrorBudget",
    "Measurement",
    "MomentumCorrection",
    "OverlapTimeline",
    "ReplicaSentinel",
    "RuleContext",
]
