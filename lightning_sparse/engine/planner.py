"""Time steps under several groupings, by their records, agree on the times with all ranks, and follow the best."""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import accumulate, chain, islice, pairwise
from statistics import median
from typing import NamedTuple, Optional

from typing_extensions import override

from lightning_sparse.engine.communicator import Communicator
from lightning_sparse.engine.densities import Densities
from lightning_sparse.engine.observe import Clock, Recorder, StepRecord
from lightning_sparse.schedule import Merged, plan_groups
from lightning_sparse.schedule.costs import GroupCosts, GroupSample, GroupShape, costs_of, hidden_densities
from lightning_sparse.schedule.plan import Plan, Stops, best_of, equal_groupings

_ROUNDS = 2  # in which groupings take turns, so that whatever else the machine does hits all alike
_STEPS = 3  # of a turn


class StepSample(NamedTuple):
    """Sizes and times of one step; sizes are equal on all ranks, times are not."""

    ready: tuple[float, ...]  # seconds from the start of backward to each gradient, in the order of readiness
    groups: tuple[GroupSample, ...]  # in the order of exchange
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
    """Time groupings of the first steps and follow the fastest; anew where gradients come in another order.

    With ``adapts_density`` the plan sends more than asked for of groups whose exchange hides behind backward.
    """

    def __init__(
        self,
        schedule: Merged,
        communicator: Communicator,
        recorder: Recorder,
        numels: Mapping[str, int],
        densities: Densities,
        adapts_density: bool,
        holds_groups: Callable[[], bool],
        log: Callable[[str], None],
    ) -> None:
        self._schedule = schedule
        self._communicator = communicator
        self._recorder = recorder
        self._numels = numels
        self._densities = densities
        self._adapts_density = adapts_density
        self._holds_groups = holds_groups  # whether all exchanges follow backward now
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
        seen = yield from self._time([(len(elements),)] if self._holds_groups() else equal_groupings(elements))
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

    def _time(self, groupings: Sequence[Stops]) -> Generator[None, StepRecord, Samples]:
        """Time steps under some groupings; one more comes before each turn, in which buffers take their new sizes."""
        seen: dict[Stops, list[StepRecord]] = {stops: [] for stops in groupings}
        self._recorder.watches_gradients = True
        for stops, steps in list(seen.items()) * _ROUNDS:
            self._group_as(stops)
            yield
            for _ in range(_STEPS):
                steps.append((yield))
        self._recorder.watches_gradients = False
        records = list(chain.from_iterable(seen.values()))
        samples = iter(averaged(self._communicator, records, self._holds_groups()))
        return {stops: [next(samples) for _ in steps] for stops, steps in seen.items()}

    def _optimum(self, elements: Sequence[int], costs: GroupCosts, ready: Sequence[float]) -> Stops:
        """Return the grouping that ends a step first by the costs seen, as OMGS-SGD asks."""
        sent = sum(self._densities.count(name, self._numels[name]) for name in self._order) / sum(elements)
        backward = [later - earlier for earlier, later in pairwise([0.0, *ready])]
        groups = plan_groups(elements, backward, costs.select.__call__, lambda numel: costs.exchange(sent * numel))
        return tuple(accumulate(map(len, groups)))

    def _hidden_densities(self, stops: Stops, costs: GroupCosts, ready: Sequence[float]) -> tuple[float, ...]:
        shapes = [
            GroupShape(
                sum(self._numels[name] for name in group),
                sum(self._densities.count(name, self._numels[name]) for name in group),
                ready[stop - 1],
            )
            for group, stop in zip(self._groups(stops), stops)
        ]
        return tuple(min(density, self._densities.ceiling) for density in hidden_densities(costs, shapes))

    def _adopt(self, stops: Stops, densities: tuple[float, ...], seen: Samples) -> None:
        steps, fastest = seen[stops], dict[int, float]()
        for tried, samples in seen.items():
            fastest[len(tried)] = min(_seconds(samples), fastest.get(len(tried), math.inf))
        self._group_as(stops, densities)
        exposed = median(sample.exposed_seconds for sample in steps)
        self.plan = Plan(self._groups(stops), densities, _seconds(steps), exposed, tuple(sorted(fastest.items())))
        self._log(str(self.plan))

    def _group_as(self, stops: Stops, densities: Sequence[float] = ()) -> None:
        self._schedule.end_groups_at(self._order[stop - 1] for stop in stops)
        groups = zip(self._groups(stops), densities)
        self._densities.planned = {name: density for group, density in groups for name in group}

    def _groups(self, stops: Stops) -> tuple[tuple[str, ...], ...]:
        return tuple(self._order[start:stop] for start, stop in pairwise((0, *stops)))


def _seconds(samples: Sequence[StepSample]) -> float:
    return median(sample.total_seconds for sample in samples)


def _fastest(seen: Samples) -> Stops:
    return best_of({stops: _seconds(steps) for stops, steps in seen.items()})


def _learned(seen: Samples) -> tuple[Optional[GroupCosts], list[float]]:
    """Return what groups take, and when gradients are ready: the same on all ranks, as the times are."""
    samples = list(chain.from_iterable(seen.values()))
    ready = accumulate((median(times) for times in zip(*(sample.ready for sample in samples))), max, initial=0.0)
    return costs_of([group for sample in samples for group in sample.groups]), list(ready)[1:]


def averaged(communicator: Communicator, steps: Sequence[StepRecord], holds_groups: bool) -> list[StepSample]:
    """Average the times of steps over ranks."""
    times = [_times_of(record, holds_groups) for record in steps]
    means = iter(communicator.mean_of_numbers([seconds for ready, rest in times for seconds in (*ready, *rest)]))
    return [
        StepSample(
            tuple(islice(means, len(ready))),
            tuple(GroupSample(each.elements, each.counts, next(means), next(means)) for each in record.groups),
            next(means),
            next(means),
        )
        for record, (ready, _) in zip(steps, times)
    ]


def _times_of(record: StepRecord, holds_groups: bool) -> tuple[list[float], list[float]]:
    """Read when each gradient was ready, unless nobody watched it, and the other times of a sample."""
    assert record.end is not None
    watched = [mark for mark in record.ready.values() if mark is not None]
    # Whoever drives the engine without a Trainer need not say when backward begins.
    first = watched[0] if watched else record.backward_end
    start = first if record.backward_start is None else record.backward_start
    backward_seconds = Clock.seconds(start, record.backward_end)
    ready = [backward_seconds if holds_groups else Clock.seconds(start, mark) for mark in watched]
    groups = [each.seconds(*stages) for each in record.groups for stages in (("select", "encode"), ("exchange",))]
    return ready, [*groups, record.exposed_seconds, Clock.seconds(start, record.end)]
