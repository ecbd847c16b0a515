"""One threshold for the whole model, followed online: what one step selected says how to change it for the next."""

import math
from collections.abc import Callable
from typing import NamedTuple, Optional

_SMALLEST = 2.0**-126  # of a normal fp32 number; a threshold of zero would select everything
_LARGEST = 2.0**127
_GAIN = 0.05  # settles in some 25 steps; three times as much oscillates
_LARGEST_STEP = 0.1
_FAR_OFF = 2.0  # times too many or too few elements: measuring anew is then faster than any number of such steps,
_SIGMAS = 4.0  # unless there are so few that chance does that
_DEAD_BAND = (0.909, 1.1)  # published, as are the factors


class ThresholdRule(NamedTuple):
    """Where a threshold starts and how it goes on.

    Attributes:
        start: from the number of elements wanted, the threshold of the first step; ``None`` to measure it in that step.
        follow: from a threshold, the number of elements it has selected and the number wanted, the threshold of the
            next step; ``None`` to measure it in that step.
    """

    start: Callable[[int], Optional[float]]
    follow: Callable[[float, int, int], Optional[float]]


def _measured_start(wanted: int) -> Optional[float]:
    return None


def _follow_log(threshold: float, selected: int, wanted: int) -> Optional[float]:
    is_far_off = not wanted / _FAR_OFF < selected < wanted * _FAR_OFF
    if is_far_off and abs(selected - wanted) >= _SIGMAS * math.sqrt(wanted):
        return None
    error = math.log(selected / wanted) if selected else -math.inf
    step = max(-_LARGEST_STEP, min(_LARGEST_STEP, _GAIN * error))
    return _within_range(threshold * math.exp(step))


def _published_start(wanted: int) -> Optional[float]:
    return 1.0 / (2.0 * math.sqrt(wanted))


def _follow_published(threshold: float, selected: int, wanted: int) -> Optional[float]:
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
    return _within_range(threshold * factor)


def _within_range(threshold: float) -> float:
    return min(max(threshold, _SMALLEST), _LARGEST)


THRESHOLD_RULES = {
    "default": ThresholdRule(_measured_start, _follow_log),
    "paper": ThresholdRule(_published_start, _follow_published),
}
