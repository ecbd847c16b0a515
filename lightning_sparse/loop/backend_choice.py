"""Choice between compression and plain DDP, from measured times of optimizer steps.

Times are averaged over ranks, so that all ranks make the same choice after the same step. Ranks and devices
synchronize after steps only in a comparison. Compression is chosen only if the saved time clearly exceeds a minimum.
"""

import math
from collections.abc import Callable, Generator, Sequence
from statistics import median
from time import perf_counter
from weakref import proxy

import torch

from lightning_sparse.engine import Engine
from lightning_sparse.engine.collectives import SharedOnCopy

_MIN_GAIN = 0.02  # fraction of DDP's step time that compression has to save, because compression delays gradients
_GAIN_OF_A_TENTH = 0.05  # added to _MIN_GAIN for each factor of ten in the density: 0.1 at density 0.01
_TO_ERROR = 2 * 1.2533 * 1.4826  # two standard errors of a median, divided by MAD / sqrt(n), for a normal distribution
_SETTLING_STEPS = 2  # untimed steps after a switch of backend
_TIMED_STEPS = 6  # timed steps per backend in each turn; a turn times both backends
_TURNS = 4  # turns of a comparison; with several turns, other load on the machine affects both backends
_RECHECK_STEPS = 5000  # optimizer steps between two comparisons

Steps = Generator[None, float, None]


def compare(sparse: Sequence[float], dense: Sequence[float], density: float) -> tuple[bool, str, str]:
    """Compare seconds of steps with compression at ``density``, and of steps with DDP. Medians tolerate outliers.

    Returns:
        Whether compression saves clearly more than the minimum; a description of the times; and the reason.
    """
    gains = [one - other for one, other in zip(dense, sparse)]
    gain, step = median(gains), median(dense)
    error = _TO_ERROR * median(abs(each - gain) for each in gains) / math.sqrt(len(gains))
    minimum = _MIN_GAIN + _GAIN_OF_A_TENTH * math.log10(1 / min(1.0, max(density, 1e-9)))
    pays = gain - error > minimum * step
    times = (
        f"a step takes {1e3 * step:.1f} ms with DDP and {1e3 * median(sparse):.1f} ms with compression (the difference"
        f" may be wrong by {1e3 * error:.1f} ms)"
    )
    saved = f"because compression saves {max(0.0, gain) / step:.1%}"
    return pays, times, f"compression, {saved}" if pays else f"plain DDP, {saved}, and has to save {minimum:.0%}"


class AutoBackend(SharedOnCopy):
    """Choose between compression and plain DDP. The training sends dense gradients while ``wants_dense`` is true."""

    def __init__(self, engine: Engine, device: torch.device, log: Callable[[str], None]) -> None:
        self.wants_dense = False  # whether plain DDP runs the next step
        self.verdict = "training ended before compression and plain DDP were compared"
        self._engine: Engine = proxy(engine)  # weak reference, because a cycle would delay garbage collection
        self._device, self._log = device, log
        self._is_timing, self._border = False, perf_counter()  # border: time at the end of the last step
        self._course = self._run()
        next(self._course)

    def end_step(self) -> None:
        """Record the end of an optimizer step. All ranks must call."""
        if self._is_timing and self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)  # torch's current device may differ
        border, self._border = self._border, perf_counter()
        self._course.send(self._border - border)

    def _run(self) -> Steps:
        """Compare and choose until training ends. Each ``yield`` waits for one step, and returns the step's seconds."""
        engine = self._engine
        while engine.plan is None:
            yield
        while True:
            sparse, dense = list[float](), list[float]()
            for _ in range(_TURNS):
                yield from self._time(sparse, False)
                density = engine.mean_over_ranks(engine.compression_stats()["density"])
                yield from self._time(dense, True)
            pays, times, reason = compare(sparse, dense, density)
            if pays:
                self.wants_dense = False
            else:
                yield from self._change_to_ddp()
            self.verdict = f"chosen: {reason}"
            self._log(f"{times}; {self.verdict}.")
            for _ in range(_RECHECK_STEPS):
                yield

    def _time(self, seconds: list[float], is_dense: bool) -> Steps:
        """Append the seconds of steps with one backend, averaged over ranks."""
        self.wants_dense, self._is_timing = is_dense, True
        for _ in range(_SETTLING_STEPS):
            yield
        for _ in range(_TIMED_STEPS):
            own = yield
            seconds.append(self._engine.mean_over_ranks(own))
        self._is_timing = False

    def _change_to_ddp(self) -> Steps:
        """Send residuals, or drop residuals of Adam's updates. Then use plain DDP."""
        engine = self._engine
        if engine.memory.corrects_adam:
            engine.worker.run(lambda: engine.memory.reset(engine.numels))
        else:
            self.wants_dense, engine.densities.sends_all = False, True
            for _ in range(_SETTLING_STEPS):
                yield
        self.wants_dense, engine.densities.sends_all = True, False
        yield
        engine.recorder.totals.seconds.clear()  # the times of compressed steps would distort exposed_share
