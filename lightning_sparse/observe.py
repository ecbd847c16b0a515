"""What is SEEN: facts about a step, gathered beside it. Nothing here touches a value or waits for a device."""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Optional, Union

import torch
from torch import Tensor

from lightning_sparse.selection import Selection

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
        wire_bytes: bytes that this rank handed to collectives, indices, counts, flags and padding included.
        backward_end: when the last gradient was ready.
        end: when the last exchange had been written back.
        deltas: by parameter name, the ``delta`` of LAGS' assumption (tensors of one element); empty if not sampled.
    """

    def __init__(self) -> None:
        self.elements = 0
        self.wire_bytes = 0
        self.backward_end: Optional[Mark] = None
        self.end: Optional[Mark] = None
        self.deltas: dict[str, Tensor] = {}
        self._sent: list[Union[int, Tensor]] = []  # tensors are counts that the device has not been asked for
        self._arrived: list[Union[int, Selection]] = []  # the number where everything arrived: values are not held
        self._spans: defaultdict[str, list[tuple[Mark, Mark]]] = defaultdict(list)

    def add_selections(self, selections: Iterable[Selection]) -> None:
        """Take note of what this rank sends of a group."""
        for selection in selections:
            self.elements += selection.numel
            self._sent.append(selection.values.numel() if selection.filled is None else selection.filled.sum())

    def add_means(self, means: Iterable[Selection]) -> None:
        """Take note of what arrived from all ranks for a group."""
        self._arrived.extend(mean.numel if mean.indices is None else mean for mean in means)

    def add_span(self, stage: str, start: Mark, end: Mark) -> None:
        """Add a stretch of time to a stage."""
        self._spans[stage].append((start, end))

    def seconds(self, *stages: str) -> float:
        """Return the time spent in stages; on a device this waits for them."""
        return sum(Clock.seconds(*span) for stage in stages for span in self._spans[stage])

    def union(self) -> int:
        """Return how many elements any rank has sent, which costs a sort of what arrived."""
        return sum(arrived if isinstance(arrived, int) else _distinct(arrived) for arrived in self._arrived)

    def as_stats(self) -> dict[str, float]:
        """Return the public statistics, see :meth:`SparseDDPStrategy.compression_stats`."""
        dense_bytes = 4.0 * self.elements
        exposed = 0.0 if self.end is None else Clock.seconds(self.backward_end, self.end)
        return {
            "density": float(sum(self._sent)) / max(1, self.elements),
            "union_density": self.union() / max(1, self.elements),
            "wire_bytes": float(self.wire_bytes),
            "dense_bytes": dense_bytes,
            "compression_ratio": dense_bytes / self.wire_bytes if self.wire_bytes else 1.0,
            "select_seconds": self.seconds("select", "encode"),
            "exchange_seconds": self.seconds("exchange"),
            "exposed_seconds": max(0.0, exposed),
        }


def _distinct(mean: Selection) -> int:
    assert mean.indices is not None
    return int(mean.indices[mean.values != 0].unique().numel())


class Recorder:
    """Gather the facts of the step in progress, and keep those of the last one that ended."""

    def __init__(self, device: torch.device) -> None:
        self.clock = Clock(device)
        self.current = StepFacts()
        self.last: Optional[StepFacts] = None
        self._bytes_before_last = 0

    @property
    def total_wire_bytes(self) -> int:
        """Bytes handed to collectives by all steps that have ended."""
        return self._bytes_before_last + (self.last.wire_bytes if self.last is not None else 0)

    @contextmanager
    def span(self, stage: str) -> Iterator[None]:
        """Time what is done inside, as part of a stage."""
        start = self.clock.mark()
        yield
        self.current.add_span(stage, start, self.clock.mark())

    def end_step(self) -> None:
        """Close the facts of this step and open the next."""
        self.current.end = self.clock.mark()
        self._bytes_before_last = self.total_wire_bytes
        self.last, self.current = self.current, StepFacts()
