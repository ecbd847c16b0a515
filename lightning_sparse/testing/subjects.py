"""Subjects of the laws, compressors by name or of the user's own, what each declares, and the cases that are tried."""

import importlib
from collections.abc import Callable
from typing import Any, Optional, Union

import pytest

from lightning_sparse.compressors import COMPRESSORS, Compressor
from lightning_sparse.compressors.registry import build_by_name
from lightning_sparse.engine.wire import WIRES as _WIRES

COMPRESSOR_NAMES = sorted(COMPRESSORS)
SCHEDULE_NAMES = ["layerwise", "merged", "single"]
WIRES = list(_WIRES)
_DENSITY = 0.05

Promise = Callable[[Compressor], bool]


def built(compressor: Union[str, Compressor]) -> Union[str, Compressor]:
    """Build the compressor that ``"module:Class"`` names, or say what is wrong; pass all else through."""
    if not isinstance(compressor, str) or ":" not in compressor:
        return compressor
    module_name, _, class_name = compressor.partition(":")
    try:
        build: Any = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"compressor={compressor!r} must be 'module:Class', which `from module import Class` can import: {error}."
            " Run `python -m pytest` from the folder that holds the module, or install it."
        ) from error
    subject = build() if callable(build) else build
    if not isinstance(subject, Compressor):
        raise TypeError(
            f"compressor={compressor!r} must be a subclass of lightning_sparse.Compressor that is built without"
            f" arguments, or a function that returns such an object; got {subject!r}"
        )
    return subject


def subject_of(name: str) -> Compressor:
    """Build a compressor to look at what it declares."""
    return build_by_name("compressor", Compressor, COMPRESSORS, built(name))


def density_for(name: str) -> Optional[float]:
    """Return a density that hides no mistakes in what is kept, as a compressor's own might; ``None`` without one."""
    return None if subject_of(name).default_density is None else _DENSITY


def keeps(compressor: Compressor) -> bool:
    """Tell whether what is not sent is kept."""
    return compressor.feedback.keeps_residual


def is_exact(compressor: Compressor) -> bool:
    """Tell whether everything can be sent; whoever has no density can only be DDP by sending everything anyway."""
    return (compressor.is_lossless and compressor.wire is None) or compressor.default_density is not None


def agrees(compressor: Compressor) -> bool:
    """Tell whether replicas stay identical."""
    return not compressor.replicas_diverge


def is_grouping_free(compressor: Compressor) -> bool:
    """Tell whether it does not matter which parameters travel together."""
    return not compressor.selects_across_group


def holds_for(promise: Promise) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark a law as one that a compressor is held to if it declares something; the plugin reads the mark."""

    def mark(law: Callable[..., None]) -> Callable[..., None]:
        law.promise = promise  # type: ignore[attr-defined]
        return law

    return mark


each_compressor = holds_for(lambda compressor: True)
each_schedule = pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
each_wire = pytest.mark.parametrize("wire", WIRES)
# Every schedule, and every wire.
each_way = pytest.mark.parametrize(
    ("schedule", "wire"),
    [
        ("layerwise", "bfloat16"),
        ("merged", "float32"),
        ("single", "float16"),
        ("layerwise", "2bit"),
        ("single", "4bit"),
    ],
)
# Every pair of a schedule, a wire, and a number of ranks.
each_way_and_world = pytest.mark.parametrize(
    ("schedule", "wire", "ranks"),
    [
        (schedule, wire, 3 - (row + column) % 2)
        for row, schedule in enumerate(SCHEDULE_NAMES)
        for column, wire in enumerate(WIRES)
    ],
)
