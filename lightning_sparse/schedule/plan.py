"""Plans: plans that a schedule can follow, which of them are tried, and what is known of the one in force."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

Stops = tuple[int, ...]  # where the buckets of a plan stop, in the order of readiness

_PARTS = (1, 2, 4, 8, 16)  # buckets of the plans that are tried
_TIE = 1.02  # times as long a step may be seen to take with fewer buckets; a measurement hardly tells that from as long


class Plan(NamedTuple):
    """The buckets in force.

    Attributes:
        buckets: names of the parameters of each bucket.
        densities: of each bucket; none where every parameter has the density that it has without a plan.
        seconds: from the start of backward until all gradients could be used, as measured when the plan was adopted.
        exposed_seconds: of these, after the end of backward.
        tried: number of buckets, and seconds of the fastest plan with so many that was timed.
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
            f" {1e3 * self.seconds:.1f} ms, of which {1e3 * self.exposed_seconds:.1f} ms come after backward (measured,"
            f" by number of buckets: {tried})"
        )

    def _densities(self) -> str:
        if not self.densities:
            return ""
        whole = sum(density >= 1 for density in self.densities)
        return f", {whole} of them whole, at densities from {min(self.densities):.2g} to {max(self.densities):.2g}"


def equal_plans(elements: Sequence[int]) -> list[Stops]:
    """Return plans into buckets of about equally many elements, for tensors of so many each."""
    return [_stops_of(elements, -(-sum(elements) // parts)) for parts in _PARTS]


def _stops_of(sizes: Sequence[int], least: int) -> Stops:
    """Return where buckets stop, each as soon as it holds so many elements; the last holds the rest."""
    stops, held = [], 0
    for stop, size in enumerate(sizes, start=1):
        held += size
        if held >= least or stop == len(sizes):
            stops.append(stop)
            held = 0
    return tuple(stops)


def best_of(seconds: Mapping[Stops, float]) -> Stops:
    """Return the fastest plan by the seconds of a step; of those about as fast, the one of the fewest buckets.

    A busy network can delay each message, and the fastest of many is often the luckiest.

    >>> best_of({(6,): 0.101, (2, 4, 6): 0.1, (1, 6): 0.12})
    (6,)
    """
    limit = _TIE * min(seconds.values())
    return min((stops for stops in seconds if seconds[stops] <= limit), key=lambda stops: (len(stops), seconds[stops]))
