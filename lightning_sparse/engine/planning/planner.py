"""Time steps under several groupings, agree on the times with all ranks, and follow the best.

Nothing is added to a step but marks. They are read, and numbers travel, at a step's border: after each round of
trials, and now and then later, to see whether the plan still does what it did. All ranks follow rank 0's plan.
"""

import math
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import accumulate, chain
from statistics import median
from typing import Any, Optional

from typing_extensions import override

from lightning_sparse.compressors.base import PLAN, Densities
from lightning_sparse.engine.collectives import Collectives
from lightning_sparse.engine.observe.record import Recorder, StepMarks
from lightning_sparse.engine.planning.samples import averaged
from lightning_sparse.schedule import Merged
from lightning_sparse.schedule.cost.model import CostModel
from lightning_sparse.schedule.groupings import best_of, first_groupings, partly_whole_groupings
from lightning_sparse.schedule.hidden_density import hidden_densities
from lightning_sparse.schedule.merge.exact import earliest_stops
from lightning_sparse.schedule.plan import Grouping, Plan
from lightning_sparse.schedule.step_profile import Profile, StepSample, can_profile, dense_cost, profile_of

_ROUNDS = 2  # in which groupings take turns, so that whatever else the machine does hits all alike
_CONTEST_ROUNDS = 4  # the plan and the best of the others are closer to each other
_STEPS = 3  # of a turn
_CHECK_EVERY = 50  # steps
_CHECKED_STEPS = 10
_DEPARTURE = 0.2  # of the exposed time
_NOTICEABLE = 0.02  # of the time of a step; less is not worth a new plan
_FOREIGN_STEPS = 2  # until DDP has rebuilt its buckets, with a static graph too
_NO_DENSITY = -1.0
_MAX_PATIENCE = 32  # times the first interval, where new trials keep confirming the plan

Samples = dict[Grouping, list[StepSample]]
Course = Generator[None, StepMarks, None]
Watch = Generator[None, StepMarks, str]


class Planner:
    """Follow no plan: what stands in a planner's place where the schedule needs none."""

    plan: Optional[Plan] = None

    def see_step(self, marks: StepMarks) -> None:
        """Look at a step that has ended; on every rank, between two steps."""

    def expect_other_order(self) -> None:
        """Expect a new DDP, whose first steps bring gradients in an order that means nothing."""

    def start_anew(self) -> None:
        """Forget what things cost; between two steps, on every rank."""

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Follow a plan of a run before, if it is of the parameters that are trained here; on every rank."""
        return False


class StepPlanner(Planner):
    """Keep a schedule on the best plan known; ``plan`` is ``None`` while nothing is known.

    With ``adapts_density`` a plan may send more than asked for; ``holds_groups`` where all exchanges follow backward.
    """

    def __init__(
        self,
        schedule: Merged,
        collectives: Collectives,
        recorder: Recorder,
        numels: Mapping[str, int],
        densities: Densities,
        adapts_density: bool,
        holds_groups: bool,
        say: Callable[[str], None],
    ) -> None:
        self.plan: Optional[Plan] = None
        self._schedule = schedule
        self._collectives = collectives
        self._recorder = recorder
        self._numels = numels
        self._densities = densities
        self._adapts_density = adapts_density
        self._holds_groups = holds_groups
        self._say = say if collectives.rank == 0 else lambda line: None
        self._order: tuple[str, ...] = ()
        self._foreign_steps = 0
        self._remembered: Optional[Plan] = None
        self._course: Course = self._run()
        schedule.reset()

    @override
    def see_step(self, marks: StepMarks) -> None:
        order = tuple(marks.ready)
        if not order or not marks.is_typical:
            return  # every gradient was sparse_coo, so that nothing is merged; or no step to come is like this one
        if order == self._order:
            self._course.send(marks)
        elif self._foreign_steps:
            self._foreign_steps -= 1
        else:
            self._order = order
            self._begin()

    @override
    def expect_other_order(self) -> None:
        self._foreign_steps = _FOREIGN_STEPS

    @override
    def start_anew(self) -> None:
        self._remembered = None
        self._begin()

    @override
    def restore(self, state: Mapping[str, Any]) -> bool:
        # It is followed once gradients come in its order, and watched as if it had been made here.
        plan = Plan.of(state)
        if sorted(chain.from_iterable(plan.groups)) != sorted(self._numels):
            return False
        self._remembered = plan
        self._begin()
        return True

    def _begin(self) -> None:
        self._course = self._run()
        if self._order:
            next(self._course)

    def _run(self) -> Course:
        """Live through the steps of one graph: each ``yield`` is a step."""
        elements = [self._numels[name] for name in self._order]
        patience, why = 1, "" if self.plan is None else "measured anew: "
        if self._remembered is not None and tuple(chain.from_iterable(self._remembered.groups)) == self._order:
            self._go_on_with(self._remembered)
            why = yield from self._watch(patience)
        while True:
            counts = self._counts()
            seen = yield from self._try(first_groupings(elements), _ROUNDS)
            best = best_of({grouping: _seconds(steps) for grouping, steps in seen.items()})
            samples = list(chain.from_iterable(seen.values()))
            profile = profile_of(elements, counts, samples) if can_profile(samples) else None
            if profile is not None and self._adapts_density:
                profile = profile._replace(dense=(yield from self._cost_of_whole(elements, profile)))
            groupings = [best]
            if profile is not None:
                planned = self._agreed(profile)
                groupings = [planned, Grouping(planned.stops), best]
            contest = yield from self._try(groupings, _CONTEST_ROUNDS)
            # With what was seen before, or what was lucky then could lose now to none but those it is compared with.
            seen |= {grouping: [*seen.get(grouping, ()), *steps] for grouping, steps in contest.items()}
            fastest = best_of({grouping: _seconds(steps) for grouping, steps in seen.items()})
            is_confirmed = self._adopt(fastest, seen, profile, why)
            patience = min(2 * patience, _MAX_PATIENCE) if is_confirmed else 1
            why = yield from self._watch(patience)

    def _go_on_with(self, plan: Plan) -> None:
        """Follow a plan of a run before; if something else was to be sent then, with other groups."""
        self.plan, self._remembered = plan, None
        self._follow(Grouping(tuple(accumulate(map(len, plan.groups))), plan.densities))
        counts = tuple(accumulate(self._counts(), initial=0))
        if plan.profile is not None and plan.profile.counts != counts:
            self._plan_for_density()
        self._say(f"as in the run before, {self.plan}")

    def _try(self, groupings: Sequence[Grouping], rounds: int) -> Generator[None, StepMarks, Samples]:
        """Time steps under some groupings; one more comes before each turn, in which buffers take their new sizes."""
        seen: dict[Grouping, list[StepMarks]] = {grouping: [] for grouping in groupings}
        self._recorder.watches_gradients = True
        for grouping, steps in list(seen.items()) * rounds:
            self._follow(grouping)
            yield
            for _ in range(_STEPS):
                steps.append((yield))
        self._recorder.watches_gradients = False
        marks = list(chain.from_iterable(seen.values()))
        samples = iter(averaged(self._collectives, marks, self._holds_groups))
        return {grouping: [next(samples) for _ in steps] for grouping, steps in seen.items()}

    def _cost_of_whole(
        self, elements: Sequence[int], profile: Profile
    ) -> Generator[None, StepMarks, Optional[CostModel]]:
        seen = yield from self._try(partly_whole_groupings(elements), 1)
        return dense_cost(list(chain.from_iterable(seen.values())), profile.exchange.startup)

    def _agreed(self, profile: Profile) -> Grouping:
        """Return what rank 0 proposes, and finds room for; to the others it would be work for nothing."""
        proposed = self._proposed(profile) if self._collectives.rank == 0 else Grouping(())
        return _agreed(self._collectives, proposed, len(self._order))

    def _proposed(self, profile: Profile) -> Grouping:
        stops = earliest_stops(profile.ready, profile.task_seconds)
        densities = hidden_densities(profile, stops) if profile.dense is not None else []
        densities = [min(density, self._densities.ceiling) for density in densities]
        return Grouping(tuple(stops), tuple(densities))

    def _adopt(self, grouping: Grouping, seen: Samples, profile: Optional[Profile], why: str) -> bool:
        """Follow a plan from now on, and say why there is one; return whether it was followed before."""
        known, steps = self.plan, seen[grouping]
        fastest: dict[int, float] = {}
        for tried, samples in seen.items():
            groups = len(tried.stops)
            fastest[groups] = min(_seconds(samples), fastest.get(groups, math.inf))
        self._remembered = None
        self._follow(grouping)
        self.plan = Plan(
            self._groups(grouping),
            grouping.densities,
            None if profile is None else profile.predict(grouping.stops),
            _seconds(steps),
            median(sample.exposed_seconds for sample in steps),
            tuple(sorted(fastest.items())),
            profile,
        )
        self._say(f"{why}{self.plan}")
        return known is not None and known.groups == self.plan.groups

    def _watch(self, patience: int) -> Watch:
        """Follow the plan until it no longer does what it did; return what it does now."""
        assert self.plan is not None
        while True:
            window = deque[StepMarks](maxlen=_CHECKED_STEPS)
            for _ in range(patience * _CHECK_EVERY):
                window.append((yield))
                if self._densities.have_changed:
                    self._plan_for_density()
            # Callbacks of single ranks may have gradients marked: what all are to know is told without those marks.
            samples = averaged(self._collectives, list(window), self._holds_groups, has_ready=False)
            exposed = median(sample.exposed_seconds for sample in samples)
            change = abs(exposed - self.plan.exposed_seconds)
            if change > max(_DEPARTURE * max(exposed, self.plan.exposed_seconds), _NOTICEABLE * _seconds(samples)):
                before = 1e3 * self.plan.exposed_seconds
                return f"measured anew, as {1e3 * exposed:.1f} ms came after backward, not {before:.1f} as before: "

    def _plan_for_density(self) -> None:
        """Plan for what the density asks for now, with the costs that are known."""
        assert self.plan is not None
        counts = self._counts()
        if self.plan.profile is None:
            return
        profile = self.plan.profile._replace(counts=tuple(accumulate(counts, initial=0)))
        grouping = self._agreed(profile)
        self._follow(grouping)
        self.plan = self.plan._replace(
            groups=self._groups(grouping),
            densities=grouping.densities,
            predicted=profile.predict(grouping.stops),
            profile=profile,
        )

    def _counts(self) -> list[int]:
        self._densities.have_changed = False
        return [self._densities.count(name, self._numels[name]) for name in self._order]

    def _follow(self, grouping: Grouping) -> None:
        self._schedule.follow(self._order[stop - 1] for stop in grouping.stops)
        groups = zip(self._groups(grouping), grouping.densities)
        self._densities.request(PLAN, {name: density for group, density in groups for name in group})

    def _groups(self, grouping: Grouping) -> tuple[tuple[str, ...], ...]:
        return tuple(self._order[start:stop] for start, stop in zip((0, *grouping.stops), grouping.stops))


def _seconds(samples: Sequence[StepSample]) -> float:
    return median(sample.total_seconds for sample in samples)


def _agreed(collectives: Collectives, proposed: Grouping, tensors: int) -> Grouping:
    """Return what rank 0 proposes for so many tensors: another machine's logarithms may round otherwise."""
    room = [0.0] * (tensors - len(proposed.stops))
    densities = proposed.densities or (_NO_DENSITY,) * len(proposed.stops)
    numbers = collectives.gather_numbers([*proposed.stops, *room, *densities, *room])[0].tolist()
    stops = tuple(int(stop) for stop in numbers[:tensors] if stop)
    agreed = tuple(numbers[tensors:][: len(stops)])
    return Grouping(stops, () if _NO_DENSITY in agreed else agreed)
