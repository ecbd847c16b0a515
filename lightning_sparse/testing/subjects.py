"""Compressors under test, given by name or as objects, and their declared properties."""

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
    """Build a compressor from a name, a class or a function, or raise ``TypeError``."""
    choice: Any = compressor
    if callable(choice) and not isinstance(choice, Compressor):
        choice = choice()
    built: Compressor = build_by_name("compressor", Compressor, COMPRESSORS, choice)
    return built


def density_for(compressor: Subject) -> Optional[float]:
    """Return a density at which tests detect wrong residuals, or ``None`` if the compressor has no density."""
    return None if subject_of(compressor).default_density is None else _DENSITY


def settings_of(compressor: Subject, **others: Any) -> dict[str, Any]:
    """Return arguments of :func:`~lightning_sparse.testing.wrapping.sparse_ddp`, with a density for tests."""
    return {"compressor": compressor, "density": density_for(compressor), **others}


def is_exact(compressor: Compressor) -> bool:
    """Return whether a compressor can equal DDP: at density 1, or because all elements are sent in the user's wire."""
    return (compressor.is_lossless and compressor.wire is None) or compressor.default_density is not None
