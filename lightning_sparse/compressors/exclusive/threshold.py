"""One threshold for the whole model, followed online: what one step selected says how to change it for the next."""

import math
from collections.abc import Callable
from typing import NamedTuple, Optional

_SMALLEST = 2.0**-126  # of a normal fp32 number; a threshold of zero would select everything
_LARGEST = 2.0**127
_GAIN = 0.05  # settles in some 25 steps; three times as much oscillates
_LEAST_GAIN = _GAIN / 100  # gradients that hardly change make an element wait for hundreds of steps
_CALMING = 0.5  # of the gain, where the density swings,
_RECOVERY = 1.05  # and where it does not
_CHANCE = 2.0  # sigmas, within which a density on the other side is no swing
_LARGEST_STEP = 0.1
_FAR_OFF = 2.0  # times too many or too few elements: measuring anew is then faster than any number of such steps,
_SIGMAS = 4.0  # unless there are so few that chance does that
_DEAD_BAND = (0.909, 1.1)  # published, as are the factors


class Pursuit(NamedTuple):
    """A threshold on its way, the same on all ranks.

    Attributes:
        threshold: of the next step; ``None`` to measure it in that step.
        gain: of the logarithm of the threshold for that of the density over the one wanted.
        error: the latter in the last step, 0 if the threshold was measured in it.
    """

    threshold: Optional[float] = None
    gain: float = _GAIN
    error: float = 0.0


class ThresholdRule(NamedTuple):
    """Where a threshold starts and how it goes on.

    Attributes:
        start: from the number of elements wanted, the threshold of the first step; ``None`` to measure it in that step.
        follow: from a threshold on its way, the number of elements it has selected and the number wanted, to that of
            the next step.
    """

    start: Callable[[int], Optional[float]]
    follow: Callable[[float, Pursuit, int, int], Pursuit]


def _measured_start(wanted: int) -> Optional[float]:
    return None


def _follow_log(threshold: float, pursuit: Pursuit, selected: int, wanted: int) -> Pursuit:
    error = math.log(max(selected, 0.5) / wanted)
    # Lowering a threshold sends what waits just below it, once: where little of it is new, half as much comes next, and
    # raising the threshold again holds back what is due. With too large a gain that goes to and fro for ever.
    swings = error * pursuit.error < 0 and min(abs(error), abs(pursuit.error)) * math.sqrt(wanted) > _CHANCE
    gain = max(_LEAST_GAIN, pursuit.gain * _CALMING) if swings else min(_GAIN, pursuit.gain * _RECOVERY)
    is_far_off = not wanted / _FAR_OFF < selected < wanted * _FAR_OFF
    # After a measurement, whose step has sent all that it saw above the threshold, there is less for a step.
    if pursuit.error and is_far_off and abs(selected - wanted) >= _SIGMAS * math.sqrt(wanted):
        return Pursuit(None, gain)
    step = max(-_LARGEST_STEP, min(_LARGEST_STEP, gain * error))
    return Pursuit(_within_range(threshold * math.exp(step)), gain, error)


def _published_start(wanted: int) -> Optional[float]:
    return 1.0 / (2.0 * math.sqrt(wanted))


def _follow_published(threshold: float, pursuit: Pursuit, selected: int, wanted: int) -> Pursuit:
    low, high = _DEAD_BAND
    ratio = selected / wanted
    if ratio > high:
        factor = 1.005
    elif ratio > 1.0:
        factor = 1.00125
    elif ratio > low:
        factor = 0.9987
    else:
        factor = 0.995
    return pursuit._replace(threshold=_within_range(threshold * factor))


def _within_range(threshold: float) -> float:
    return min(max(threshold, _SMALLEST), _LARGEST)


THRESHOLD_RULES = {
    "default": ThresholdRule(_measured_start, _follow_log),
    "paper": ThresholdRule(_published_start, _follow_published),
}
