"""What buckets take, and densities whose exchange hides behind backward: the adaptive ones of LAGS-SGD, for buckets.

Shi et al., "Layer-wise Adaptive Gradient Sparsification", ECAI 2020 (arXiv 1911.08727), choose for each layer the
lowest compression ratio, at most ``c_u``, whose exchange and selection hide behind the computation of the next layer.
As printed, the formula takes the larger of ``c_u`` and that ratio; only the smaller makes ``c_u`` an upper bound. The
released code never runs the rule, leaves out the time of selection in it, and sends a twentieth of a layer that would
hide as a whole. Here a bucket takes the place of a layer, and a whole one is sent whole.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, combinations, groupby
from statistics import median
from typing import NamedTuple, Optional

_SAFE = 0.8  # of the time there is: what hides to the last microsecond stands out at the first disturbance
_APART = 1.5  # times as large as the smallest size the largest has to be to tell a slope


class Line(NamedTuple):
    """Seconds by a size.

    >>> Line(startup=1e-3, per_unit=1e-8)(1_000_000)
    0.011
    """

    startup: float = 0.0  # seconds, whatever the size
    per_unit: float = 0.0  # seconds per byte or element

    def __call__(self, size: float) -> float:
        """Return the seconds that a size takes."""
        return self.startup + self.per_unit * size


def fit(samples: Iterable[tuple[float, float]]) -> Optional[Line]:
    """Fit a line to timings, pairs of a size and seconds; ``None`` where all sizes are alike.

    Medians of each size count; the slope is the median of those between two sizes, weighted by how far they are apart,
    so that timings that a busy machine has spoilt change little. Neither number is negative.

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
    """Sizes and times of one bucket in one step."""

    elements: int
    counts: int  # elements that are sent
    select_seconds: float  # for compensating, selecting, encoding and decoding
    exchange_seconds: float  # in collectives, waiting for other ranks included


class BucketCosts(NamedTuple):
    """Seconds of a bucket."""

    select: Line  # by elements
    exchange: Line  # by elements sent


def costs_of(buckets: Sequence[BucketSample]) -> Optional[BucketCosts]:
    """Fit what buckets take; ``None`` where those seen are too much of one size to tell startup from slope."""
    select = fit((bucket.elements, bucket.select_seconds) for bucket in buckets)
    exchange = fit((bucket.counts, bucket.exchange_seconds) for bucket in buckets)
    return None if select is None or exchange is None else BucketCosts(select, exchange)


class BucketShape(NamedTuple):
    """A bucket to be sent."""

    elements: int
    counts: int  # that the density asks for
    ready: float  # seconds from the start of backward


def hidden_densities(costs: BucketCosts, buckets: Sequence[BucketShape]) -> list[float]:
    """Return for each bucket the largest density whose exchange ends before the next bucket is ready, up to 1.

    The last bucket, and one whose exchange is late already, get the density of their counts: nothing hides them. At a
    density of 1 a bucket is sent without indices, in fewer bytes than are counted here.
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
