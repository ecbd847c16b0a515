"""Marks of a step's stages; no times yet, so that many steps can be kept, and read when nobody waits."""

from collections.abc import Iterator
from typing import NamedTuple, Optional

from lightning_sparse.engine.observe.clock import Clock, Mark


class Span(NamedTuple):
    """A stretch of one stage: ``"select"``, ``"encode"``, ``"exchange"`` or ``"commit"``."""

    stage: str
    start: Mark
    end: Mark


class GroupMarks:
    """The life of one group.

    Attributes:
        names: its parameters.
        elements: gradient elements.
        counts: elements that the density asked for, of parameters that are not sent whole.
        dense_elements: elements of parameters that are sent whole.
        wire_bytes: bytes that left this rank.
        ready: when its last gradient was ready; ``None`` if nobody marked it.
        spans: its stages, in their order; the exchanges are at the same time on all ranks.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.elements = 0
        self.counts = 0
        self.dense_elements = 0
        self.wire_bytes = 0.0
        self.ready: Optional[Mark] = None
        self.spans: list[Span] = []

    def seconds(self, *stages: str) -> float:
        """Return the time spent in stages; on a device this waits for them."""
        return sum(Clock.seconds(span.start, span.end) for span in self.spans if span.stage in stages)


class StepMarks:
    """The life of one step.

    Attributes:
        backward_start: when backward began; ``None`` if nobody said so.
        ready: by parameter name, when its gradient was ready, in this order; on a device ``None`` unless watched.
        groups: in the order of exchange.
        spans: stages that belong to no group.
        backward_end: when the last gradient was ready.
        end: when the last exchange had been written back.
        is_typical: whether it is one of many that send as much, and not one of a warm-up, or one in which a mean
            gradient is learned from beside.
    """

    def __init__(self) -> None:
        self.is_typical = True
        self.backward_start: Optional[Mark] = None
        self.ready: dict[str, Optional[Mark]] = {}
        self.groups: list[GroupMarks] = []
        self.spans: list[Span] = []
        self.backward_end: Optional[Mark] = None
        self.end: Optional[Mark] = None

    def all_spans(self) -> Iterator[Span]:
        """Yield the stages of all groups, then those of the step as a whole."""
        for group in self.groups:
            yield from group.spans
        yield from self.spans

    def seconds(self, *stages: str) -> float:
        """Return the time spent in stages; on a device this waits for them."""
        return sum(Clock.seconds(span.start, span.end) for span in self.all_spans() if span.stage in stages)

    @property
    def backward_seconds(self) -> float:
        """Seconds from the start of backward to the last gradient; on a device this waits for them."""
        known = self.backward_start is not None and self.backward_end is not None
        return Clock.seconds(self.backward_start, self.backward_end) if known else 0.0

    @property
    def exposed_seconds(self) -> float:
        """Seconds from the last gradient until all means had been written; on a device this waits for them."""
        known = self.backward_end is not None and self.end is not None
        return max(0.0, Clock.seconds(self.backward_end, self.end)) if known else 0.0

    @property
    def have_passed(self) -> bool:
        """Whether the step is over on the device, too; nobody waits for it."""
        return all(mark is None or Clock.has_passed(mark) for mark in (self.backward_end, self.end))
