"""Bytes and seconds of a bucket, and densities at which backward hides the exchange (LAGS-SGD).

Shi et al., "Layer-wise Adaptive Gradient Sparsification", ECAI 2020 (arXiv 1911.08727), choose a compression ratio for
each layer: the lowest ratio that hides selection and exchange behind the backward of the next layer, at most ``c_u``.
The printed formula takes the larger of this ratio and ``c_u``, so ``c_u`` is no bound. This module takes the smaller.
The released code has a rule that never runs: a layer sends a twentieth if backward could hide a dense exchange. This
module omits the rule, and chooses a density per bucket, not per layer. A bucket of density 1 is sent densely.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, combinations, groupby
from statistics import median
from typing import NamedTuple, Optional

DIRECT_BYTES = 2 << 20  # limit for direct messages on gloo; for larger tensors, a ring of ranks is as fast (1 Gbit/s)
_SAFE = 0.8  # used fraction of the time before the next bucket is ready; with 1.0, any delay would expose the exchange
_APART = 1.5  # minimum ratio of the largest to the smallest size; closer sizes give no reliable slope

# Bytes that a rank sends per byte of input. Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
# Operations in MPICH", IJHPCA 2005, sections 3.1 and 3.4.
SENT_SHARES: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2.0 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: ranks - 1.0,
    "all_to_all": lambda ranks: (ranks - 1.0) / ranks,
}


def sent_bytes(collective: str, nbytes: float, ranks: int) -> float:
    """Return the bytes that each of ``ranks`` ranks sends in a collective with ``nbytes`` of input per rank.

    All reported bytes use this count. An all-reduce of ``nbytes`` sends as much as an all-to-all of ``nbytes`` and an
    all-gather of ``nbytes / ranks``.
    """
    return SENT_SHARES[collective](ranks) * nbytes


def dense_bytes(elements: float, ranks: int) -> float:
    """Return the bytes that a rank sends in DDP's all-reduce of ``elements`` fp32 elements."""
    return sent_bytes("all_reduce", 4 * elements, ranks)


class Line(NamedTuple):
    """Seconds as a linear function of a size, in bytes or elements: ``startup + per_unit * size``.

    >>> Line(startup=1e-3, per_unit=1e-8)(1_000_000)
    0.011
    """

    startup: float = 0.0  # seconds at size 0
    per_unit: float = 0.0  # seconds per byte or element

    def __call__(self, size: float) -> float:
        """Return the seconds for a size."""
        return self.startup + self.per_unit * size


def fit(samples: Iterable[tuple[float, float]]) -> Optional[Line]:
    """Fit a line to pairs of a size and seconds. Return ``None`` if the sizes are too similar.

    Equal sizes count as one point, at the median of seconds. The slope is the median of slopes between two points,
    weighted by the difference of sizes. Outliers have little effect. Neither ``startup`` nor ``per_unit`` is negative.

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
    """Sizes and measured times of one bucket in one step."""

    elements: float
    counts: float  # number of elements to send at the densities of this step
    select_seconds: float  # seconds to add the residual, select, encode and decode
    exchange_seconds: float  # seconds in collectives, including the wait for slower ranks


class BucketCosts(NamedTuple):
    """Seconds to select and to exchange a bucket, as functions of a number of elements."""

    select: Line  # seconds to select, as a function of all elements of the bucket
    exchange: Line  # seconds to exchange, as a function of the elements to send


def costs_of(buckets: Sequence[BucketSample]) -> Optional[BucketCosts]:
    """Fit the costs to measured buckets. Return ``None`` if the bucket sizes are too similar for a slope."""
    select = fit((bucket.elements, bucket.select_seconds) for bucket in buckets)
    exchange = fit((bucket.counts, bucket.exchange_seconds) for bucket in buckets)
    return None if select is None or exchange is None else BucketCosts(select, exchange)


class BucketShape(NamedTuple):
    """Sizes of a planned bucket, and the time when backward has computed all gradients of the bucket."""

    elements: int
    counts: int  # number of elements to send without a plan: a plan never sends fewer
    ready: float  # seconds from the start of backward to the bucket's last gradient


def hidden_densities(costs: BucketCosts, buckets: Sequence[BucketShape]) -> list[float]:
    """Return for each bucket the largest density at which the exchange ends before the next bucket is ready.

    Densities are from ``counts / elements`` to 1. The minimum applies if backward cannot hide the exchange: to the last
    bucket, and to a bucket with too little time. At density 1 the real message is smaller than assumed here, because a
    dense bucket is sent without indices.
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
