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

_MIN_GAIN = 0.02  # of a step of DDP, which delays no gradient
_GAIN_OF_A_TENTH = 0.05  # more of it for sending a tenth: what is sent late has to be made up for in steps
_SIGMAS = 2.0
_TO_SIGMA = 1.4826  # from a median of deviations, for normal ones
_ERROR_OF_MEDIAN = 1.2533  # over that of a mean, for normal errors
_SETTLING_STEPS = 2  # after a change
_TIMED_STEPS = 6
_TURNS = 2  # of each, so that whatever else the machine does hits both alike,
_MAX_TURNS = 6  # and more while they do not tell which is better
_HOPELESS = 2.0  # times as slow as the engine: one step of a turn is enough to see it
_RECHECK_STEPS = 5000  # after which to compare again

Turn = tuple[Sequence[float], Sequence[float]]  # seconds of steps with compression, and of DDP's
Steps = Generator[None, float, None]


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

    def choice(self, density: float) -> str:
        """Say what is chosen, and why."""
        gain = self.gain / self.theirs
        if self.pays:
            return f"compression, which saves {gain:.1%}"
        if gain <= 0:
            return "plain DDP, as compression saves nothing"
        unsure = "" if self.is_clear else ", and the difference is within the error"
        worth = f"to send {density:.2g} of each gradient is worth {self.wanted / self.theirs:.0%}"
        return f"plain DDP, as compression saves {gain:.1%}: {worth}{unsure}"


def compare(turns: Sequence[Turn], density: float) -> Comparison:
    """Compare steps timed in turns, so that what else the machine does hits both; medians forgive one turn in three."""
    ours, theirs = ([median(steps) for steps in side] for side in zip(*turns))
    gains = [their - our for our, their in zip(ours, theirs)]
    errors = ((_ERROR_OF_MEDIAN * _spread(steps) / math.sqrt(len(steps)) for steps in turn) for turn in turns)
    inside = median(math.hypot(*turn) for turn in errors)
    error = _SIGMAS * max(_spread(gains), inside) / math.sqrt(len(turns))
    wanted = _MIN_GAIN + _GAIN_OF_A_TENTH * math.log10(1 / min(1.0, max(density, 1e-9)))
    return Comparison(median(ours), median(theirs), median(gains), error, wanted * median(theirs))


def _spread(values: Sequence[float]) -> float:
    """Return one sigma of values that are normal but for a few that were disturbed."""
    centre = median(values)
    return _TO_SIGMA * median(abs(value - centre) for value in values)


class AutoBackend(SharedOnCopy):
    """Choose between the engine and plain DDP."""

    def __init__(self, engine: Engine, device: torch.device, log: Callable[[str], None]) -> None:
        self.wants_dense = False  # for the next step
        self._engine: Engine = proxy(engine)  # which does not wait for a collection, as this and its course do
        self._device = device
        self._log = log
        self._is_comparing = False
        self._density = 1.0  # that of the compressed steps timed last
        self._exposed = 0.0  # seconds of their exchange
        self._border = perf_counter()
        self._told: Optional[bool] = None  # whether compression pays, as users have heard
        self.verdict = "training ended before compression and plain DDP were compared"
        self._course = self._run()
        next(self._course)

    def end_step(self) -> None:
        """End an optimizer's step; on every rank."""
        if self._is_comparing and self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)  # the caller's may be another
        border, self._border = self._border, perf_counter()
        self._course.send(self._border - border)

    def _run(self) -> Steps:
        """Live through the training: each ``yield`` is a step, and receives its seconds."""
        while self._engine.planner.plan is None:
            yield
        self._log(
            f"times {_TIMED_STEPS} steps with compression and {_TIMED_STEPS} of plain DDP, in {_TURNS} to {_MAX_TURNS}"
            " turns, and goes on with what is better."
        )
        while True:
            turns, is_done = list[Turn](), False
            while not is_done:
                ours = yield from self._time(False)
                theirs = yield from self._time(True, hopeless=_HOPELESS * median(ours))
                turns.append((ours, theirs))
                comparison = compare(turns, self._density)
                is_done = len(turns) == _MAX_TURNS or (len(turns) >= _TURNS and comparison.is_clear)
            yield from self._decide(not comparison.pays)
            self._tell(comparison, len(turns))
            for _ in range(_RECHECK_STEPS):
                yield

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
        """Stay with the winner; before DDP takes over gradients that were not sent are, and updates are dropped."""
        engine = self._engine
        if is_dense and engine.memory.corrects_adam:
            engine.worker.run(lambda: engine.memory.reset(engine.parameter_names))
        elif is_dense:
            self.wants_dense, engine.densities.sends_all = False, True
            for _ in range(_SETTLING_STEPS):
                yield
        self.wants_dense, engine.densities.sends_all = is_dense, False
        for _ in range(_SETTLING_STEPS):
            yield
        if is_dense:
            self._engine.recorder.totals.forget_times()  # which were those of trials

    def _tell(self, comparison: Comparison, turns: int) -> None:
        ours, theirs = comparison.ours, comparison.theirs
        self.verdict = f"chosen: {comparison.choice(self._density)}"
        if self._told is comparison.pays:
            return
        self._told = comparison.pays
        # All of DDP's exchange that backward does not hide, over a step of ours less what it does not hide of ours.
        alone = ours - self._exposed
        r = f"; r = {max(0.0, theirs / alone - 1):.2g} as measured" if alone > 0 else ""
        self._log(
            f"a step takes {1e3 * theirs:.1f} ms with DDP and {1e3 * ours:.1f} ms with compression (the difference may"
            f" be wrong by {1e3 * comparison.error:.1f} ms), in {turns} turns of each{r}; {self.verdict}."
        )
