"""Densities of parameters, and a planner that finds buckets by trials. The results are equal on all ranks."""

import math
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain, islice, pairwise
from statistics import median
from typing import Any, NamedTuple, Optional, Union

from typing_extensions import override

from lightning_sparse.compressors.base import Compressor, element_count, same_everywhere
from lightning_sparse.engine.collectives import Communicator
from lightning_sparse.engine.observe import Clock, Recorder, StepRecord
from lightning_sparse.schedule import Merged, plan_buckets
from lightning_sparse.schedule.costs import BucketCosts, BucketSample, BucketShape, costs_of, hidden_densities
from lightning_sparse.schedule.plan import Plan, Stops, best_of, equal_plans

_STAGES = 4  # number of densities in a warm-up; Deep Gradient Compression uses one density per epoch
_UNKNOWN_STEPS = 1_000_000  # assumed number of training steps until the training loop sets the number
_FEW = 64  # number of cached densities
_STAIR = 1.25  # ratio of successive densities while the density falls after Adam's dense steps


class Densities:
    """The density of each parameter in the next step.

    1. The user sets the density: ``density=`` of the model, or per parameter (``LAGS(densities=...)``).
    2. Warm-ups raise the density: over ``warmup_steps``, and after the dense steps of a corrected Adam.
    3. Rules (:class:`~lightning_sparse.callbacks.AdaptiveDensity`) raise the density to ``ruled``, up to ``ceiling``.
    4. A plan (:class:`StepPlanner`) raises the density to ``planned``, if the extra elements cost no time.
    5. ``sends_all`` sets the density to 1, which empties the residuals before ``sparse_auto`` sends dense gradients.
    """

    def __init__(self, compressor: Compressor, density: float, warmup_steps: Union[int, float] = 0) -> None:
        self._compressor, self._target = compressor, density
        self._warmup_steps = warmup_steps  # number of steps (int), or fraction of the training's steps (float)
        self.ruled: Mapping[str, float] = {}
        self.ceiling = 1.0
        self.planned: Mapping[str, float] = {}
        self.sends_all = False
        self._total_steps: Optional[int] = None  # number of steps of the training
        self._is_resumed = False  # whether a checkpoint has set _total_steps
        self._steps: Counter[int] = Counter()  # number of steps, by index of the optimizer
        self._in_warm_up = lru_cache(_FEW)(_raised)  # cached, because most steps repeat densities
        self.begin_step()

    def begin_step(self, progress: float = 1.0) -> None:
        """Set a warm-up's stage for the next step. ``progress`` is the finished fraction of Adam's warm-up, 0 to 1."""
        made, length = max(self._steps.values(), default=0), self._warmup_length
        self._stage = (_STAGES if made >= length else _STAGES * made // length, progress)
        self._compressor.begin_step(self._in_warm_up(self._target, *self._stage))

    def of(self, name: str) -> float:
        """Return the density of a parameter in the next step."""
        return 1.0 if self.sends_all else max(self.wanted(name), self.planned.get(name, 0.0))

    def wanted(self, name: str) -> float:
        """Return a parameter's density according to user, warm-ups and rules. A plan may only raise this density."""
        asked = self._in_warm_up(self.target(name), *self._stage)
        return max(asked, min(self.ruled.get(name, 0.0), self.ceiling))

    def count(self, name: str, numel: int) -> int:
        """Return the number of elements that a parameter of ``numel`` elements sends at the density :meth:`wanted`."""
        return element_count(numel, self.wanted(name))

    def target(self, name: str) -> float:
        """Return the density that the user has set for a parameter."""
        return self._compressor.density_of(name, self._target)

    def expect_steps(self, total_steps: Optional[int]) -> None:
        """Set the number of training steps. After a resume, the number from the checkpoint is used."""
        if not self._is_resumed:
            self._total_steps = total_steps

    def count_step(self, optimizer: int) -> None:
        """Count a step of the optimizer with the index ``optimizer``."""
        self._steps[optimizer] += 1

    @property
    def _warmup_length(self) -> int:
        if isinstance(self._warmup_steps, int):
            return self._warmup_steps
        return math.ceil(round(self._warmup_steps * (self._total_steps or _UNKNOWN_STEPS), 6))

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the warm-up, or an empty dictionary without a warm-up."""
        return {"steps": dict(self._steps), "total_steps": self._total_steps} if self._warmup_steps else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a saved warm-up."""
        if self._warmup_steps:
            self._steps = Counter(state["steps"])
            self._is_resumed = bool(state["total_steps"])
            self._total_steps = state["total_steps"] or self._total_steps


def _raised(target: float, stage: int, progress: float) -> float:
    # In a warm-up the density falls in stages of equal ratio, as in the code of Deep Gradient Compression.
    least = falling_density(target, progress)
    return least if stage >= _STAGES else max(least, same_everywhere(target ** ((stage + 1) / (_STAGES + 1))))


def falling_density(target: float, progress: float) -> float:
    """Return a density that falls from 1 to the target, in steps of equal ratio.

    Args:
        target: density at the end of the fall.
        progress: finished fraction of the fall, 0 to 1.

    >>> [round(falling_density(0.01, progress), 3) for progress in (0.0, 0.5, 0.99, 1.0)]
    [1.0, 0.112, 0.012, 0.01]
    """
    if progress >= 1 or target >= 1:
        return target
    stairs = max(1, math.ceil(math.log(1 / target) / math.log(_STAIR)))
    return same_everywhere(target ** (int(progress * stairs) / stairs))


_ROUNDS = 2  # times that each plan is tried, so that other processes on the machine affect all plans equally
_STEPS = 3  # number of timed steps per trial


class StepSample(NamedTuple):
    """Sizes and times of a step, averaged over ranks."""

    ready: tuple[float, ...]  # seconds from the start of backward to each gradient, in the order of exchange
    buckets: tuple[BucketSample, ...]  # sizes and times of buckets, in the order of exchange
    exposed_seconds: float  # seconds from the last gradient until all means were written
    total_seconds: float  # seconds from the start of backward until all means were written


Samples = dict[Stops, list[StepSample]]
Course = Generator[None, StepRecord, None]


class Planner:
    """A planner that does nothing, for schedules that need no plan."""

    plan: Optional[Plan] = None

    def see_exchange(self, record: StepRecord) -> None:
        """Process the record of an exchange. Every rank calls this between two steps."""


class StepPlanner(Planner):
    """Time several bucket plans in the first steps, and use the fastest plan.

    If the order of gradients changes, the trials start again. A plan sets the buckets and, with ``adaptive_density``, a
    higher density if backward hides the additional time.
    """

    def __init__(
        self,
        schedule: Merged,
        communicator: Communicator,
        recorder: Recorder,
        numels: Mapping[str, int],
        densities: Densities,
        adaptive_density: bool,
        holds_plan: Callable[[], bool],
        log: Callable[[str], None],
    ) -> None:
        self._schedule = schedule
        self._communicator = communicator
        self._recorder = recorder
        self._numels = numels
        self._densities = densities
        self._adapts_density = adaptive_density
        self._holds_plan = holds_plan  # returns whether exchanges begin only after backward
        self._log = log if communicator.rank == 0 else lambda line: None
        self._order: tuple[str, ...] = ()
        self._course: Course  # generator that times plans for _order; set with the first order
        schedule.reset()

    @override
    def see_exchange(self, record: StepRecord) -> None:
        order = tuple(record.ready)
        if not order or not record.is_typical:
            return  # The record has no order of gradients, or belongs to Adam's warm-up.
        if order == self._order:
            self._course.send(record)
        else:
            self._order, self._course = order, self._run()
            next(self._course)

    def _run(self) -> Course:
        """Time bucket plans for ``_order``, and choose a plan. Each ``yield`` waits for the record of an exchange."""
        elements = [self._numels[name] for name in self._order]
        seen = yield from self._time([(len(elements),)] if self._holds_plan() else equal_plans(elements))
        costs, ready = _costs_and_times(seen)
        if costs is not None:
            contest = yield from self._time([self._optimum(elements, costs, ready), _fastest(seen)])
            # Samples of the first trials count, too. Otherwise a plan that was fast by chance could win.
            seen |= {stops: [*seen.get(stops, ()), *steps] for stops, steps in contest.items()}
        best = _fastest(seen)
        densities = self._hidden_densities(best, costs, ready) if self._adapts_density and costs is not None else ()
        self._adopt(best, densities, seen)
        while True:
            yield

    def _time(self, plans: Sequence[Stops]) -> Generator[None, StepRecord, Samples]:
        """Time steps of each bucket plan. A trial begins with an untimed step, in which buffers get new sizes."""
        seen: dict[Stops, list[StepRecord]] = {stops: [] for stops in plans}
        self._recorder.watches_gradients = True
        for stops, steps in list(seen.items()) * _ROUNDS:
            self._bucket_as(stops)
            yield
            for _ in range(_STEPS):
                steps.append((yield))
        self._recorder.watches_gradients = False
        records = list(chain.from_iterable(seen.values()))
        samples = iter(averaged(self._communicator, records, self._holds_plan()))
        return {stops: [next(samples) for _ in steps] for stops, steps in seen.items()}

    def _optimum(self, elements: Sequence[int], costs: BucketCosts, ready: Sequence[float]) -> Stops:
        """Compute from measured costs which bucket plan ends a step earliest, as in OMGS-SGD."""
        sent = sum(self._densities.count(name, self._numels[name]) for name in self._order) / sum(elements)
        backward = [later - earlier for earlier, later in pairwise([0.0, *ready])]
        buckets = plan_buckets(elements, backward, costs.select.__call__, lambda numel: costs.exchange(sent * numel))
        return tuple(accumulate(map(len, buckets)))

    def _hidden_densities(self, stops: Stops, costs: BucketCosts, ready: Sequence[float]) -> tuple[float, ...]:
        shapes = [
            BucketShape(
                sum(self._numels[name] for name in bucket),
                sum(self._densities.count(name, self._numels[name]) for name in bucket),
                ready[stop - 1],
            )
            for bucket, stop in zip(self._buckets(stops), stops)
        ]
        return tuple(min(density, self._densities.ceiling) for density in hidden_densities(costs, shapes))

    def _adopt(self, stops: Stops, densities: tuple[float, ...], seen: Samples) -> None:
        steps, fastest = seen[stops], dict[int, float]()
        for tried, samples in seen.items():
            fastest[len(tried)] = min(_seconds(samples), fastest.get(len(tried), math.inf))
        self._bucket_as(stops, densities)
        exposed = median(sample.exposed_seconds for sample in steps)
        self.plan = Plan(self._buckets(stops), densities, _seconds(steps), exposed, tuple(sorted(fastest.items())))
        self._log(str(self.plan))

    def _bucket_as(self, stops: Stops, densities: Sequence[float] = ()) -> None:
        self._schedule.end_buckets_at(self._order[stop - 1] for stop in stops)
        buckets = zip(self._buckets(stops), densities)
        self._densities.planned = {name: density for bucket, density in buckets for name in bucket}

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


def averaged(communicator: Communicator, steps: Sequence[StepRecord], holds_plan: bool) -> list[StepSample]:
    """Return sizes and times of the recorded steps. The times are means over ranks."""
    times = [_times_of(record, holds_plan) for record in steps]
    means = iter(communicator.mean_of_numbers([seconds for ready, rest in times for seconds in (*ready, *rest)]))
    return [
        StepSample(
            tuple(islice(means, len(ready))),
            tuple(BucketSample(each.elements, each.counts, next(means), next(means)) for each in record.buckets),
            next(means),
            next(means),
        )
        for record, (ready, _) in zip(steps, times)
    ]


def _times_of(record: StepRecord, holds_plan: bool) -> tuple[list[float], list[float]]:
    """Return two lists of this rank's seconds: until each recorded gradient; for buckets, exposed time and step."""
    assert record.end is not None
    watched = [mark for mark in record.ready.values() if mark is not None]
    # Without a Trainer, a hook may not have recorded the start of backward.
    first = watched[0] if watched else record.backward_end
    start = first if record.backward_start is None else record.backward_start
    backward_seconds = Clock.seconds(start, record.backward_end)
    ready = [backward_seconds if holds_plan else Clock.seconds(start, mark) for mark in watched]
    buckets = [each.seconds(*stages) for each in record.buckets for stages in (("select", "encode"), ("exchange",))]
    return ready, [*buckets, record.exposed_seconds, Clock.seconds(start, record.end)]
