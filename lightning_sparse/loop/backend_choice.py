"""Choice between compression and plain DDP from timed steps of both.

All ranks choose between two steps, from times averaged over ranks. Ranks and devices synchronize after a step only
during a comparison. DDP is chosen if the error is too large, or the gain too small for the delay of gradients.
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

_MIN_GAIN = 0.02  # fraction of DDP's step that compression has to save, because DDP delays no gradient
_GAIN_OF_A_TENTH = 0.05  # further fraction per factor of ten in density: delayed gradients cost steps
_SIGMAS = 2.0
_TO_SIGMA = 1.4826  # standard deviation over median absolute deviation, for normal values
_ERROR_OF_MEDIAN = 1.2533  # standard error of a median over that of a mean, for normal values
_SETTLING_STEPS = 2  # untimed steps after a change of backend
_TIMED_STEPS = 6
_TURNS = 2  # turns of each backend: other load on the machine affects both
_MAX_TURNS = 6  # measurements of each backend until the result is clear
_HOPELESS = 2.0  # DDP's time over compression's, from which one step per turn is enough
_RECHECK_STEPS = 5000  # steps between two comparisons

Turn = tuple[Sequence[float], Sequence[float]]  # seconds per step, with compression and with DDP
Steps = Generator[None, float, None]


class Comparison(NamedTuple):
    """Seconds per step with compression (``ours``) and with DDP (``theirs``)."""

    ours: float
    theirs: float
    gain: float  # seconds that compression saves, median over turns
    error: float  # two standard errors of the gain
    wanted: float  # smallest gain that is worth the delay of gradients

    @property
    def is_clear(self) -> bool:
        """Whether the gain differs from the wanted gain by more than the error."""
        return abs(self.gain - self.wanted) > self.error

    @property
    def pays(self) -> bool:
        """Whether the gain exceeds the wanted gain by more than the error."""
        return self.gain - self.wanted > self.error

    def choice(self, density: float) -> str:
        """Return the chosen backend and the reason as text."""
        gain = self.gain / self.theirs
        if self.pays:
            return f"compression, which saves {gain:.1%}"
        if gain <= 0:
            return "plain DDP, because compression saves nothing"
        unsure = "" if self.is_clear else ", and the difference is within the error"
        worth = f"a density of {density:.2g} has to save {self.wanted / self.theirs:.0%}"
        return f"plain DDP, because compression saves {gain:.1%}: {worth}{unsure}"


def compare(turns: Sequence[Turn], density: float) -> Comparison:
    """Compare alternating turns of both backends; medians tolerate one disturbed turn in three.

    Args:
        turns: seconds per step of each turn.
        density: fraction of elements that compression sends.
    """
    ours, theirs = ([median(steps) for steps in side] for side in zip(*turns))
    gains = [their - our for our, their in zip(ours, theirs)]
    errors = ((_ERROR_OF_MEDIAN * _spread(steps) / math.sqrt(len(steps)) for steps in turn) for turn in turns)
    inside = median(math.hypot(*turn) for turn in errors)
    error = _SIGMAS * max(_spread(gains), inside) / math.sqrt(len(turns))
    wanted = _MIN_GAIN + _GAIN_OF_A_TENTH * math.log10(1 / min(1.0, max(density, 1e-9)))
    return Comparison(median(ours), median(theirs), median(gains), error, wanted * median(theirs))


def _spread(values: Sequence[float]) -> float:
    """Return a standard deviation that is robust against outliers."""
    centre = median(values)
    return _TO_SIGMA * median(abs(value - centre) for value in values)


class AutoBackend(SharedOnCopy):
    """Choose between compression and plain DDP during a training."""

    def __init__(self, engine: Engine, device: torch.device, log: Callable[[str], None]) -> None:
        self.wants_dense = False  # whether plain DDP runs the next step
        self._engine: Engine = proxy(engine)  # a proxy, because the generator delays garbage collection
        self._device = device
        self._log = log
        self._is_comparing = False
        self._density = 1.0  # density of the last timed steps with compression
        self._exposed = 0.0  # exposed seconds per step with compression
        self._border = perf_counter()
        self._told: Optional[bool] = None  # last logged answer: whether compression pays
        self.verdict = "training ended before compression and plain DDP were compared"
        self._course = self._run()
        next(self._course)

    def end_step(self) -> None:
        """Record the end of an optimizer step. All ranks call."""
        if self._is_comparing and self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)  # the current device may be another
        border, self._border = self._border, perf_counter()
        self._course.send(self._border - border)

    def _run(self) -> Steps:
        """Compare and choose until training ends. Each ``yield`` is a step, and receives the seconds of the step."""
        while self._engine.planner.plan is None:
            yield
        self._log(
            f"times {_TIMED_STEPS} steps with compression and {_TIMED_STEPS} of plain DDP, in {_TURNS} to {_MAX_TURNS}"
            " turns, and continues with the better one."
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
        """Return seconds per step, averaged over ranks, and stop early if the median reaches ``hopeless``."""
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
            # DDP runs the steps that refresh Adam's second moments, so their exposed seconds are NaN.
            self._exposed = self._engine.mean_over_ranks(float(torch.tensor(exposed, dtype=torch.float64).nanmedian()))
        return seen

    def _decide(self, is_dense: bool) -> Steps:
        """Switch to the winner. Before DDP, residual gradients are sent, and residual updates of Adam are dropped."""
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
            self._engine.recorder.totals.forget_times()  # the comparison's times say nothing about DDP

    def _tell(self, comparison: Comparison, turns: int) -> None:
        ours, theirs = comparison.ours, comparison.theirs
        self.verdict = f"chosen: {comparison.choice(self._density)}"
        if self._told is comparison.pays:
            return
        self._told = comparison.pays
        # r is DDP's exposed time, relative to a step with compression without exposed time.
        alone = ours - self._exposed
        r = f"; r = {max(0.0, theirs / alone - 1):.2g} as measured" if alone > 0 else ""
        self._log(
            f"a step takes {1e3 * theirs:.1f} ms with DDP and {1e3 * ours:.1f} ms with compression (the difference may"
            f" be wrong by {1e3 * comparison.error:.1f} ms), in {turns} turns of each{r}; {self.verdict}."
        )
