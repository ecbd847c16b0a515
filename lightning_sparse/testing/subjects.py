"""Compressors under test, by name or of the user's own, and what each declares."""

from collections.abc import Callable
from typing import Any, Optional, Union

from lightning_sparse.compressors import COMPRESSORS, Compressor
from lightning_sparse.compressors.registry import build_by_name
from lightning_sparse.engine.wire import WIRES as _WIRES

COMPRESSOR_NAMES = sorted(COMPRESSORS)
SCHEDULE_NAMES = ["merged", "layerwise", "single"]
WIRES = list(_WIRES)
_DENSITY = 0.05

Subject = Union[str, Compressor, Callable[[], Compressor]]


def subject_of(compressor: Subject) -> Compressor:
    """Build the compressor that a name, a class or a function stands for. ``TypeError`` if it is none."""
    choice: Any = compressor
    if callable(choice) and not isinstance(choice, Compressor):
        choice = choice()
    built: Compressor = build_by_name("compressor", Compressor, COMPRESSORS, choice)
    return built


def density_for(compressor: Subject) -> Optional[float]:
    """Return a density that hides no mistakes in the residual, as the compressor's own might. ``None`` without one."""
    return None if subject_of(compressor).default_density is None else _DENSITY


def settings_of(compressor: Subject, **others: Any) -> dict[str, Any]:
    """Return arguments of :func:`~lightning_sparse.testing.wrapping.sparse_ddp`."""
    return {"compressor": compressor, "density": density_for(compressor), **others}


def keeps(compressor: Compressor) -> bool:
    """Tell whether what is not sent is kept."""
    return compressor.feedback.keeps_residual


def is_exact(compressor: Compressor) -> bool:
    """Tell whether everything can be sent. One without a density can only be DDP by sending everything anyway."""
    return (compressor.is_lossless and compressor.wire is None) or compressor.default_density is not None


def agrees(compressor: Compressor) -> bool:
    """Tell whether replicas stay identical."""
    return not compressor.replicas_diverge


def is_bucketing_free(compressor: Compressor) -> bool:
    """Tell whether it does not matter which parameters travel together."""
    return not compressor.selects_across_bucket
