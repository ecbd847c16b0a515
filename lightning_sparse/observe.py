"""What is SEEN: facts about a step, gathered beside it. Nothing here touches a value or waits for a device."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional

import torch

Mark = Any  # a host time in seconds (float), or an event of the device


class Clock:
    """Mark points in time: on the host's clock for CPU, as events on the current stream elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Mark:
        """Return the present; on a device, the moment at which the work queued so far has been done."""
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.get_device_module(self._device).Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def seconds(start: Mark, end: Mark) -> float:
        """Return the seconds between two marks; on a device this waits until both have passed."""
        if isinstance(start, float):
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000.0


class StepFacts:
    """What happened in one step on this rank.

    Attributes:
        elements: gradient elements that were to be exchanged.
        sent: elements that this rank selected.
        wire_bytes: bytes that this rank handed to collectives, indices, counts, flags and padding included.
        backward_end: when the last gradient was ready.
        end: when the last exchange had been written back.
    """

    def __init__(self) -> None:
        self.elements = 0
        self.sent = 0
        self.wire_bytes = 0
        self.backward_end: Optional[Mark] = None
        self.end: Optional[Mark] = None
        self._spans: defaultdict[str, list[tuple[Mark, Mark]]] = defaultdict(list)

    def add_span(self, stage: str, start: Mark, end: Mark) -> None:
        """Add a stretch of time to a stage."""
        self._spans[stage].append((start, end))

    def seconds(self, *stages: str) -> float:
        """Return the time spent in stages; on a device this waits for them."""
        return sum(Clock.seconds(*span) for stage in stages for span in self._spans[stage])

    def as_stats(self) -> dict[str, float]:
        """Return the public statistics, see :meth:`SparseDDPStrategy.compression_stats`."""
        dense_bytes = 4.0 * self.elements
        exposed = 0.0 if self.end is None else Clock.seconds(self.backward_end, self.end)
        return {
            "density": self.sent / max(1, self.elements),
            "wire_bytes": float(self.wire_bytes),
            "dense_bytes": dense_bytes,
            "compression_ratio": dense_bytes / self.wire_bytes if self.wire_bytes else 1.0,
            "select_seconds": self.seconds("select", "encode"),
            "exchange_seconds": self.seconds("exchange"),
            "exposed_seconds": max(0.0, exposed),
        }


class Recorder:
    """Gather the facts of the step in progress, and keep those of the last one that ended."""

    def __init__(self, device: torch.device) -> None:
        self.clock = Clock(device)
        self.current = StepFacts()
        self.last: Optional[StepFacts] = None

    @contextmanager
    def span(self, stage: str) -> Iterator[None]:
        """Time what is done inside, as part of a stage."""
        start = self.clock.mark()
        yield
        self.current.add_span(stage, start, self.clock.mark())

    def end_step(self) -> None:
        """Close the facts of this step and open the next."""
        self.current.end = self.clock.mark()
        self.last, self.current = self.current, StepFacts()
