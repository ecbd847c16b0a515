"""Cost models of buckets, and densities that hide behind backward: the adaptive densities of LAGS-SGD, for buckets.

Shi et al., "Layer-wise Adaptive Gradient Sparsification", ECAI 2020 (arXiv 1911.08727), choose the lowest compression
ratio for each layer, at most ``c_u``, that hides exchange and selection behind the computation of the next layer. As
printed, the formula takes the larger of ``c_u`` and that ratio; only the smaller makes ``c_u`` an upper bound. The
released code never runs the rule, ignores the time of selection, and sends a twentieth of a layer that would hide
densely. Here buckets replace layers, and a bucket of density 1 is sent densely.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, combinations, groupby
from statistics import median
from typing import NamedTuple, Optional

_SAFE = 0.8  # usable fraction of the available time: without a margin, any disturbance exposes the exchange
_APART = 1.5  # minimum ratio of largest to smallest size for a slope


class Line(NamedTuple):
    """Seconds as a linear function of a size.

    >>> Line(startup=1e-3, per_unit=1e-8)(1_000_000)
    0.011
    """

    startup: float = 0.0  # seconds for any size
    per_unit: float = 0.0  # seconds per byte or element

    def __call__(self, size: float) -> float:
        """Return the seconds for a size."""
        return self.startup + self.per_unit * size


def fit(samples: Iterable[tuple[float, float]]) -> Optional[Line]:
    """Fit a line to timings, pairs of size and seconds. Return ``None`` if the sizes are too similar.

    The fit uses the median of each size. The slope is the median of the slopes between two sizes, weighted by distance,
    so that outliers from a busy machine have little effect. Neither number is negative.

    >>> fit([(100, 2.0), (200, 3.0), (400, 50.0), (800, 9.0)])
    Line(startup=1.0, per_unit=0.01)
    """
    by_size = groupby(sorted(samples), key=lambda sample: sample[0])
    points = [(size, median(seconds for _, seconds in bucket)) for size, bucket in by_size]
    if not points or points[-1][0] < _APART * points[0][0]:
        return None
    slopes = sorted(
        ((more - less) / (large - small), large - small) for (small, less), (large, more) in combinations(points, 2)
    )
    weights = list(accumulate(weight for _, weight in slopes))
    per_unit = max(0.0, slopes[bisect_left(weights, weights[-1] / 2)][0])
    return Line(max(0.0, median(seconds - per_unit * size for size, seconds in points)), per_unit)


class BucketSample(NamedTuple):
    """Sizes and times of a bucket in a step."""

    elements: int
    counts: int  # sent elements
    select_seconds: float  # seconds to compensate, select, encode and decode
    exchange_seconds: float  # seconds in collectives, with the wait for other ranks


class BucketCosts(NamedTuple):
    """Seconds of a bucket as functions of its size."""

    select: Line  # argument: elements
    exchange: Line  # argument: sent elements


def costs_of(buckets: Sequence[BucketSample]) -> Optional[BucketCosts]:
    """Fit the costs of buckets. Return ``None`` if the bucket sizes are too similar for a slope."""
    select = fit((bucket.elements, bucket.select_seconds) for bucket in buckets)
    exchange = fit((bucket.counts, bucket.exchange_seconds) for bucket in buckets)
    return None if select is None or exchange is None else BucketCosts(select, exchange)


class BucketShape(NamedTuple):
    """Size of a bucket and the time when it is ready."""

    elements: int
    counts: int  # elements to send at the set density
    ready: float  # seconds from the start of backward


def hidden_densities(costs: BucketCosts, buckets: Sequence[BucketShape]) -> list[float]:
    """Return the largest density of each bucket, up to 1, that ends the exchange before the next bucket is ready.

    Nothing hides the last bucket and late buckets, so ``counts`` sets the density there. At density 1 a bucket is sent
    without indices, in fewer bytes than assumed here.
    """
    densities, free = [], 0.0
    for bucket, following in zip(buckets, [*buckets[1:], None]):
        begin = max(free, bucket.ready)
        room = 0.0 if following is None else _SAFE * (following.ready - begin)
        spare = (room - costs.select(bucket.elements) - costs.exchange.startup) / max(costs.exchange.per_unit, 1e-18)
        counts = int(max(bucket.counts, min(spare, bucket.elements)))
        densities.append(counts / max(1, bucket.elements))
        free = begin + costs.select(bucket.elements) + costs.exchange(counts)
    return densities
