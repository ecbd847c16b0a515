"""Measured steps of a model as plain numbers, from which plans are made."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple, Optional

from typing_extensions import Self

from lightning_sparse.schedule.cost.model import EXCHANGE_SHAPES, SELECTION_SHAPES, CostModel, fit
from lightning_sparse.schedule.merge.simulator import Prediction, simulate

_MIN_SIZES = 3  # what a fit needs


class GroupSample(NamedTuple):
    """Sizes and times of one group in one step."""

    elements: int
    counts: int  # elements that the density asked for, of parameters that are not sent whole
    dense_elements: int  # of parameters that are sent whole
    select_seconds: float  # for compensating, selecting, encoding and decoding
    exchange_seconds: float  # in collectives, waiting for other ranks included


class StepSample(NamedTuple):
    """Sizes and times of one step; sizes are equal on all ranks, times are not."""

    ready: tuple[float, ...]  # seconds from the start of backward to each gradient, in the order of readiness
    groups: tuple[GroupSample, ...]  # in the order of exchange
    commit_seconds: float  # from the end of the last exchange until all means had been written
    exposed_seconds: float  # from the last gradient until then
    total_seconds: float  # from the start of backward until then

    def times(self) -> list[float]:
        """Return the times alone, in a fixed order, so that ranks can average them."""
        per_group = [seconds for group in self.groups for seconds in (group.select_seconds, group.exchange_seconds)]
        return [*self.ready, *per_group, *self[2:]]

    def with_times(self, times: Iterator[float]) -> "StepSample":
        """Return a copy with other times, taken from an iterator in the order of :meth:`times`."""
        ready = tuple(next(times) for _ in self.ready)
        groups = tuple(each._replace(select_seconds=next(times), exchange_seconds=next(times)) for each in self.groups)
        return StepSample(ready, groups, next(times), next(times), next(times))


class Profile(NamedTuple):
    """A measured :class:`~lightning_sparse.schedule.merge.simulator.Problem`; tuples are of the first k tensors."""

    elements: tuple[int, ...]  # for k from 0, in the order of readiness, as are the next two
    counts: tuple[int, ...]  # that the density asks for
    ready: tuple[float, ...]  # seconds of backward
    select: CostModel  # by elements
    exchange: CostModel  # by counts
    commit_seconds: float  # after the last exchange
    dense: Optional[CostModel] = None  # by elements, of all that is done with a group sent whole; none if none may be

    @classmethod
    def of(cls, elements: Any, counts: Any, ready: Any, select: Any, exchange: Any, commit: float, dense: Any) -> Self:
        """Return the profile that has been written as lists."""
        whole = None if dense is None else CostModel(*dense)
        sizes = (tuple(elements), tuple(counts), tuple(ready))
        return cls(*sizes, CostModel(*select), CostModel(*exchange), commit, whole)

    @property
    def tensors(self) -> int:
        """Number of tensors."""
        return len(self.ready) - 1

    def is_dense(self, start: int, stop: int) -> bool:
        """Say whether a group arrives earlier whole than selected from."""
        if self.dense is None:
            return False
        elements = self.elements[stop] - self.elements[start]
        return self.dense(elements) <= self._sparse_seconds(elements, self.counts[stop] - self.counts[start])

    def task_seconds(self, start: int, stop: int) -> float:
        """Return the time of a group, selected from or whole, as is faster."""
        elements = self.elements[stop] - self.elements[start]
        sparse = self._sparse_seconds(elements, self.counts[stop] - self.counts[start])
        return sparse if self.dense is None else min(self.dense(elements), sparse)

    def select_seconds(self, start: int, stop: int) -> float:
        """Return the time of selecting from a group; nothing where it is sent whole."""
        return 0.0 if self.is_dense(start, stop) else self.select(self.elements[stop] - self.elements[start])

    def exchange_seconds(self, start: int, stop: int) -> float:
        """Return the time of exchanging a group."""
        if self.dense is not None and self.is_dense(start, stop):
            return self.dense(self.elements[stop] - self.elements[start])
        return self.exchange(self.counts[stop] - self.counts[start])

    def group_seconds(self, start: int, stop: int, counts: int) -> float:
        """Return the time of a group of which so many elements are sent."""
        elements = self.elements[stop] - self.elements[start]
        if self.dense is not None and counts >= elements:
            return self.dense(elements)
        return self._sparse_seconds(elements, counts)

    def _sparse_seconds(self, elements: int, counts: int) -> float:
        return self.select(elements) + self.exchange(counts)

    def predict(self, stops: Sequence[int]) -> Prediction:
        """Predict a step whose groups stop there; the total ends when all means have been written."""
        prediction = simulate(self, stops, "worker")
        return prediction._replace(total=prediction.total + self.commit_seconds)


def can_profile(samples: Sequence[StepSample]) -> bool:
    """Say whether the groups seen were of enough different sizes to tell startup from slope."""
    groups = _of_one_kind(samples)
    return min(len({group.elements for group in groups}), len({_sent(group) for group in groups})) >= _MIN_SIZES


def profile_of(elements: Sequence[int], counts: Sequence[int], samples: Sequence[StepSample]) -> Profile:
    """Make a profile of medians of steps cut into groups of three sizes or more; ``counts`` are of each tensor."""
    groups = _of_one_kind(samples)
    ready = [median(times) for times in zip(*(sample.ready for sample in samples))]
    return Profile(
        tuple(accumulate(elements, initial=0)),
        tuple(accumulate(counts, initial=0)),
        (0.0, *accumulate(ready, max)),
        _fit_or_free([(group.elements, group.select_seconds) for group in groups], SELECTION_SHAPES),
        _fit_or_free([(_sent(group), group.exchange_seconds) for group in groups], EXCHANGE_SHAPES),
        median(sample.commit_seconds for sample in samples),
    )


def dense_cost(samples: Sequence[StepSample], startup: float) -> Optional[CostModel]:
    """Return the time of a group that is sent whole, by elements; ``None`` if none was seen.

    With too few sizes for a fit, ``startup`` (seconds of a message) tells it from the slope.
    """
    whole = [group for sample in samples for group in sample.groups if group.dense_elements == group.elements]
    points = [(group.elements, group.select_seconds + group.exchange_seconds) for group in whole]
    if len({size for size, _ in points}) >= _MIN_SIZES:
        return fit(points, EXCHANGE_SHAPES)
    if not points:
        return None
    return CostModel(startup, max(0.0, median((seconds - startup) / size for size, seconds in points)))


def _of_one_kind(samples: Sequence[StepSample]) -> list[GroupSample]:
    """Return the groups of which some elements are sent or, if there are none, those that are sent whole."""
    groups = [group for sample in samples for group in sample.groups]
    return [group for group in groups if not group.dense_elements] or groups


def _sent(group: GroupSample) -> int:
    return group.counts + group.dense_elements


def _fit_or_free(samples: Sequence[tuple[int, float]], shapes: Sequence[str]) -> CostModel:
    return fit(samples, shapes) if any(seconds for _, seconds in samples) else CostModel()


def equal_parts(elements: Sequence[int], parts: int) -> list[int]:
    """Return where groups stop that hold about equally many elements, each at least its share."""
    share = -(-sum(elements) // parts)
    stops, held = [], 0
    for stop, size in enumerate(elements, start=1):
        held += size
        if held >= share or stop == len(elements):
            stops.append(stop)
            held = 0
    return stops


def run_of(elements: Sequence[int], wanted: float) -> tuple[int, int]:
    """Return where neighbours start and stop that together hold about as many elements as wanted.

    >>> run_of([10, 400, 30, 30, 30], 90)
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
