"""The planner at work: time steps under several groupings, agree on the times with all ranks, and follow the best plan.

Nothing is added to a step but marks in time. They are read, and numbers travel, at a step's border: after each round of
trials, and now and then later, to see whether the plan still does what it did. What rank 0 plans, all ranks follow.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import accumulate
from statistics import median
from typing import NamedTuple, Optional

from lightning_sparse.collectives import Collectives
from lightning_sparse.observe import Clock, Recorder, StepMarks
from lightning_sparse.schedule import ClosingAfter, Merged
from lightning_sparse.schedule.profile import GroupSample, Profile, StepSample, can_profile, equal_parts, profile_of
from lightning_sparse.schedule.simulator import Prediction

_PARTS = (1, 2, 4, 8, 16)  # groups of the groupings that are tried before anything is known
_ROUNDS = 2  # in which groupings take turns, so that whatever else the machine does hits all alike
_CONTEST_ROUNDS = 4  # the plan and the best of the others are closer to each other
_STEPS = 3  # of a turn
_CHECK_EVERY = 50  # steps
_CHECKED_STEPS = 10
_DEPARTURE = 0.2  # of the exposed time
_NOTICEABLE = 0.02  # of the time of a step; less is not worth a new plan
_MAX_PATIENCE = 32  # times the first interval, where new trials keep confirming the plan

Stops = tuple[int, ...]
Samples = dict[Stops, list[StepSample]]


class Plan(NamedTuple):
    """What is followed, and what it is expected to take.

    Attributes:
        groups: names of the parameters of each group.
        predicted: a step under it; ``None`` where sizes were too alike to fit costs to them.
        seconds: from the start of backward until all gradients could be used, as measured when the plan was adopted.
        exposed_seconds: of these, after the end of backward.
        tried: number of groups and seconds of each grouping that was timed.
        profile: what the prediction stands on.
    """

    groups: tuple[tuple[str, ...], ...]
    predicted: Optional[Prediction]
    seconds: float
    exposed_seconds: float
    tried: tuple[tuple[int, float], ...]
    profile: Optional[Profile]

    def __str__(self) -> str:
        expected = "" if self.predicted is None else f" (predicted {1e3 * self.predicted.total:.1f})"
        tried = ", ".join(f"{groups}: {1e3 * seconds:.1f}" for groups, seconds in self.tried)
        return (
            f"gradients travel in {len(self.groups)} groups; backward and exchange take {1e3 * self.seconds:.1f} ms"
            f"{expected}, {1e3 * self.exposed_seconds:.1f} ms of it after backward. Tried, by number of groups: {tried}"
        )


class StepPlanner:
    """Keep a schedule on the best plan known.

    Args:
        schedule: follows the plan.
        collectives: how ranks agree.
        recorder: told when gradients are to be watched.
        numels: elements by parameter name.
        count_of: how many elements the density asks for now, of a parameter with a name.
        holds_groups: whether no group is exchanged before backward has ended.
        say: called on rank 0 with a line for the user.

    Attributes:
        plan: what is followed; ``None`` while nothing is known.
        density_has_changed: to be set when ``count_of`` answers differently from before.
    """

    def __init__(
        self,
        schedule: Merged,
        collectives: Collectives,
        recorder: Recorder,
        numels: Mapping[str, int],
        count_of: Callable[[str], int],
        holds_groups: bool,
        say: Callable[[str], None],
    ) -> None:
        self.plan: Optional[Plan] = None
        self.density_has_changed = False
        self._schedule = schedule
        self._collectives = collectives
        self._recorder = recorder
        self._numels = numels
        self._count_of = count_of
        self._holds_groups = holds_groups
        self._say = say if collectives.rank == 0 else _say_nothing
        self._order: tuple[str, ...] = ()
        self._course: Generator[None, StepMarks, None] = self._run()
        schedule.reset()

    def end_step(self, marks: StepMarks) -> None:
        """Look at a step that has ended; on every rank, between two steps."""
        order = tuple(marks.ready)
        if not order:
            return  # every gradient was sparse_coo: nothing is merged
        if order == self._order:
            self._course.send(marks)
        else:
            self._order = order
            self._course = self._run()
            next(self._course)

    def _run(self) -> Generator[None, StepMarks, None]:
        """Live through the steps of one graph: each ``yield`` is a step."""
        elements = [self._numels[name] for name in self._order]
        patience = 1
        while True:
            counts = self._counts()
            seen = yield from self._try([equal_parts(elements, parts) for parts in _PARTS], _ROUNDS)
            samples = [sample for steps in seen.values() for sample in steps]
            profile = profile_of(elements, counts, samples) if can_profile(samples) else None
            best = min(seen, key=lambda stops: _seconds(seen[stops]))
            planned = best if profile is None else self._agreed(self._schedule.propose(profile))
            seen |= yield from self._try([planned, best], _CONTEST_ROUNDS)
            if self._schedule.keeps_fastest:
                planned = min((planned, best), key=lambda stops: _seconds(seen[stops]))
            is_confirmed = self._adopt(planned, seen, profile)
            patience = min(2 * patience, _MAX_PATIENCE) if is_confirmed else 1
            yield from self._watch(patience)

    def _try(self, groupings: Sequence[Sequence[int]], rounds: int) -> Generator[None, StepMarks, Samples]:
        """Time steps under some groupings; one more comes before each turn, in which buffers take their new sizes."""
        seen: dict[Stops, list[StepMarks]] = {tuple(stops): [] for stops in groupings}
        self._recorder.watches_gradients = True
        for stops, steps in list(seen.items()) * rounds:
            self._follow(stops)
            yield
            for _ in range(_STEPS):
                steps.append((yield))
        self._recorder.watches_gradients = False
        averaged = iter(self._averaged([marks for steps in seen.values() for marks in steps]))
        return {stops: [next(averaged) for _ in steps] for stops, steps in seen.items()}

    def _adopt(self, stops: Stops, seen: Samples, profile: Optional[Profile]) -> bool:
        """Follow a plan from now on; return whether it is the one that was followed before."""
        known, steps = self.plan, seen[stops]
        self._follow(stops)
        self.plan = Plan(
            self._groups(stops),
            None if profile is None else profile.predict(stops),
            _seconds(steps),
            median(sample.exposed_seconds for sample in steps),
            tuple(sorted((len(stops), _seconds(samples)) for stops, samples in seen.items())),
            profile,
        )
        self._say(str(self.plan))
        return known is not None and known.groups == self.plan.groups

    def _watch(self, patience: int) -> Generator[None, StepMarks, None]:
        """Follow the plan until it no longer does what it did."""
        assert self.plan is not None
        while True:
            window: list[StepMarks] = []
            for _ in range(patience * _CHECK_EVERY):
                marks = yield
                window = [*window[1 - _CHECKED_STEPS :], marks]
                if self.density_has_changed:
                    self._plan_for_density()
            samples = self._averaged(window)
            exposed = median(sample.exposed_seconds for sample in samples)
            change = abs(exposed - self.plan.exposed_seconds)
            if change > max(_DEPARTURE * max(exposed, self.plan.exposed_seconds), _NOTICEABLE * _seconds(samples)):
                return

    def _plan_for_density(self) -> None:
        """Plan for what the density asks for now, with the costs that are known."""
        assert self.plan is not None
        counts = self._counts()
        profile = self.plan.profile
        if profile is None:
            return
        profile = profile._replace(counts=tuple(accumulate(counts, initial=0)))
        stops = self._agreed(self._schedule.propose(profile))
        self._follow(stops)
        predicted = profile.predict(stops)
        self.plan = self.plan._replace(groups=self._groups(stops), predicted=predicted, profile=profile)

    def _counts(self) -> list[int]:
        self.density_has_changed = False
        return [self._count_of(name) for name in self._order]

    def _follow(self, stops: Stops) -> None:
        self._schedule.follow(ClosingAfter(self._order[stop - 1] for stop in stops))

    def _groups(self, stops: Stops) -> tuple[tuple[str, ...], ...]:
        return tuple(self._order[start:stop] for start, stop in zip((0, *stops), stops))

    def _agreed(self, stops: Sequence[int]) -> Stops:
        """Return what rank 0 proposes: another machine's logarithms may round otherwise."""
        padded = [*stops, *[0] * (len(self._order) - len(stops))]
        return tuple(int(stop) for stop in self._collectives.gather_numbers(padded)[0] if stop)

    def _averaged(self, steps: Sequence[StepMarks]) -> list[StepSample]:
        """Average the times of steps over ranks, which costs one exchange and a look at the device's clock."""
        samples = [_sample(marks, self._holds_groups) for marks in steps]
        rows = self._collectives.gather_numbers([seconds for sample in samples for seconds in sample.times()])
        times = (sum(column) / len(column) for column in zip(*rows))
        return [sample.with_times(times) for sample in samples]


def _seconds(samples: Sequence[StepSample]) -> float:
    return median(sample.total_seconds for sample in samples)


def _sample(marks: StepMarks, holds_groups: bool) -> StepSample:
    assert marks.end is not None
    first = next(iter(marks.ready.values()))
    start = first if marks.backward_start is None else marks.backward_start
    backward_seconds = Clock.seconds(start, marks.backward_end)
    watched = [mark for mark in marks.ready.values() if mark is not None]
    ready = [backward_seconds if holds_groups else Clock.seconds(start, mark) for mark in watched]
    last_exchange = marks.groups[-1].spans[-1].end
    groups = [
        GroupSample(
            group.elements,
            group.counts + group.dense_elements,
            group.seconds("select", "encode"),
            group.seconds("exchange"),
        )
        for group in marks.groups
    ]
    return StepSample(
        tuple(ready),
        tuple(groups),
        Clock.seconds(last_exchange, marks.end),
        marks.exposed_seconds,
        Clock.seconds(start, marks.end),
    )


def _say_nothing(line: str) -> None:
    return
