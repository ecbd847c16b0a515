"""Cost models: seconds of an exchange or a selection by its size, learned from timings on a busy machine.

OMGS-SGD (Shi et al., INFOCOM 2020) has ``startup + per_unit * bytes`` for the exchange, with constants of one cluster
and a second table for large messages, and ``per_unit * n * log2(n)`` for exact top-k, so that small tensors are free.
Here every model has a startup, all constants are measured, and the exchange's two lines meet: at a jump down, as in
the released tables, a planner would fill messages up just to get past it. They may bend either way, as networks are
better or worse at large messages. So no model ever falls with the size.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from statistics import median
from typing import NamedTuple, Optional

from lightning_sparse.registry import one_of
from lightning_sparse.schedule.cost.regression import Rows, fit_rows

SHAPES = ("line", "bent", "log")
EXCHANGE_SHAPES = ("line", "bent")
SELECTION_SHAPES = ("line", "log")

_MIN_SIZES = 3  # a line through two points fits them always, and so says nothing about itself
_MAX_SIZES = 96  # neighbouring sizes are pooled beyond, so that a fit takes milliseconds
_MIN_SIDE = 3  # distinct sizes on each side of a bend
_MAX_BENDS = 12  # places tried for the bend
_WORTH = 0.7  # a less simple shape must bring the error down to this fraction


class CostModel(NamedTuple):
    """Seconds as a function of a size; plain numbers, so that one rank's can be sent to all.

    >>> CostModel(startup=1e-3, per_unit=1e-8)(1_000_000)
    0.011
    """

    startup: float = 0.0  # seconds, whatever the size
    per_unit: float = 0.0  # seconds per byte or element, up to the bend
    per_unit_log: float = 0.0  # seconds, times size times its binary logarithm
    bend: float = math.inf  # size
    per_unit_beyond: float = 0.0  # seconds per byte or element, from the bend on

    def __call__(self, size: float) -> float:
        """Return the seconds that a size takes."""
        if size > self.bend:
            return self.startup + self.per_unit * self.bend + self.per_unit_beyond * (size - self.bend)
        if self.per_unit_log and size > 1:
            return self.startup + self.per_unit * size + self.per_unit_log * size * math.log2(size)
        return self.startup + self.per_unit * size


class _Candidate(NamedTuple):
    model: CostModel
    error: float


def fit(samples: Iterable[tuple[float, float]], shapes: Sequence[str] = EXCHANGE_SHAPES) -> CostModel:
    """Fit a cost model to timings, pairs of a size (bytes or elements) and seconds.

    Least absolute relative errors of the medians by size count, so a few timings that a busy machine has spoilt, either
    way, change little. A later shape is taken if its error is smaller by 30 %: ``"line"``, ``startup + per_unit * n``;
    ``"bent"``, with another slope above a size that is found; ``"log"``, ``startup + per_unit_log * n * log2(n)``, for
    exact top-k.
    """
    for shape in shapes:
        one_of("shape", shape, SHAPES)
    points = _medians(_checked(samples))
    best: Optional[_Candidate] = None
    for shape in shapes:
        candidate = _fit_shape(points, shape)
        if candidate is not None and (best is None or candidate.error < _WORTH * best.error):
            best = candidate
    if best is None:
        raise ValueError(
            f"shapes={tuple(shapes)} need more than {len(points)} distinct sizes: add 'line', or time more sizes"
        )
    return best.model


def _checked(samples: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    pairs = [(float(size), float(seconds)) for size, seconds in samples]
    for size, seconds in pairs:
        if not (0 <= size < math.inf and 0 <= seconds < math.inf):
            raise ValueError(
                f"samples hold ({size}, {seconds}): size and seconds must be finite and at least 0; drop disturbed ones"
            )
    sizes = {size for size, _ in pairs}
    if len(sizes) < _MIN_SIZES:
        raise ValueError(
            f"samples hold {len(sizes)} distinct sizes: a fit needs at least {_MIN_SIZES}, better five or more"
            " that span what will be asked for"
        )
    if not any(seconds for _, seconds in pairs):
        raise ValueError("samples took 0 seconds each: time larger sizes, or repeat them, until the clock sees them")
    return sorted(pairs)


def _medians(pairs: list[tuple[float, float]]) -> list[tuple[float, float]]:
    points = [(size, median(pair[1] for pair in group)) for size, group in groupby(pairs, key=lambda pair: pair[0])]
    if len(points) <= _MAX_SIZES:
        return points
    edges = [len(points) * index // _MAX_SIZES for index in range(_MAX_SIZES + 1)]
    pools = [points[start:stop] for start, stop in pairwise(edges)]
    return [(median(size for size, _ in pool), median(seconds for _, seconds in pool)) for pool in pools]


def _fit_shape(points: list[tuple[float, float]], shape: str) -> Optional[_Candidate]:
    """Fit one shape; ``None`` if there are too few sizes for it."""
    sizes = [size for size, _ in points]
    if shape == "line":
        return _fit_terms(points, ("startup", "per_unit"), [(1.0, size) for size in sizes])
    if shape == "log":
        rows: Rows = [(1.0, size * math.log2(max(size, 1.0))) for size in sizes]
        return _fit_terms(points, ("startup", "per_unit_log"), rows)
    bends = sizes[_MIN_SIDE - 1 : len(sizes) - _MIN_SIDE]
    candidates = [
        _fit_terms(
            points,
            ("startup", "per_unit", "per_unit_beyond"),
            [(1.0, min(size, bend), max(size - bend, 0.0)) for size in sizes],
            bend,
        )
        for bend in bends[:: -(-len(bends) // _MAX_BENDS) or 1]
    ]
    return min(candidates, key=lambda candidate: candidate.error, default=None)


def _fit_terms(
    points: list[tuple[float, float]], terms: tuple[str, ...], rows: Rows, bend: float = math.inf
) -> _Candidate:
    values, error = fit_rows(rows, [seconds for _, seconds in points])
    return _Candidate(CostModel(bend=bend, **dict(zip(terms, values))), error)
