"""Callbacks: they show what the engine did, and steer it; and the rules that :class:`AdaptiveDensity` follows.

They are for the Lightning that the process has imported first; those in :mod:`lightning_sparse.lightning.callbacks` are
for ``lightning.pytorch`` whatever else was imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_sparse.compressors.density import (
    CriticalRegime,
    ErrorBudget,
    Measurement,
    Moment,
    Rule,
    Warmup,
)
from lightning_sparse.registry.lightning_names import present_door

if TYPE_CHECKING:
    from lightning_sparse.callbacks.adaptive_density import AdaptiveDensity
    from lightning_sparse.callbacks.assumption_monitor import AssumptionMonitor
    from lightning_sparse.callbacks.compression_monitor import CompressionMonitor
    from lightning_sparse.callbacks.layer_delta import LayerDelta
    from lightning_sparse.callbacks.momentum_correction import MomentumCorrection
    from lightning_sparse.callbacks.overlap_timeline import OverlapTimeline
    from lightning_sparse.callbacks.replica_sentinel import ReplicaSentinel
    from lightning_sparse.callbacks.requeue import RequeueAtStepEnd

_MODULES = {
    "AdaptiveDensity": "adaptive_density",
    "AssumptionMonitor": "assumption_monitor",
    "CompressionMonitor": "compression_monitor",
    "LayerDelta": "layer_delta",
    "MomentumCorrection": "momentum_correction",
    "OverlapTimeline": "overlap_timeline",
    "ReplicaSentinel": "replica_sentinel",
    "RequeueAtStepEnd": "requeue",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    package = __name__ if ".lightning." in __name__ else f"{present_door()}.callbacks"
    return getattr(import_module(f"{package}.{_MODULES[name]}"), name)


__all__ = [
    "AdaptiveDensity",
    "AssumptionMonitor",
    "CompressionMonitor",
    "CriticalRegime",
    "ErrorBudget",
    "LayerDelta",
    "Measurement",
    "Moment",
    "MomentumCorrection",
    "OverlapTimeline",
    "ReplicaSentinel",
    "RequeueAtStepEnd",
    "Rule",
    "Warmup",
]
