"""Plans: groupings that a schedule can follow, which of them are tried, and what is known of the one in force."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

Stops = tuple[int, ...]  # where the groups of a grouping stop, in the order of readiness

_PARTS = (1, 2, 4, 8, 16)  # groups of the groupings that are tried
_TIE = 1.02  # times as long a step may be seen to take with fewer groups; a measurement hardly tells that from as long


class Plan(NamedTuple):
    """The groups in force.

    Attributes:
        groups: names of the parameters of each group.
        densities: of each group; none where every parameter has the density that it has without a plan.
        seconds: from the start of backward until all gradients could be used, as measured when the plan was adopted.
        exposed_seconds: of these, after the end of backward.
        tried: number of groups, and seconds of the fastest grouping with so many that was timed.
    """

    groups: tuple[tuple[str, ...], ...]
    densities: tuple[float, ...]
    seconds: float
    exposed_seconds: float
    tried: tuple[tuple[int, float], ...]

    def __str__(self) -> str:
        tried = ", ".join(f"{1e3 * seconds:.1f} ms with {groups}" for groups, seconds in self.tried)
        groups = "1 group" if len(self.groups) == 1 else f"{len(self.groups)} groups"
        return (
            f"gradients are exchanged in {groups}{self._densities()}; backward and exchange take"
            f" {1e3 * self.seconds:.1f} ms, of which {1e3 * self.exposed_seconds:.1f} ms come after backward (measured,"
            f" by number of groups: {tried})"
        )

    def _densities(self) -> str:
        if not self.densities:
            return ""
        whole = sum(density >= 1 for density in self.densities)
        return f", {whole} of them whole, at densities from {min(self.densities):.2g} to {max(self.densities):.2g}"


def equal_groupings(elements: Sequence[int]) -> list[Stops]:
    """Return groupings into groups of about equally many elements, for tensors of so many each."""
    return [_stops_of(elements, -(-sum(elements) // parts)) for parts in _PARTS]


def _stops_of(sizes: Sequence[int], least: int) -> Stops:
    """Return where groups stop, each as soon as it holds so many elements; the last holds the rest."""
    stops, held = [], 0
    for stop, size in enumerate(sizes, start=1):
        held += size
        if held >= least or stop == len(sizes):
            stops.append(stop)
            held = 0
    return tuple(stops)


def best_of(seconds: Mapping[Stops, float]) -> Stops:
    """Return the fastest grouping by the seconds of a step; of those about as fast, the one of the fewest groups.

    A busy network can delay each message, and the fastest of many is often the luckiest.

    >>> best_of({(6,): 0.101, (2, 4, 6): 0.1, (1, 6): 0.12})
    (6,)
    """
    limit = _TIE * min(seconds.values())
    return min((stops for stops in seconds if seconds[stops] <= limit), key=lambda stops: (len(stops), seconds[stops]))
