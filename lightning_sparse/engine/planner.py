"""A planner that finds buckets by trials. The plan is equal on all ranks."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from statistics import median
from typing import NamedTuple, Optional

from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_sparse.engine.collectives import Communicator
from lightning_sparse.engine.observe import Clock, Recorder, StepRecord
from lightning_sparse.engine.step.selecting import Densities
from lightning_sparse.schedule import Merged, plan_buckets
from lightning_sparse.schedule.costs import BucketCosts, BucketSample, BucketShape, costs_of, hidden_densities
from lightning_sparse.schedule.plan import Plan, Stops, best_of, equal_plans

_ROUNDS = 2  # rounds in which each plan is tried once, so that a slow phase of the machine affects all plans
_STEPS = 3  # number of timed steps per trial


class StepSample(NamedTuple):
    """Sizes and times of a step, averaged over ranks."""

    ready: tuple[float, ...]  # seconds from the start of backward to each gradient, in the order of exchange
    buckets: tuple[BucketSample, ...]  # sizes and times of buckets, in the order of exchange
    exposed_seconds: float  # seconds from the last gradient until all means were written
    total_seconds: float  # seconds from the start of backward until all means were written


Samples = dict[Stops, list[StepSample]]
Course = Generator[None, StepRecord, None]


@dataclass
class StepPlanner:
    """Time several bucket plans in the first steps, and use the fastest plan.

    If the order of gradients changes after :meth:`start`, the trials start again. A plan sets the buckets and, with
    ``adaptive_density``, a higher density if backward hides the additional time.
    """

    schedule: Merged
    communicator: Communicator
    recorder: Recorder
    numels: Mapping[str, int]
    densities: Densities
    adaptive_density: bool
    overlaps_backward: bool
    log: Callable[[str], None]  # called on rank 0
    plan: Optional[Plan] = None
    _order: tuple[str, ...] = ()
    _course: Course = field(init=False)  # the planning of _order as a generator; starts with the first recorded order

    def __post_init__(self) -> None:
        self.schedule.reset()

    def start(self) -> None:
        """Process the records of the next exchanges, until there is a plan for the order of gradients."""
        self.recorder.on_record = self.see_exchange

    def see_exchange(self, record: StepRecord) -> None:
        """Process the record of an exchange. Every rank calls this between two steps."""
        order = tuple(record.ready)
        if not order or not record.is_typical:
            return  # The record has no order of gradients, or belongs to Adam's warm-up.
        try:
            if order == self._order:
                self._course.send(record)
            else:
                self._order, self._course = order, self._run()
                next(self._course)
        except StopIteration:  # There is a plan.
            self.recorder.on_record = None

    def _run(self) -> Course:
        """Time bucket plans for ``_order``, and choose a plan. Each ``yield`` waits for the record of an exchange."""
        elements = [self.numels[name] for name in self._order]
        seen = yield from self._time(equal_plans(elements) if self.overlaps_backward else [(len(elements),)])
        costs, ready = _costs_and_times(seen)
        if costs is not None:
            contest = yield from self._time([self._optimum(elements, costs, ready), _fastest(seen)])
            # Samples of the first trials count, too. Otherwise a plan that was fast by chance could win.
            seen |= {stops: [*seen.get(stops, ()), *steps] for stops, steps in contest.items()}
        best = _fastest(seen)
        densities = self._hidden_densities(best, costs, ready) if self.adaptive_density and costs is not None else ()
        self._adopt(best, densities, seen)

    def _time(self, plans: Sequence[Stops]) -> Generator[None, StepRecord, Samples]:
        """Time steps of each bucket plan. A trial begins with an untimed step, in which buffers get new sizes."""
        seen: dict[Stops, list[StepRecord]] = {stops: [] for stops in plans}
        self.recorder.watches_gradients = True
        for stops, steps in list(seen.items()) * _ROUNDS:
            self._bucket_as(stops)
            yield
            for _ in range(_STEPS):
                steps.append((yield))
        self.recorder.watches_gradients = False
        records = list(chain.from_iterable(seen.values()))
        samples = iter(averaged(self.communicator, records))
        return {stops: [next(samples) for _ in steps] for stops, steps in seen.items()}

    def _optimum(self, elements: Sequence[int], costs: BucketCosts, ready: Sequence[float]) -> Stops:
        """Compute from measured costs which bucket plan ends a step earliest, as in OMGS-SGD."""
        sent = sum(self.densities.count(name, self.numels[name]) for name in self._order) / sum(elements)
        backward = [later - earlier for earlier, later in pairwise([0.0, *ready])]
        buckets = plan_buckets(elements, backward, costs.select.__call__, lambda numel: costs.exchange(sent * numel))
        return tuple(accumulate(map(len, buckets)))

    def _hidden_densities(self, stops: Stops, costs: BucketCosts, ready: Sequence[float]) -> tuple[float, ...]:
        shapes = [
            BucketShape(
                sum(self.numels[name] for name in bucket),
                sum(self.densities.count(name, self.numels[name]) for name in bucket),
                ready[stop - 1],
            )
            for bucket, stop in zip(self._buckets(stops), stops)
        ]
        return tuple(min(density, self.densities.ceiling) for density in hidden_densities(costs, shapes))

    def _adopt(self, stops: Stops, densities: tuple[float, ...], seen: Samples) -> None:
        self._bucket_as(stops, densities)
        exposed = median(sample.exposed_seconds for sample in seen[stops])
        tried = tuple(sorted((len(each), _seconds(samples)) for each, samples in seen.items()))
        self.plan = Plan(self._buckets(stops), densities, _seconds(seen[stops]), exposed, tried)
        if self.communicator.rank == 0:
            self.log(str(self.plan))

    def _bucket_as(self, stops: Stops, densities: Sequence[float] = ()) -> None:
        self.schedule.end_buckets_at(self._order[stop - 1] for stop in stops)
        buckets = zip(self._buckets(stops), densities)
        self.densities.planned = {name: density for bucket, density in buckets for name in bucket}

    def _buckets(self, stops: Stops) -> tuple[tuple[str, ...], ...]:
        return tuple(self._order[start:stop] for start, stop in pairwise((0, *stops)))


def _seconds(samples: Sequence[StepSample]) -> float:
    return median(sample.total_seconds for sample in samples)


def _fastest(seen: Samples) -> Stops:
    return best_of({stops: _seconds(steps) for stops, steps in seen.items()})


def _costs_and_times(seen: Samples) -> tuple[Optional[BucketCosts], list[float]]:
    """Return the costs of buckets, and the median ready time of each gradient. Both are equal on all ranks."""
    samples = list(chain.from_iterable(seen.values()))
    ready = accumulate((median(times) for times in zip(*(sample.ready for sample in samples))), max, initial=0.0)
    return costs_of([bucket for sample in samples for bucket in sample.buckets]), list(ready)[1:]


def averaged(communicator: Communicator, steps: Sequence[StepRecord]) -> list[StepSample]:
    """Return sizes and times of the recorded steps. The times are means over ranks."""
    numbers, form = tree_flatten(list(map(_sample_of, steps)))
    means: list[StepSample] = tree_unflatten(communicator.mean_of_numbers(numbers), form)
    return means


def _sample_of(record: StepRecord) -> StepSample:
    start = record.backward_start
    ready = tuple(Clock.seconds(start, mark) for mark in record.ready.values())
    buckets = tuple(
        BucketSample(each.elements, each.counts, each.seconds("select", "encode"), each.seconds("exchange"))
        for each in record.buckets
    )
    return StepSample(ready, buckets, record.seconds("exposed"), Clock.seconds(start, record.end))
