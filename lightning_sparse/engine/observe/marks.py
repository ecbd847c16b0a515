"""When the stages of a step happened, as marks of a clock: read later, so that no step waits for a device."""

import time
from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple, Optional

import torch

Mark = Any  # a host time in seconds (float), or an event of the device


class Clock:
    """Mark points in time: on the host's clock for CPU, as events on the current stream elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_host = device.type == "cpu"  # marks are host times, which cost next to nothing

    def mark(self) -> Mark:
        """Return the present; on a device, the moment at which the work queued so far has been done."""
        if self.is_host:
            return time.perf_counter()
        event = torch.get_device_module(self._device).Event(enable_timing=True)
        event.record()
        return event

    def reference(self) -> tuple[Mark, float]:
        """Return a mark and the host's time (``time.perf_counter``) at which it passed; on a device this waits."""
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


class Span(NamedTuple):
    """A stretch of one stage: ``"select"``, ``"encode"``, ``"exchange"`` or ``"commit"``."""

    stage: str
    start: Mark
    end: Mark


class GroupMarks:
    """The life of one group."""

    def __init__(self, names: tuple[str, ...], ready: Optional[Mark] = None) -> None:
        self.names = names
        self.elements = 0
        self.counts = 0  # elements that the density asked for, of parameters that are not sent whole
        self.dense_elements = 0  # of parameters that are sent whole
        self.wire_bytes = 0.0
        self.ready = ready  # the last gradient; none if nobody marked it
        self.spans: list[Span] = []  # in their order; exchanges are at the same time on all ranks

    def seconds(self, *stages: str) -> float:
        """Return the time spent in stages; on a device this waits for them."""
        return _seconds(self.spans, stages)


class StepMarks:
    """The life of one step; all seconds wait for a device."""

    def __init__(self) -> None:
        self.is_typical = True  # sends as much as most steps: none of a warm-up, and learns no mean gradient
        self.backward_start: Optional[Mark] = None  # if anybody said so
        self.ready: dict[str, Optional[Mark]] = {}  # by parameter, in this order; on a device none unless watched
        self.groups: list[GroupMarks] = []  # in the order of exchange
        self.spans: list[Span] = []  # stages that belong to no group
        self.backward_end: Optional[Mark] = None  # the last gradient was ready
        self.end: Optional[Mark] = None  # the last exchange had been written back

    def all_spans(self) -> Iterator[Span]:
        """Yield the stages of all groups, then those of the step as a whole."""
        for group in self.groups:
            yield from group.spans
        yield from self.spans

    def seconds(self, *stages: str) -> float:
        """Return the time spent in stages."""
        return _seconds(self.all_spans(), stages)

    @property
    def backward_seconds(self) -> float:
        """Seconds from the start of backward to the last gradient."""
        known = self.backward_start is not None and self.backward_end is not None
        return Clock.seconds(self.backward_start, self.backward_end) if known else 0.0

    @property
    def exposed_seconds(self) -> float:
        """Seconds from the last gradient until all means had been written."""
        known = self.backward_end is not None and self.end is not None
        return max(0.0, Clock.seconds(self.backward_end, self.end)) if known else 0.0

    @property
    def have_passed(self) -> bool:
        """Whether the step is over on the device, too; nobody waits for it."""
        return all(mark is None or Clock.has_passed(mark) for mark in (self.backward_end, self.end))


def _seconds(spans: Iterable[Span], stages: Container[str]) -> float:
    return sum(Clock.seconds(span.start, span.end) for span in spans if span.stage in stages)
