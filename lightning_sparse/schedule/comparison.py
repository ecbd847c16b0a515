"""Whether compression pays: steps with it against steps of plain DDP, and how sure one can be."""

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

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
    """Return the part of a step of DDP that compression has to save: 2 %, and 5 % more for each tenth of the density.

    A rule of thumb:

    >>> [round(wanted_gain(density), 2) for density in (1.0, 0.1, 0.01, 0.001)]
    [0.02, 0.07, 0.12, 0.17]
    """
    return _LEAST_GAIN + _GAIN_OF_A_TENTH * math.log10(1 / min(1.0, max(density, 1e-9)))


def compare(turns: Sequence[Turn], density: float) -> Comparison:
    """Compare steps timed in turns, so that what else the machine does hits both; medians forgive one turn in three."""
    ours, theirs = ([median(steps) for steps in side] for side in zip(*turns))
    gains = [their - our for our, their in zip(ours, theirs)]
    inside = median(math.hypot(*map(_error_of, turn)) for turn in turns)
    error = _SIGMAS * max(spread(gains), inside) / math.sqrt(len(turns))
    theirs_seconds = median(theirs)
    return Comparison(median(ours), theirs_seconds, median(gains), error, wanted_gain(density) * theirs_seconds)


def _error_of(steps: Sequence[float]) -> float:
    return _ERROR_OF_MEDIAN * spread(steps) / math.sqrt(len(steps))


def spread(values: Sequence[float]) -> float:
    """Return one sigma of values that are normal but for a few that were disturbed."""
    centre = median(values)
    return _TO_SIGMA * median(abs(value - centre) for value in values)
