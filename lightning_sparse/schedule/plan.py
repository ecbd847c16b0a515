"""Plans: groupings that a schedule can follow, which of them are tried, and what is known of the one in force."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, repeat
from typing import Any, NamedTuple

_PARTS = (1, 2, 4, 8, 16)  # groups of the groupings that are tried
_WHOLE_SHARES = (1 / 64, 1 / 32, 1 / 16)  # of the model, sent whole to see what that takes
_WORTH = 1.05  # times as long a step may be seen to take if it sends more: what should cost nothing, to a measurement
_TIE = 1.02  # times as long it may be seen to take with fewer groups; a measurement hardly tells that from as long


class Grouping(NamedTuple):
    """A way to send the gradients of a model.

    Attributes:
        stops: where the groups stop, in the order of readiness.
        densities: of each group; none where every parameter has the density that it has without a plan.
    """

    stops: tuple[int, ...]
    densities: tuple[float, ...] = ()


class Plan(NamedTuple):
    """The grouping in force.

    Attributes:
        groups: names of the parameters of each group.
        densities: as of :class:`Grouping`.
        seconds: from the start of backward until all gradients could be used, as measured when the plan was adopted.
        exposed_seconds: of these, after the end of backward.
        tried: number of groups, and seconds of the fastest grouping with so many that was timed.
    """

    groups: tuple[tuple[str, ...], ...]
    densities: tuple[float, ...]
    seconds: float
    exposed_seconds: float
    tried: tuple[tuple[int, float], ...]

    def state_dict(self) -> dict[str, Any]:
        """Return plain tuples and numbers, for checkpoints that are read without running what a pickle asks for."""
        return self._asdict()

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "Plan":
        """Return the plan that :meth:`state_dict` is of."""
        return cls(
            tuple(tuple(map(str, group)) for group in state["groups"]),
            tuple(map(float, state["densities"])),
            float(state["seconds"]),
            float(state["exposed_seconds"]),
            tuple((int(count), float(seconds)) for count, seconds in state["tried"]),
        )

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


def first_groupings(elements: Sequence[int]) -> list[Grouping]:
    """Return groupings into groups of about equally many elements, for tensors of so many each."""
    return [Grouping(stops_of(elements, repeat(-(-sum(elements) // parts)))) for parts in _PARTS]


def stops_of(sizes: Sequence[int], least: Iterator[int]) -> tuple[int, ...]:
    """Return where groups stop, each as soon as it holds the next ``least``; the last holds what is left."""
    stops, held, limit = [], 0, next(least)
    for stop, size in enumerate(sizes, start=1):
        held += size
        if held >= limit or stop == len(sizes):
            stops.append(stop)
            held, limit = 0, next(least)
    return tuple(stops)


def partly_whole_groupings(elements: Sequence[int]) -> list[Grouping]:
    """Return groupings that send a few small parts of the model whole, beside the rest as ever."""
    groupings = []
    for share in _WHOLE_SHARES:
        start, stop = _run_of(elements, share * sum(elements))
        stops = [place for place in (start, stop) if place] + [len(elements)] * (stop < len(elements))
        groupings.append(Grouping(tuple(stops), tuple(1.0 if place == stop else 0.0 for place in stops)))
    return groupings


def _run_of(elements: Sequence[int], wanted: float) -> tuple[int, int]:
    """Return where neighbours start and stop that together hold about as many elements as wanted.

    >>> _run_of([10, 400, 30, 30, 30], 90)
    (2, 5)
    """
    sums = list(accumulate(elements, initial=0))
    runs = []
    for start in range(len(elements)):
        beyond = bisect_left(sums, sums[start] + wanted, lo=start + 1)
        runs += [(start, stop) for stop in (beyond - 1, beyond) if start < stop < len(sums)]
    # Of division, unlike logarithms, every machine has the same last digit: ranks are not asked to agree on this.
    held = {run: max(1, sums[run[1]] - sums[run[0]]) for run in runs}
    return min(runs, key=lambda run: max(held[run] / wanted, wanted / held[run]))


def best_of(seconds: Mapping[Grouping, float]) -> Grouping:
    """Return the fastest grouping by the seconds of a step; of those about as fast, the one of the fewest groups.

    A busy network can delay each message, and the fastest of many is often the luckiest. A grouping that sends more
    than it has to may be seen to take some more.

    >>> best_of({Grouping((6,)): 0.101, Grouping((2, 4, 6)): 0.1, Grouping((1, 6)): 0.12})
    Grouping(stops=(6,), densities=())
    """
    fastest = min(seconds, key=lambda grouping: seconds[grouping] * (1.0 if grouping.densities else _WORTH))
    of_kind = [grouping for grouping in seconds if bool(grouping.densities) == bool(fastest.densities)]
    alike = [grouping for grouping in of_kind if seconds[grouping] <= _TIE * seconds[fastest]]
    return min(alike, key=lambda grouping: (len(grouping.stops), seconds[grouping]))
