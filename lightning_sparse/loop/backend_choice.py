"""Is it worth it? Real steps of the engine against real steps of plain DDP, and the faster of the two.

Everything is decided between two steps, from times that all ranks have agreed on. Only while the two are compared are
ranks asked after every step, and a device waited for. Where the two are not to be told apart, or compression is not
worth what it delays, it is DDP.
"""

import math
from collections.abc import Callable, Generator, Sequence
from statistics import median
from time import perf_counter
from typing import NamedTuple, Optional
from weakref import proxy

import torch

from lightning_sparse.engine import Engine
from lightning_sparse.engine.collectives import SharedOnCopy
from lightning_sparse.schedule import Plan

_LEAST_GAIN = 0.02  # of a step of DDP, which delays no gradient
_GAIN_OF_A_TENTH = 0.05  # more of it for sending a tenth: what is sent late has to be made up for in steps
_SIGMAS = 2.0
_TO_SIGMA = 1.4826  # from a median of deviations, for normal ones
_ERROR_OF_MEDIAN = 1.2533  # over that of a mean, for normal errors

Turn = tuple[Sequence[float], Sequence[float]]  # seconds of steps with compression, and of DDP's


class Comparison(NamedTuple):
    """Steps with compression against steps of DDP, in seconds."""

    ours: float
    theirs: float
    gain: float  # median over turns of the time that compression saves
    error: float  # of the gain, at two sigmas
    wanted: float  # gain that is worth the delay of gradients

    @property
    def is_clear(self) -> bool:
        """Whether the error decides nothing."""
        return abs(self.gain - self.wanted) > self.error

    @property
    def pays(self) -> bool:
        """Whether compression is worth it, beyond the error."""
        return self.gain - self.wanted > self.error

    def __str__(self) -> str:
        return (
            f"a step takes {1e3 * self.theirs:.1f} ms with DDP and {1e3 * self.ours:.1f} ms with compression"
            f" (the difference may be wrong by {1e3 * self.error:.1f} ms)"
        )


def wanted_gain(density: float) -> float:
    """Return the part of a step of DDP that compression has to save: 2 %, and 5 % for each tenth of the density."""
    return _LEAST_GAIN + _GAIN_OF_A_TENTH * math.log10(1 / min(1.0, max(density, 1e-9)))


def compare(turns: Sequence[Turn], density: float) -> Comparison:
    """Compare steps timed in turns, so that what else the machine does hits both; medians forgive one turn in three."""
    ours, theirs = ([median(steps) for steps in side] for side in zip(*turns))
    gains = [their - our for our, their in zip(ours, theirs)]
    errors = ((_ERROR_OF_MEDIAN * spread(steps) / math.sqrt(len(steps)) for steps in turn) for turn in turns)
    inside = median(math.hypot(*turn) for turn in errors)
    error = _SIGMAS * max(spread(gains), inside) / math.sqrt(len(turns))
    theirs_seconds = median(theirs)
    return Comparison(median(ours), theirs_seconds, median(gains), error, wanted_gain(density) * theirs_seconds)


def spread(values: Sequence[float]) -> float:
    """Return one sigma of values that are normal but for a few that were disturbed."""
    centre = median(values)
    return _TO_SIGMA * median(abs(value - centre) for value in values)


_SETTLING_STEPS = 2  # after a change
_TIMED_STEPS = 6
_TURNS = 2  # of each, so that whatever else the machine does hits both alike,
_MOST_TURNS = 6  # and more while they do not tell which is better
_HOPELESS = 2.0  # times as slow as the engine: one step of a turn is enough to see it
_WINDOW = 20  # steps, of which the median is compared with what it was
_DEPARTURE = 0.2  # of the time of a step
_MAX_DEPARTURE = 0.5  # what counts as one, on a machine where lesser ones have meant nothing
_RECHECK_STEPS = 5000  # after which to look again, though nothing seems to have changed: costs next to nothing
_MAX_PATIENCE = 16  # times the interval, where looking again has changed nothing

Steps = Generator[None, float, None]


class BackendChoice(SharedOnCopy):
    """Choose between the engine and plain DDP."""

    def __init__(self, engine: Engine, device: torch.device, log: Callable[[str], None]) -> None:
        self.wants_dense = False  # for the next step
        self._is_at_border = True  # no batch has begun since the last optimizer step
        self._engine: Engine = proxy(engine)  # which does not wait for a collection, as this and its course do
        self._device = device
        self._log = log
        self._is_comparing = False
        self._departure = _DEPARTURE
        self._density = 1.0  # that of the compressed steps timed last
        self._exposed = 0.0  # seconds of their exchange
        self._border = perf_counter()
        self.chosen: Optional[bool] = None  # whether plain DDP was the faster one, once that is known
        self._told: Optional[bool] = None  # what users have been told of it
        self.verdict = "training ended before compression and plain DDP were compared"
        self._course = self._run()
        next(self._course)

    def restore_choice(self, chosen: bool) -> None:
        """Stay with what a run before has chosen, until a step no longer takes what it did; on every rank."""
        self.wants_dense = chosen
        self.verdict = f"stayed with {'plain DDP' if chosen else 'compression'}, which the run before had chosen"
        self._course = self._run(chosen)
        next(self._course)

    def begin_batch(self, is_dense: bool) -> bool:
        """Return whether a batch is left to plain DDP: within a step, if the batch before was."""
        is_at_border, self._is_at_border = self._is_at_border, False
        return self.wants_dense if is_at_border else is_dense

    def end_step(self) -> None:
        """End an optimizer's step; on every rank."""
        self._is_at_border = True
        if self._is_comparing and self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)  # the caller's may be another
        border, self._border = self._border, perf_counter()
        self._course.send(self._border - border)

    def _run(self, chosen: Optional[bool] = None) -> Steps:
        """Live through the training: each ``yield`` is a step, and receives its seconds."""
        stale: Optional[Plan] = None
        self.chosen = chosen
        if chosen is not None:
            stale = yield from self._stay_dense() if chosen else self._stay_sparse()
        while True:
            self.chosen = None
            while self._engine.planner.plan is stale:
                yield
            comparison, turns = yield from self._compare()
            is_dense = not comparison.pays
            yield from self._decide(is_dense)
            self.chosen = is_dense
            self._tell(comparison, turns)
            stale = yield from self._stay_dense() if is_dense else self._stay_sparse()

    def _stay_sparse(self) -> Generator[None, float, Optional[Plan]]:
        """Compress until it is time to look again; return the plan, if it is out of date."""
        reference = yield from self._window()
        has_changed, _ = yield from self._watch(_RECHECK_STEPS, reference)
        if not has_changed:
            return None
        stale = self._engine.planner.plan
        self._engine.planner.start_anew()
        return stale

    def _stay_dense(self) -> Generator[None, float, Optional[Plan]]:
        """Leave everything to DDP until compression seems faster; return the plan, which is out of date."""
        patience = 1
        theirs = yield from self._window()
        while True:
            # What was looked at in vain stays what is compared with: the change may come while it is looked at.
            has_changed, theirs = yield from self._watch(patience * _RECHECK_STEPS, theirs)
            stale = self._engine.planner.plan
            self._engine.planner.start_anew()
            # A plan in the making tries one way after the other; none of them sends more than the user asked for.
            ours = yield from self._time(False)
            if compare([(ours, [theirs])], self._density).pays:
                return stale
            yield from self._decide(True)
            patience = min(2 * patience, _MAX_PATIENCE)
            if has_changed:
                self._departure = min(2 * self._departure, _MAX_DEPARTURE)

    def _compare(self) -> Generator[None, float, tuple[Comparison, int]]:
        """Compare the engine with DDP, which take turns until it is clear which is better, and count the turns."""
        if self._told is None:
            self._log(
                f"times {_TIMED_STEPS} steps with compression and {_TIMED_STEPS} of plain DDP, in {_TURNS} to"
                f" {_MOST_TURNS} turns, and goes on with what is better."
            )
        turns: list[Turn] = []
        while True:
            ours = yield from self._time(False)
            theirs = yield from self._time(True, hopeless=_HOPELESS * median(ours))
            turns.append((ours, theirs))
            comparison = compare(turns, self._density)
            if len(turns) == _MOST_TURNS or (len(turns) >= _TURNS and comparison.is_clear):
                return comparison, len(turns)

    def _time(self, is_dense: bool, hopeless: float = float("inf")) -> Generator[None, float, list[float]]:
        """Return the seconds of steps, on which ranks agree; of a single one, if that is hopeless."""
        self.wants_dense = is_dense
        self._is_comparing = True
        for _ in range(_SETTLING_STEPS):
            yield
        seen: list[float] = []
        exposed: list[float] = []
        while len(seen) < _TIMED_STEPS and (not seen or median(seen) < hopeless):
            seen.append(self._engine.mean_over_ranks((yield)))
            exposed.append(0.0 if is_dense else self._engine.compression_stats()["exposed_seconds"])
        self._is_comparing = False
        if not is_dense:
            self._density = self._engine.mean_over_ranks(self._engine.compression_stats()["density"])
            # A step in which Adam's second moment learns is DDP's own, and nobody knows what was exposed of it.
            self._exposed = self._engine.mean_over_ranks(float(torch.tensor(exposed, dtype=torch.float64).nanmedian()))
        return seen

    def _decide(self, is_dense: bool) -> Steps:
        """Stay with the winner; the residual is sent before DDP takes over."""
        if is_dense:
            self.wants_dense = False
            self._engine.densities.sends_all = True
            for _ in range(_SETTLING_STEPS):
                yield
            self._engine.densities.sends_all = False
        self.wants_dense = is_dense
        for _ in range(_SETTLING_STEPS):
            yield

    def _watch(self, steps: int, reference: float) -> Generator[None, float, tuple[bool, float]]:
        """Follow the winner until its step takes another time; return whether so, and the seconds of the last."""
        seconds = reference
        for _ in range(steps // _WINDOW):
            seconds = yield from self._window()
            if self._departs(seconds, reference):
                # Once more: the change may have come in the midst of the window, whose median is then neither.
                seconds = yield from self._window()
                if self._departs(seconds, reference):
                    return True, seconds
        return False, seconds

    def _window(self) -> Generator[None, float, float]:
        """Return the seconds of a step on which ranks agree, with nothing done for it meanwhile."""
        seen: list[float] = []
        while len(seen) < _WINDOW:
            seen.append((yield))
        return self._engine.mean_over_ranks(median(seen))

    def _departs(self, seconds: float, reference: float) -> bool:
        return abs(seconds - reference) > self._departure * max(seconds, reference)

    def _tell(self, comparison: Comparison, turns: int) -> None:
        gain, wanted = (seconds / comparison.theirs for seconds in (comparison.gain, comparison.wanted))
        if comparison.pays:
            choice = f"compression, which saves {gain:.1%}"
        elif gain <= 0:
            choice = "plain DDP, as compression saves nothing"
        else:
            worth = f"to send {self._density:.2g} of each gradient is worth {wanted:.0%}"
            unsure = "" if comparison.is_clear else ", and the difference is within the error"
            choice = f"plain DDP, as compression saves {gain:.1%}: {worth}{unsure}"
        self.verdict = f"chosen: {choice}"
        # All of DDP's exchange that backward does not hide, over a step of ours less what it does not hide of ours.
        alone = comparison.ours - self._exposed
        r = f"; r = {max(0.0, comparison.theirs / alone - 1):.2g} as measured" if alone > 0 else ""
        if self._told != self.chosen:
            self._log(f"{comparison}, in {turns} turns of each{r}; {self.verdict}.")
            self._told = self.chosen
