"""Plans, which divide gradients into buckets: the plans to try, and the measurements of the plan in use."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

Stops = tuple[int, ...]  # a plan: the end index of each bucket, among the gradients in the order of backward

_PARTS = (1, 2, 4, 8, 16)  # numbers of buckets to try
_TIE = 1.02  # ratio of step times that counts as measurement error: up to this ratio, fewer buckets win


class Plan(NamedTuple):
    """The buckets in use, and times measured when this plan was chosen.

    Attributes:
        buckets: names of the parameters of each bucket.
        densities: density of each bucket, or empty if the plan changes no density.
        seconds: median time from the start of backward until all means are written to the gradients.
        exposed_seconds: median part of ``seconds`` after backward has computed the last gradient.
        tried: pairs of a number of buckets and ``seconds`` of the fastest plan with this number.
    """

    buckets: tuple[tuple[str, ...], ...]
    densities: tuple[float, ...]
    seconds: float
    exposed_seconds: float
    tried: tuple[tuple[int, float], ...]

    def __str__(self) -> str:
        tried = ", ".join(f"{1e3 * seconds:.1f} ms with {buckets}" for buckets, seconds in self.tried)
        buckets = "1 bucket" if len(self.buckets) == 1 else f"{len(self.buckets)} buckets"
        return (
            f"gradients are exchanged in {buckets}{self._densities()}; backward and exchange take"
            f" {1e3 * self.seconds:.1f} ms, and {1e3 * self.exposed_seconds:.1f} ms of this are exposed (measured, by"
            f" number of buckets: {tried})"
        )

    def _densities(self) -> str:
        if not self.densities:
            return ""
        whole = sum(density >= 1 for density in self.densities)
        return f", {whole} dense, at densities from {min(self.densities):.2g} to {max(self.densities):.2g}"


def equal_plans(elements: Sequence[int]) -> list[Stops]:
    """Return plans of at most 1, 2, 4, 8 and 16 buckets of about equal size, for tensors of the given ``elements``."""
    return [_stops_of(elements, -(-sum(elements) // parts)) for parts in _PARTS]


def _stops_of(sizes: Sequence[int], least: int) -> Stops:
    stops, held = [], 0
    for stop, size in enumerate(sizes, start=1):
        held += size
        if held >= least or stop == len(sizes):
            stops.append(stop)
            held = 0
    return tuple(stops)


def best_of(seconds: Mapping[Stops, float]) -> Stops:
    """Return the plan with the fewest buckets among all plans at most 2 % slower than the fastest.

    A busy network delays some messages at random, so the fastest of many plans is often fastest by chance.

    >>> best_of({(6,): 0.101, (2, 4, 6): 0.1, (1, 6): 0.12})
    (6,)
    """
    limit = _TIE * min(seconds.values())
    return min((stops for stops in seconds if seconds[stops] <= limit), key=lambda stops: (len(stops), seconds[stops]))
