"""A clock that marks moments on the host or on a device, without waiting for it."""

import time
from typing import Any

import torch

Mark = Any  # a host time in seconds (float), or an event of the device


class Clock:
    """Mark points in time: on the host's clock for CPU, as events on the current stream elsewhere.

    Attributes:
        is_host: whether marks are host times, which cost next to nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_host = device.type == "cpu"

    def mark(self) -> Mark:
        """Return the present; on a device, the moment at which the work queued so far has been done."""
        if self.is_host:
            return time.perf_counter()
        event = torch.get_device_module(self._device).Event(enable_timing=True)
        event.record()
        return event

    def reference(self) -> tuple[Mark, float]:
        """Return a mark and the host's time (``time.perf_counter``) at which it passed; on a device this waits for it.

        With it, :meth:`seconds` puts any other mark on the host's clock.
        """
        mark = self.mark()
        if not self.is_host:
            mark.synchronize()
        return mark, mark if self.is_host else time.perf_counter()

    @staticmethod
    def has_passed(mark: Mark) -> bool:
        """Tell whether a device has come to a mark, without waiting for it."""
        return isinstance(mark, float) or bool(mark.query())

    @staticmethod
    def seconds(start: Mark, end: Mark) -> float:
        """Return the seconds between two marks; on a device this waits until both have passed."""
        if isinstance(start, float):
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000.0
