"""HOW MUCH is sent of each parameter, and in which buckets, alike on all ranks."""

import math
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate, chain, islice, pairwise
from statistics import median
from typing import Any, NamedTuple, Optional

from typing_extensions import override

from lightning_sparse.compressors.base import Compressor, element_count, same_everywhere
from lightning_sparse.engine.collectives import Communicator
from lightning_sparse.engine.observe import Clock, Recorder, StepRecord
from lightning_sparse.schedule import Merged, plan_buckets
from lightning_sparse.schedule.costs import BucketCosts, BucketSample, BucketShape, costs_of, hidden_densities
from lightning_sparse.schedule.plan import Plan, Stops, best_of, equal_plans

WARM_UP_PART = 10  # a warm-up that nobody has asked for takes one in so many of a training's steps at most
_FEW = 64  # densities asked for of single parameters
_STAIR = 1.25  # times less in each stair of Adam's falling density: a plan would not follow one that fell in every step


class Densities:
    """The density of each parameter in the step that comes.

    1. The user asks for one: ``density=`` of the model, or its compressor's of a parameter (``LAGS(densities=...)``).
    2. Warm-ups raise it: over ``warmup_epochs``, and after the dense steps of a corrected Adam.
    3. Rules (:class:`~lightning_sparse.callbacks.AdaptiveDensity`) raise a parameter's to ``ruled``, up to ``ceiling``.
    4. A plan raises it to ``planned``, where that costs no time.
    5. While ``sends_all``, before ``sparse_auto`` sends dense gradients, all are 1, and nothing is left over.
    """

    def __init__(self, compressor: Compressor, density: float, epochs: int = 0, is_bounded: bool = False) -> None:
        self._compressor, self._target = compressor, density
        self._epochs, self._is_bounded = epochs, is_bounded  # of the warm-up; by a tenth of a training of known length
        self.ruled: Mapping[str, float] = {}
        self.ceiling = 1.0
        self.planned: Mapping[str, float] = {}
        self.sends_all = False
        self._total_steps: Optional[int] = None  # of the training, where a warm-up goes by it
        self._is_told = False  # of them, by a checkpoint
        self._steps: Counter[int] = Counter()  # by optimizer
        self.epoch = 0  # that the last step was of
        self._in_warm_up = lru_cache(_FEW)(partial(_raised, epochs))  # in most steps as in the one before
        self.begin_step(0)

    def begin_step(self, epoch: int, progress: float = 1.0) -> None:
        """Have warm-ups go on: to an epoch, and to how much of Adam's lies behind, from 0 to 1."""
        stage = epoch
        if self._total_steps:
            made = max(self._steps.values(), default=0)
            stage = max(epoch, WARM_UP_PART * self._epochs * made // self._total_steps)
        self._stage, self._progress = stage, progress
        self._compressor.begin_step(self._in_warm_up(self._target, stage, progress))

    def of(self, name: str) -> float:
        """Return the fraction of elements to send of a parameter."""
        return 1.0 if self.sends_all else max(self.wanted(name), self.planned.get(name, 0.0))

    def wanted(self, name: str) -> float:
        """Return the least density that a plan may send: the user's, a warm-up's, or a rule's."""
        asked = self._in_warm_up(self.target(name), self._stage, self._progress)
        return max(asked, min(self.ruled.get(name, 0.0), self.ceiling))

    def count(self, name: str, numel: int) -> int:
        """Return the least number of a parameter's elements that a plan may send."""
        return element_count(numel, self.wanted(name))

    def target(self, name: str) -> float:
        """Return the density that the user asked for, that of a parameter when no warm-up, rule or plan raises it."""
        return self._compressor.density_of(name, self._target)

    def expect_steps(self, total_steps: Optional[int]) -> None:
        """Have a default warm-up go by a training's length, if that is known and a checkpoint has not told of it.

        A search for a learning rate has told of its own length before.
        """
        if self._is_bounded and not self._is_told:
            self._total_steps = total_steps

    def count_step(self, optimizer: int, epoch: int) -> None:
        """Count a step of an optimizer, in an epoch."""
        self._steps[optimizer] += 1
        self.epoch = epoch

    @property
    def warm_up_steps(self) -> Optional[int]:
        """Optimizer steps after which a default warm-up is over; ``None`` where it goes by epochs alone."""
        return None if self._total_steps is None else -(-self._total_steps // WARM_UP_PART)

    def state_dict(self) -> dict[str, Any]:
        """Return how far a default warm-up has come; empty for a warm-up that goes by epochs."""
        return {"steps": dict(self._steps), "total_steps": self._total_steps} if self._is_bounded else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a default warm-up."""
        if self._is_bounded:
            self._steps = Counter(state["steps"])
            self._is_told = bool(state["total_steps"])
            self._total_steps = state["total_steps"] or self._total_steps


def _raised(epochs: int, target: float, stage: int, progress: float) -> float:
    """Return a density in warm-ups: it falls geometrically by stages, as in Deep Gradient Compression's code."""
    least = falling_density(target, progress)
    return least if stage >= epochs else max(least, same_everywhere(target ** ((stage + 1) / (epochs + 1))))


def falling_density(target: float, progress: float) -> float:
    """Return the density, from 1 in geometric stairs to its target, where so much of the fall lies behind.

    >>> [round(falling_density(0.01, progress), 3) for progress in (0.0, 0.5, 0.99, 1.0)]
    [1.0, 0.112, 0.012, 0.01]
    """
    if progress >= 1 or target >= 1:
        return target
    stairs = max(1, math.ceil(math.log(1 / target) / math.log(_STAIR)))
    return same_everywhere(target ** (int(progress * stairs) / stairs))


_ROUNDS = 2  # in which plans take turns, so that whatever else the machine does hits all alike
_STEPS = 3  # of a turn


class StepSample(NamedTuple):
    """Sizes and times of one step; sizes are equal on all ranks, times are not."""

    ready: tuple[float, ...]  # seconds from the start of backward to each gradient, in the order of readiness
    buckets: tuple[BucketSample, ...]  # in the order of exchange
    exposed_seconds: float  # from the last gradient until all means had been written
    total_seconds: float  # from the start of backward until then


Samples = dict[Stops, list[StepSample]]
Course = Generator[None, StepRecord, None]


class Planner:
    """Follow no plan: what stands in a planner's place where the schedule needs none."""

    plan: Optional[Plan] = None

    def see_exchange(self, record: StepRecord) -> None:
        """Look at an exchange that has ended; on every rank, between two steps."""


class StepPlanner(Planner):
    """Time plans of the first steps and follow the fastest; anew where gradients come in another order.

    With ``adaptive_density`` the plan sends more than asked for of buckets whose exchange hides behind backward.
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
        self._holds_plan = holds_plan  # whether all exchanges follow backward now
        self._log = log if communicator.rank == 0 else lambda line: None
        self._order: tuple[str, ...] = ()
        self._course: Course  # once an order is known
        schedule.reset()

    @override
    def see_exchange(self, record: StepRecord) -> None:
        order = tuple(record.ready)
        if not order or not record.is_typical:
            return  # nothing was merged, or no step to come is like this one
        if order == self._order:
            self._course.send(record)
        else:
            self._order, self._course = order, self._run()
            next(self._course)

    def _run(self) -> Course:
        """Live through the steps of one graph: each ``yield`` is a step."""
        elements = [self._numels[name] for name in self._order]
        seen = yield from self._time([(len(elements),)] if self._holds_plan() else equal_plans(elements))
        costs, ready = _learned(seen)
        if costs is not None:
            contest = yield from self._time([self._optimum(elements, costs, ready), _fastest(seen)])
            # With what was seen before, or what was lucky then could lose now to none but that it is compared with.
            seen |= {stops: [*seen.get(stops, ()), *steps] for stops, steps in contest.items()}
        best = _fastest(seen)
        densities = self._hidden_densities(best, costs, ready) if self._adapts_density and costs is not None else ()
        self._adopt(best, densities, seen)
        while True:
            yield

    def _time(self, plans: Sequence[Stops]) -> Generator[None, StepRecord, Samples]:
        """Time steps under some plans; one more comes before each turn, in which buffers take their new sizes."""
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
        """Return the plan that ends a step first by the costs seen, as OMGS-SGD asks."""
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


def _learned(seen: Samples) -> tuple[Optional[BucketCosts], list[float]]:
    """Return what buckets take, and when gradients are ready: the same on all ranks, as the times are."""
    samples = list(chain.from_iterable(seen.values()))
    ready = accumulate((median(times) for times in zip(*(sample.ready for sample in samples))), max, initial=0.0)
    return costs_of([bucket for sample in samples for bucket in sample.buckets]), list(ready)[1:]


def averaged(communicator: Communicator, steps: Sequence[StepRecord], holds_plan: bool) -> list[StepSample]:
    """Average the times of steps over ranks."""
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
    """Read when each gradient was ready, unless nobody watched it, and the other times of a sample."""
    assert record.end is not None
    watched = [mark for mark in record.ready.values() if mark is not None]
    # Whoever drives the engine without a Trainer need not say when backward begins.
    first = watched[0] if watched else record.backward_end
    start = first if record.backward_start is None else record.backward_start
    backward_seconds = Clock.seconds(start, record.backward_end)
    ready = [backward_seconds if holds_plan else Clock.seconds(start, mark) for mark in watched]
    buckets = [each.seconds(*stages) for each in record.buckets for stages in (("select", "encode"), ("exchange",))]
    return ready, [*buckets, record.exposed_seconds, Clock.seconds(start, record.end)]
