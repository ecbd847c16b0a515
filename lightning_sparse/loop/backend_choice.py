"""Choice between compression and plain DDP, from measured times of optimizer steps.

Times are averaged over ranks, so that all ranks make the same choice after the same step. Ranks and devices
synchronize after steps only in a comparison. Compression is chosen only if the saved time clearly exceeds a minimum.
"""

import math
from collections.abc import Callable, Generator, Sequence
from statistics import median
from time import perf_counter
from typing import NamedTuple
from weakref import proxy

import torch

from lightning_sparse.engine import Engine
from lightning_sparse.engine.collectives import SharedOnCopy

_MIN_GAIN = 0.02  # fraction of DDP's step time that compression has to save, because compression delays gradients
_GAIN_OF_A_TENTH = 0.05  # added to the fraction for each factor of ten from the density to 1
_SIGMAS = 2.0  # number of standard errors in ``Comparison.error``
_TO_SIGMA = 1.4826  # ratio of standard deviation to median absolute deviation, for a normal distribution
_ERROR_OF_MEDIAN = 1.2533  # ratio of a median's standard error to a mean's, for a normal distribution
_SETTLING_STEPS = 2  # untimed steps after a switch of backend
_TIMED_STEPS = 6  # number of timed steps per backend in a turn, which times both
_TURNS = 2  # minimum number of turns; with several turns, other load on the machine affects both backends
_MAX_TURNS = 6  # maximum number of turns of a comparison, even if the result is not clear
_RECHECK_STEPS = 5000  # optimizer steps between two comparisons

Turn = tuple[Sequence[float], Sequence[float]]  # for one turn: seconds of timed steps with compression, then with DDP
Steps = Generator[None, float, None]


class Comparison(NamedTuple):
    """Result of a comparison: median seconds per step with compression (``ours``) and with DDP (``theirs``)."""

    ours: float
    theirs: float
    gain: float  # seconds per step that compression saves over DDP (median)
    error: float  # two standard errors of ``gain``, in seconds
    wanted: float  # minimum gain in seconds: a smaller gain does not outweigh the delay of gradients

    @property
    def is_clear(self) -> bool:
        """Whether the difference between ``gain`` and ``wanted`` is larger than ``error``."""
        return abs(self.gain - self.wanted) > self.error

    @property
    def pays(self) -> bool:
        """Whether ``gain`` clearly exceeds ``wanted``."""
        return self.is_clear and self.gain > self.wanted

    def __str__(self) -> str:
        saved = f"compression saves {max(0.0, self.gain) / self.theirs:.1%}"
        if self.pays:
            return f"compression, because {saved}"
        return f"plain DDP, because {saved}, and has to save {self.wanted / self.theirs:.0%}"


def compare(turns: Sequence[Turn], density: float) -> Comparison:
    """Compare the times of both backends. Medians over turns tolerate one disturbed turn in three.

    Args:
        turns: seconds of the timed steps with compression and with DDP, for each turn.
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
    """Choose between compression and plain DDP. The training sends dense gradients while ``wants_dense`` is true."""

    def __init__(self, engine: Engine, device: torch.device, log: Callable[[str], None]) -> None:
        self.wants_dense = False  # whether plain DDP runs the next step
        self._engine: Engine = proxy(engine)  # weak reference, because a cycle would delay garbage collection
        self._device = device
        self._log = log
        self._is_comparing = False
        self._density = 1.0  # density of the last timed steps with compression
        self._border = perf_counter()  # time at the end of the last step, in seconds
        self.verdict = "training ended before compression and plain DDP were compared"
        self._course = self._run()
        next(self._course)

    def end_step(self) -> None:
        """Record the end of an optimizer step. All ranks must call."""
        if self._is_comparing and self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)  # torch's current device may differ
        border, self._border = self._border, perf_counter()
        self._course.send(self._border - border)

    def _run(self) -> Steps:
        """Compare and choose until training ends. Each ``yield`` waits for one step, and returns the step's seconds."""
        while self._engine.plan is None:
            yield
        while True:
            turns, comparison = list[Turn](), None
            while comparison is None or (not comparison.is_clear and len(turns) < _MAX_TURNS):
                turns.append(((yield from self._time(False)), (yield from self._time(True))))
                comparison = compare(turns, self._density) if len(turns) >= _TURNS else None
            yield from self._decide(not comparison.pays)
            self.verdict = f"chosen: {comparison}"
            self._log(
                f"a step takes {1e3 * comparison.theirs:.1f} ms with DDP and {1e3 * comparison.ours:.1f} ms with"
                f" compression (the difference may be wrong by {1e3 * comparison.error:.1f} ms), in {len(turns)} turns"
                f" of each; {self.verdict}."
            )
            for _ in range(_RECHECK_STEPS):
                yield

    def _time(self, is_dense: bool) -> Generator[None, float, list[float]]:
        """Time steps of a backend. Return mean seconds over ranks, by step."""
        self.wants_dense = is_dense
        self._is_comparing = True
        for _ in range(_SETTLING_STEPS):
            yield
        seen: list[float] = []
        while len(seen) < _TIMED_STEPS:
            seen.append(self._engine.mean_over_ranks((yield)))
        self._is_comparing = False
        if not is_dense:
            self._density = self._engine.mean_over_ranks(self._engine.compression_stats()["density"])
        return seen

    def _decide(self, is_dense: bool) -> Steps:
        """Switch to the chosen backend. Before a switch to DDP, send residuals, or drop residuals of Adam's updates."""
        engine = self._engine
        if is_dense and engine.memory.corrects_adam:
            engine.worker.run(lambda: engine.memory.reset(engine.numels))
        elif is_dense:
            self.wants_dense, engine.densities.sends_all = False, True
            for _ in range(_SETTLING_STEPS):
                yield
        self.wants_dense, engine.densities.sends_all = is_dense, False
        for _ in range(_SETTLING_STEPS):
            yield
        if is_dense:
            engine.recorder.totals.seconds.clear()  # the times of compressed steps would distort exposed_share
