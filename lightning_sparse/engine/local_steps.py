"""Rounds of local steps: every rank trains by itself for some steps, then what its parameters changed by is exchanged.

The change goes the way of a gradient (any compressor, memory and wire), and its mean over ranks is the gradient of an
outer step, which moves the shared model. With everything sent this is local SGD (Stich, arXiv 1805.09767), with an
outer Nesterov momentum DiLoCo (Douillard et al., arXiv 2311.08105), overlapping with training as in Streaming DiLoCo
(arXiv 2501.18512), and with top-k and error feedback SparseLoCo (Sarfi et al., arXiv 2508.15706).

Where ours differs: an exchange that overlaps with steps is applied as a correction, which keeps what those steps have
learned, where Streaming DiLoCo mixes them with the shared model; and the mean is over all ranks, as in SparseLoCo's
formula, where its released code divides by the number of ranks that sent an element.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from operator import or_
from typing import Any, Optional, Union

import torch
from typing_extensions import override

from lightning_sparse.engine.meeting import MEETING_POINTS, Meeting, RankStatus
from lightning_sparse.engine.observe import Clock, Mark
from lightning_sparse.engine.replicas import Replicas
from lightning_sparse.engine.settings import LocalSteps
from lightning_sparse.engine.shared_model import Change, SharedModel
from lightning_sparse.engine.step.step import StepContext
from lightning_sparse.engine.step.worker import ExchangeWorker

COMMUNICATION_SHARE = 0.05  # of the time, that rounds of a length of their own choice are to take for exchanges
_FIRST_STEPS = 8  # of a round, until times are known
_TIMED_ROUNDS = 3
_MOST_STEPS = 500  # DiLoCo's; longer rounds have not been shown to train as well


def fitting_steps(step_seconds: float, exchange_seconds: float) -> int:
    """Return how many local steps keep exchanges at 5 % of the time, 500 at most.

    >>> fitting_steps(step_seconds=0.1, exchange_seconds=0.2)
    40
    """
    return min(_MOST_STEPS, max(1, math.ceil(exchange_seconds / (COMMUNICATION_SHARE * step_seconds))))


class RoundLength:
    """How many steps a round has: as many as the user asks for, or chosen when some rounds have been timed."""

    def __init__(
        self,
        every: Union[int, str],
        device: torch.device,
        log: Callable[[str], None],
        expose: Callable[[Mark, Mark], None],
    ) -> None:
        self._every = every
        self._clock = Clock(device)
        self._log = log
        self._expose = expose
        self.begin()

    def begin(self, chosen: Optional[int] = None) -> None:
        """Know no times so far, and the length that the user asks for, or that was ``chosen`` earlier."""
        known = self._every if isinstance(self._every, int) else chosen
        self.steps = _FIRST_STEPS if known is None else known
        # Steps, when the exchange before them was applied, and when the wait for theirs began and ended; until chosen.
        self.times: Optional[list[tuple[int, Mark, Mark, Mark]]] = [] if known is None else None
        self._applied_at = self._clock.mark()

    @contextmanager
    def waiting(self, steps: int) -> Iterator[None]:
        """Take the time of a wait for an exchange, and of so many steps before it."""
        start = self._clock.mark()
        yield
        end = self._clock.mark()
        if self.times is not None:
            self.times.append((steps, self._applied_at, start, end))
        self._applied_at = end
        self._expose(start, end)

    def choose(self, mean: Callable[[Sequence[float]], Sequence[float]]) -> bool:
        """Choose once enough rounds have been timed, by the ``mean`` of seconds over ranks; return whether it has."""
        if self.times is None or len(self.times) <= _TIMED_ROUNDS:
            return False
        rounds = self.times[1:]  # the first exchange makes connections
        seconds = sum(Clock.seconds(applied, start) for _, applied, start, _ in rounds)
        waited = sum(Clock.seconds(start, end) for _, _, start, end in rounds)
        step, exchange = mean((seconds / sum(steps for steps, *_ in rounds), waited / len(rounds)))
        self.times, self.steps = None, fitting_steps(step, exchange)
        self._log(
            f"a step takes {1e3 * step:.1f} ms and an exchange {1e3 * exchange:.1f} ms: rounds of {self.steps} local"
            f" steps, so that exchanges take {exchange / (step * self.steps):.1%} of the time."
        )
        return True


class Rounds(Replicas):
    """Count steps, begin an exchange where a round ends, and apply it when it is due.

    ``begin`` is called for each exchange that begins, and what it returns on the worker before that exchange.
    ``expose`` is told of each wait for one.
    """

    are_apart = True

    def __init__(
        self,
        local: LocalSteps,
        shared: SharedModel,
        meeting: Meeting,
        worker: ExchangeWorker,
        begin: Callable[[], Callable[[], StepContext]] = lambda: StepContext,
        log: Callable[[str], None] = lambda line: None,
        expose: Callable[[Mark, Mark], None] = lambda start, end: None,
    ) -> None:
        self.local = local
        self.shared = shared
        self.meeting = meeting
        self._worker = worker
        self._begin = begin
        self._length = RoundLength(local.every, shared.device, log, expose)
        self._origin = 0  # step at which a round of this length began after one that was ended early
        self._begun = 0  # step at which the last exchange did
        self._step = 0
        self._steps_of: dict[int, int] = {}
        self.has_begun = self._has_steps = False
        self._is_stale = False  # whether a step has been made since the last exchange began
        self.is_shared = True  # this rank's model is that of all: before rounds begin, and where one was ended early
        self._is_resumed = False
        self._pending: Optional[Change] = None

    @property
    def steps_since_ended(self) -> int:
        """Steps since rounds began, or since one was ended early."""
        return self._step - self._origin

    @property
    def synchronous_left(self) -> int:
        """Steps of DDP that are still to be made before rounds begin."""
        left = self.local.synchronous_steps - max(self._steps_of.values(), default=0)
        return 0 if self.has_begun else max(0, left)

    @property
    def is_synchronous(self) -> bool:
        """Whether the next step is DDP's, as rounds have not begun, and are not to begin yet."""
        return self.synchronous_left > 0

    @override
    def track(self, names: Sequence[str]) -> None:
        is_known = self.shared.trained == frozenset(names) and not self.shared.has_new()
        if not (self._is_resumed and is_known):  # the round that was resumed has these
            self.synchronize()
            self.shared.track(names)
            self._begun, self._is_stale = self._step, False

    @override
    def begin_round(self) -> None:
        if self.has_begun:
            return
        self.has_begun, self._has_steps, self._steps_of = True, False, {}
        self.meeting.begin_exchange()
        self.meeting.begin_epoch(self._step)
        self.adopt()

    def begin_steps(self) -> None:
        """Begin the first local step, with what the first forward has written, as where layers start from their data.

        All ranks must call, before an update of theirs.
        """
        self.begin_round()
        if not self._has_steps:
            self._has_steps = True
            self.shared.adopt(all_of_it=False)

    def leave(self) -> None:
        """Leave the round in progress, and what it has changed, for a state and a model that are loaded; all call."""
        self._worker.drain()
        self.shared.take_back(own=False)
        self.has_begun, self._pending, self.is_shared = False, None, True

    @override
    def adopt(self) -> None:
        """Share the model that there is now, averaged over ranks; all must call, and the round so far is part of it."""
        self.shared.adopt()
        self._pending, self._is_stale, self.is_shared = None, False, True

    @override
    def count_step(self, optimizer: int) -> None:
        """Count a step of an optimizer; apply the exchange that is due, and begin one at the end of a round.

        A round counts those of the optimizer with the most, skipped or not.
        """
        self._steps_of[optimizer] = self._steps_of.get(optimizer, 0) + 1
        self._is_resumed = False
        if not self.has_begun:
            return
        self._is_stale, self.is_shared = True, False
        if self._steps_of[optimizer] <= self._step:
            return
        steps = self.meeting.count_step(self._step)
        self._skip_steps(steps - 1)
        for _ in range(steps):
            self._step += 1
            self._apply_until(self._step)
            if self.steps_since_ended % self._length.steps == 0:
                self.shared.check_followed()
                self._submit(self.local.overlap_steps)

    def _skip_steps(self, steps: int) -> None:
        """Count steps of other ranks, for which this one has no batch, as if it had made them."""
        if steps:
            self._steps_of = {number: self._steps_of.get(number, 0) + steps for number in self._steps_of or (0,)}

    @override
    def synchronize(self) -> None:
        """End the round early, and go on from the shared model; all ranks must call."""
        if not self.has_begun:
            return
        self.shared.take_back()  # inside of shared_model() there is no change of this rank's to be seen
        self.begin_steps()
        has_moved = self._has_moved()
        self._apply_until(math.inf)
        status = self.meeting.status(self._step, self.shared.resting(), has_moved)
        everywhere = self._worker.run(partial(self.meeting.tell, status))
        if any(told.is_stale for told in everywhere):
            self._submit(0, everywhere)
        self.shared.unify_rest()
        self._origin, self.is_shared = self._step, True

    def _has_moved(self) -> bool:
        """Tell whether this rank's model is not the shared one; a late exchange leaves it apart by what it rounds."""
        return self._is_stale or self._pending is not None or self.shared.has_moved()

    @override
    def meet(self, place: str) -> bool:
        if not self.has_begun and (self._steps_of or self.is_synchronous):
            return True
        self.begin_steps()  # a rank may have had no batch yet
        own = MEETING_POINTS.index(place)
        while True:
            if self._pending is not None:
                self._hear(self._pending)
            self.meeting.answer()
            # What is late on a rank that trains has been applied by those that wait: all have to end that round.
            status = self.meeting.status(self._step, self.shared.resting(), self._has_moved(), own)
            everywhere = self._worker.run(partial(self.meeting.tell, status))
            self._make_up(int(max(told.step for told in everywhere)) - self._step)
            first, last = (choose(told.place for told in everywhere) for choose in (min, max))
            if not first:
                self._submit(0, everywhere)
            elif own < last:
                return False
            elif first == last:
                self.meeting.end(everywhere)
                if place == MEETING_POINTS[-1]:
                    self.meeting.begin_epoch(self._step)
                return True

    def _make_up(self, missed: int) -> None:
        """Count steps that others have made since this rank has had no batch."""
        self.meeting.missed_steps += missed
        self._step += missed
        self._skip_steps(missed)
        if self._pending is not None:
            self._pending.due += missed

    def _submit(self, overlap: int, everywhere: Optional[Sequence[RankStatus]] = None) -> None:
        """Begin an exchange, to be applied now or some steps later; ranks may have told ``everywhere`` before it."""
        self._apply_until(math.inf)  # the last one, where a training with other rounds is resumed, or ranks have met
        status = self.meeting.status(self._step, resting := self.shared.resting())
        change = self._pending = self.shared.change(is_late=overlap > 0)
        change.resting = resting
        change.steps, change.due = self._step - self._begun, self._step + overlap
        self._begun, self._is_stale = self._step, False
        prepare = self._begin()  # here, and not when the worker gets to it: what ranks have asked for is the same
        self.meeting.begin_exchange()

        def exchange() -> None:
            told = self.meeting.tell(status) if everywhere is None else everywhere
            change.flags = reduce(or_, (int(each.flags) for each in told))
            if len({each.resting for each in told}) > 1:  # what rests here has moved elsewhere
                change.resting = frozenset()
            self.shared.exchange(change, self.meeting.weight(told), prepare)

        self._worker.submit(exchange, change.done)
        self._apply_until(self._step)

    def _apply_until(self, step: float) -> None:
        """Apply the exchange that is due after a step; choose how long rounds are once enough have been timed."""
        change = self._pending
        if change is None or change.due > step:
            return
        self._pending = None
        with self._length.waiting(change.steps):
            self._hear(change)
        self.shared.apply(change)
        if self._length.choose(lambda times: self._worker.run(lambda: self.meeting.collectives.mean_of_numbers(times))):
            self._origin = self._step

    def _hear(self, change: Change) -> None:
        """Wait for an exchange, and hear what it has brought."""
        self._worker.wait(change.done)
        self.meeting.heard |= change.flags
        change.flags = 0

    @override
    @contextmanager
    def shared_model(self) -> Iterator[None]:
        if not self.has_begun:
            yield
            return
        self._worker.drain()  # an exchange that is on its way ends first: the same model on all ranks
        with self.shared.shown():
            yield

    @override
    def in_stats(self, stats: dict[str, float], steps: int) -> dict[str, float]:
        return {**stats, "local_steps": float(steps)}

    @override
    def state_dict(self, together: bool = False) -> dict[str, Any]:
        # No exchange may be in progress. A save does not end a round: a small GPT whose rounds were cut in three by
        # saves ended 1.6 to 4.5 % above, with DiLoCo's outer momentum (300 steps, three seeds).
        late = self._pending
        pending = None if late is None else {name: getattr(late, name) for name in ("names", "due", "corrections")}
        rounds = {
            "has_begun": self.has_begun,
            "has_steps": self._has_steps,
            "step": self._step,
            "every": self._length.steps if self._length.times is None else None,
            "origin": self._origin,
            "steps_of": dict(self._steps_of),
            "begun": self._begun,
            "is_stale": self._is_stale,
            "pending": pending,
        }
        return {"rounds": {**rounds, **self.meeting.state(), **self.shared.state(self.has_begun, together)}}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where another round stood, with the shared model that the model's tensors hold now."""
        if "rounds" not in state:
            return
        state = state["rounds"]
        self.shared.load(state)
        self.has_begun = self._is_resumed = state["has_begun"]
        self._has_steps = state["has_steps"]
        self._step, self._origin, self._begun = (int(state[step]) for step in ("step", "origin", "begun"))
        self._steps_of, self._is_stale = dict(state["steps_of"]), bool(state["is_stale"])
        self._length.begin(None if state["every"] is None else int(state["every"]))
        self.meeting.load(state)
        saved, self._pending = state["pending"], None
        if saved is not None:
            corrections = [each.to(self.shared.device) for each in saved["corrections"]]
            self._pending = Change(saved["names"], [], corrections, saved["due"])
            self._pending.done.set()
        self.is_shared = not (self.has_begun and (self._is_stale or self.steps_since_ended or self._pending))
