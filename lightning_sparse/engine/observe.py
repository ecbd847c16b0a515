"""Records of each step: elements, bytes and times. A read may synchronize with the GPU, a record does not."""

import math
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, starmap
from time import perf_counter
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor
from torch.autograd import profiler

from lightning_sparse.compressors.selection import FlatSelection, Selection, sent_count
from lightning_sparse.engine.samples import ParameterSamples
from lightning_sparse.schedule.network import dense_bytes


def shown(stage: str) -> AbstractContextManager[Any]:
    """Return a context that a running torch profiler shows as ``sparse.<stage>``."""
    return profiler.record_function(f"sparse.{stage}") if profiler._is_profiler_enabled else nullcontext()


def _no_mark() -> None:
    """Return no timestamp. On a GPU a timestamp of each gradient would cost a CUDA event."""


Timestamp = Any  # host time in seconds (float), or a CUDA event
_FP32_BYTES = 4
_ALL = "data that all buckets of a step share"
_MAX_RECORDS = 256  # limits memory if no optimizer step ever ends
_dense_bytes_each = cache(partial(dense_bytes, 1))  # bytes per element of DDP's all-reduce, by world size


class Clock:
    """Timestamps: host times on a CPU, and CUDA events on the current stream on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_host = device.type == "cpu"  # whether timestamps are host times, which cost little

    def mark(self) -> Timestamp:
        """Return a timestamp of now. On a GPU, the timestamp is an event behind all work queued so far."""
        if self.is_host:
            return perf_counter()
        module = torch.get_device_module(self._device)
        event = module.Event(enable_timing=True)
        event.record(module.current_stream(self._device))  # The thread's current device may differ.
        return event

    @staticmethod
    def has_passed(mark: Timestamp) -> bool:
        """Return whether the device has passed a timestamp. Does not synchronize."""
        return isinstance(mark, float) or bool(mark.query())

    @staticmethod
    def seconds(start: Timestamp, end: Timestamp) -> float:
        """Return the seconds between two timestamps. Synchronizes with the GPU."""
        if isinstance(start, float):
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000.0


class Span(NamedTuple):
    """The time of one stage of a step: ``"select"``, ``"encode"``, ``"exchange"`` or ``"commit"``."""

    stage: str
    start: Timestamp
    end: Timestamp


@dataclass
class BucketRecord:
    """Elements, bytes and times of a bucket's exchange."""

    names: tuple[str, ...]
    elements: int = 0
    counts: int = 0  # elements to send, by the density
    wire_bytes: float = 0.0
    spans: list[Span] = field(default_factory=list)  # times of the stages, in order

    def seconds(self, *stages: str) -> float:
        """Return the time of the named stages. Synchronizes with the GPU."""
        return _seconds(self.spans, stages)


@dataclass
class StepRecord:
    """Elements, bytes and times of an exchange. A record has no received tensors, so many records fit into memory.

    An optimizer step has a record per backward with an exchange. A read of seconds synchronizes with the GPU.
    """

    world_size: int = 1
    local_world_size: int = 1
    elements: float = 0.0  # gradient elements; with two levels only of this rank's shares
    wire_bytes: float = 0.0  # bytes that this rank sends, with indices, counts, flags and padding
    node_bytes: float = 0.0  # part of wire_bytes that stays inside the node, with two levels
    step: int = 0  # equal for all exchanges of one optimizer step; not consecutive
    covered_steps: int = 0  # local steps of the exchanged round; 0 for an exchange of gradients
    is_logged: bool = False  # whether CompressionMonitor has logged the record
    is_dense: bool = False  # whether gradients were averaged as in DDP; such a record has no times
    is_typical: bool = True  # False in Adam's warm-up, which sends more elements than later steps
    sent: list[Union[float, Tensor]] = field(default_factory=list)  # elements sent per message, maybe on the GPU
    buckets: list[BucketRecord] = field(default_factory=list)  # in the order of exchange
    spans: list[Span] = field(default_factory=list)  # times of stages outside of buckets
    ready: dict[str, Optional[Timestamp]] = field(default_factory=dict)  # ready times by name, in exchange order
    backward_start: Optional[Timestamp] = None  # None if no hook has recorded the start
    backward_end: Optional[Timestamp] = None  # time when the last gradient was ready
    end: Optional[Timestamp] = None  # time when all means had been written
    exposed: list[tuple[Timestamp, Timestamp]] = field(default_factory=list)  # intervals in which training waited

    @classmethod
    def of_dense(cls, numel: int, nbytes: int, world_size: int, local_world_size: int) -> "StepRecord":
        """Return the record of a ring all-reduce of ``numel`` elements in ``nbytes`` that leaves each node once."""
        wire_bytes = _dense_bytes_each(world_size) * (nbytes / _FP32_BYTES)
        node_bytes, elements = wire_bytes * (local_world_size - 1) / local_world_size, numel / local_world_size
        return cls(world_size, local_world_size, elements, wire_bytes, node_bytes, is_dense=True, sent=[elements])

    @property
    def dense_bytes(self) -> float:
        """Bytes that this rank would have sent with DDP, in all-reduces of fp32 gradients."""
        return _dense_bytes_each(self.world_size) * (self.elements * self.local_world_size * max(1, self.covered_steps))

    def seconds(self, *stages: str) -> float:
        """Return the time of the named stages, inside and outside of buckets."""
        return _seconds([*chain.from_iterable(bucket.spans for bucket in self.buckets), *self.spans], stages)

    @property
    def backward_seconds(self) -> float:
        """Seconds from the start of backward to the last gradient."""
        has_both = self.backward_start is not None and self.backward_end is not None
        return Clock.seconds(self.backward_start, self.backward_end) if has_both else 0.0

    @property
    def exposed_seconds(self) -> float:
        """Seconds in which training waited: from the last gradient until all means were written, and later waits."""
        return sum(starmap(_exposed, self.exposed))


def _exposed(start: Timestamp, end: Timestamp) -> float:
    # The end may precede the start, if the exchange ended before the wait began.
    return max(0.0, Clock.seconds(start, end))


def _seconds(spans: Iterable[Span], stages: Container[str]) -> float:
    return sum(Clock.seconds(span.start, span.end) for span in spans if span.stage in stages)


def mean_stats(records: Sequence[StepRecord], has_levels: bool) -> dict[str, float]:
    """Return the public statistics as means over optimizer steps. Synchronizes with the GPU.

    The mean times exclude steps that averaged gradients as in DDP.
    """
    wire_bytes = mean_of(records, lambda each: each.wire_bytes)
    dense = mean_of(records, lambda each: each.dense_bytes)
    ours = compressed(records)
    sent = sum(chain.from_iterable(each.sent for each in records))
    return {
        "density": float(sent) / max(1, sum(each.elements for each in records)),
        "wire_bytes": wire_bytes,
        **({"inter_node_bytes": wire_bytes - mean_of(records, lambda each: each.node_bytes)} if has_levels else {}),
        "dense_bytes": dense,
        "compression_ratio": compression_ratio(dense, wire_bytes),
        "select_seconds": mean_of(ours, lambda each: each.seconds("select", "encode")),
        "exchange_seconds": mean_of(ours, lambda each: each.seconds("exchange")),
        "exposed_seconds": mean_of(ours, lambda each: each.exposed_seconds),
    }


def compressed(records: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the records of optimizer steps in which no exchange ``is_dense``."""
    dense = {each.step for each in records if each.is_dense}
    return [each for each in records if each.step not in dense]


def mean_of(records: Sequence[StepRecord], number: Callable[[StepRecord], float]) -> float:
    """Return the sum of ``number(record)`` over records, divided by the number of optimizer steps (0 steps: NaN)."""
    steps = len({each.step for each in records if not each.covered_steps}) + sum(e.covered_steps for e in records)
    return sum(map(number, records)) / steps if steps else math.nan


def compression_ratio(dense: float, sent: float) -> float:
    """Return DDP's bytes divided by the sent bytes, or 1 if nothing was sent."""
    return dense / sent if sent else 1.0


class Totals:
    """Sums of bytes and times over all steps of a training. Only :meth:`as_stats` may synchronize with the GPU."""

    def __init__(self) -> None:
        self.steps = 0  # optimizer steps, including steps with DDP's dense gradients
        self.wire_bytes = self.node_bytes = self.dense_bytes = 0.0
        self._exposed: list[tuple[Timestamp, Timestamp]] = []  # exposed intervals of the current step
        self._is_dense = False  # whether an exchange of the current step averaged as in DDP
        self._paused: Optional[float] = None  # host time of pause(), in seconds
        self.forget_times()

    def forget_times(self) -> None:
        """Reset the times of the steps so far."""
        self._seconds = self._exposed_seconds = 0.0
        self._unread: deque[tuple[Timestamp, Timestamp]] = deque()  # exposed intervals, not yet in _exposed_seconds
        self._border = perf_counter()  # start of the current step

    def add(self, record: StepRecord) -> None:
        """Add the record of an exchange, which the GPU may not have finished."""
        self.wire_bytes += record.wire_bytes
        self.node_bytes += record.node_bytes
        self.dense_bytes += record.dense_bytes
        self._is_dense |= record.is_dense
        self.expose(record.exposed)

    def expose(self, exposed: Iterable[tuple[Timestamp, Timestamp]]) -> None:
        """Count the intervals between pairs of timestamps as exposed time of the current step."""
        if self._paused is None:
            self._exposed += exposed

    def pause(self) -> None:
        """Exclude the time until :meth:`resume` from the step, for example a validation between two batches."""
        self._paused = perf_counter() if self._paused is None else self._paused

    def resume(self) -> None:
        """Count time again. If :meth:`pause` was not called before, the step begins now."""
        now = perf_counter()
        if self._paused is None:
            self._exposed.clear()
        self._border, self._paused = now if self._paused is None else self._border + now - self._paused, None

    def end_step(self) -> None:
        """Count a step of an optimizer."""
        border, self._border = self._border, perf_counter()
        if not self._is_dense:  # The exposed time of a step with DDP's dense gradients is not measured.
            self._seconds += self._border - border
            self._unread.extend(self._exposed)
        self._exposed.clear()
        self._is_dense = False
        self.steps += 1
        while self._unread and Clock.has_passed(self._unread[0][1]):
            self._exposed_seconds += _exposed(*self._unread.popleft())

    def as_stats(self, has_levels: bool) -> dict[str, float]:
        """Return the public statistics. May synchronize with the GPU."""
        stats = {
            "total_wire_bytes": self.wire_bytes,
            "total_dense_bytes": self.dense_bytes,
            "total_compression_ratio": compression_ratio(self.dense_bytes, self.wire_bytes),
        }
        if has_levels:
            stats["total_inter_node_bytes"] = self.wire_bytes - self.node_bytes
        if self.steps:
            stats["total_steps"] = float(self.steps)
            exposed = self._exposed_seconds + sum(starmap(_exposed, self._unread))
            # Host time may be shorter than exposed GPU time, because the GPU may be behind the host.
            stats["exposed_share"] = min(1.0, exposed / self._seconds) if self._seconds else math.nan
        return stats


class Recorder:
    """Recorder of the current exchange, with the records of earlier exchanges."""

    def __init__(self, device: torch.device, world_size: int, local_world_size: int = 1) -> None:
        self.clock = Clock(device)
        self._sizes = (world_size, local_world_size)
        self.has_levels = local_world_size > 1  # whether ranks of a node divide each gradient
        self.current = StepRecord(*self._sizes)  # record of the running exchange; replaced only between two backwards
        self.forget()
        self.begun_steps = 0  # optimizer steps with a begun exchange of compressed gradients
        self.watches_gradients = False  # whether each gradient gets a timestamp on a GPU, too
        self.samples: Optional[ParameterSamples] = None  # samples of the current exchange; None if not requested
        self.last_samples: Optional[ParameterSamples] = None  # samples of the last sampled exchange
        self.subject = _ALL  # description of the current exchange, for error messages
        self._bucket: Optional[BucketRecord] = None

    def forget(self) -> None:
        """Drop all records, because the training continues from another state."""
        self.totals = Totals()
        self.last: Optional[StepRecord] = None  # the last complete exchange
        self.records = deque[StepRecord](maxlen=_MAX_RECORDS)  # the last complete exchanges

    def begin_backward(self) -> None:
        """Record the start of a backward. Of several backwards before an exchange, the last backward counts."""
        self.current.backward_start = self.clock.mark()

    def end_backward(self) -> None:
        """Record the time when the last gradient was ready."""
        self.current.backward_end = self.clock.mark()

    def mark_of_gradients(self) -> Callable[[], Optional[Timestamp]]:
        """Return a function that returns the timestamp of a ready gradient, or ``None``, in the current exchange."""
        if self.clock.is_host:
            return perf_counter
        return self.clock.mark if self.watches_gradients else _no_mark

    @contextmanager
    def bucket(self, names: Sequence[str]) -> Iterator[None]:
        """Begin a new bucket, and count the elements, bytes and times inside the context for this bucket."""
        self._bucket = BucketRecord(tuple(names))
        self.current.buckets.append(self._bucket)
        self.subject = f"the bucket of {len(names)} parameters from {names[0]!r} to {names[-1]!r}"
        try:
            yield
        finally:
            self._bucket, self.subject = None, _ALL

    def see_selection(self, selection: Sequence[Selection], counts: Sequence[float]) -> None:
        """Count the sent elements of a bucket. ``counts`` are the elements of each parameter by its density."""
        if isinstance(selection, FlatSelection):
            numel, sent, asked = sum(selection.numels), sent_count(selection), round(sum(counts))
        else:
            numel = sent = asked = sum(each.numel for each in selection)
        self.current.elements += numel
        self.current.sent.append(sent)
        if self._bucket is not None:
            self._bucket.elements += numel
            self._bucket.counts += asked

    def add_bytes(self, count: float, is_inside_node: bool = False) -> None:
        """Record sent bytes. ``is_inside_node``: the receivers are ranks of this node."""
        self.current.wire_bytes += count
        self.current.node_bytes += count * is_inside_node
        if self._bucket is not None:
            self._bucket.wire_bytes += count

    @contextmanager
    def of_last_step(self, subject: str, is_counted: bool = True) -> Iterator[None]:
        """Count bytes sent inside the context for the last exchange if ``is_counted``, and otherwise for none."""
        current, self.current, self.subject = self.current, StepRecord(), subject
        try:
            yield
        finally:
            late, self.current, self.subject = self.current, current, _ALL
            if self.last is not None and is_counted:
                self.last.wire_bytes += late.wire_bytes
                self.totals.wire_bytes += late.wire_bytes

    @contextmanager
    def waiting(self, is_exchange: bool = False) -> Iterator[None]:
        """Count the time inside the context as exposed time of the last exchange."""
        start = self.clock.mark()
        yield
        exposed = [(start, self.clock.mark())]
        if self.last is not None:
            self.last.exposed += exposed
            self.last.spans += [Span("exchange", *each) for each in exposed if is_exchange]
        self.totals.expose(exposed)

    @contextmanager
    def span(self, stage: str) -> Iterator[None]:
        """Count the time inside the context for a stage, which a running torch profiler shows."""
        with shown(stage):
            start = self.clock.mark()
            yield
        record = self.current if self._bucket is None else self._bucket
        record.spans.append(Span(stage, start, self.clock.mark()))

    def end_exchange(self) -> StepRecord:
        """End and return the record of the current exchange, and begin the next record."""
        record, self.current = self.current, StepRecord(*self._sizes)
        record.end = self.clock.mark()
        if record.backward_end is not None:
            record.exposed.append((record.backward_end, record.end))
        self._append(record)
        return record

    def _append(self, record: StepRecord) -> None:
        self.totals.add(record)
        record.step = self.totals.steps + self.begun_steps
        self.records.append(record)
        self.last = record

    @property
    def last_step(self) -> list[StepRecord]:
        """Records of the optimizer step of the last exchange."""
        return [each for each in self.records if each.step == self.records[-1].step]

    def add_dense_step(self, numel: int, nbytes: int) -> None:
        """Record a dense exchange of ``numel`` gradient elements in ``nbytes``."""
        self._append(StepRecord.of_dense(numel, nbytes, *self._sizes))
        self.samples = self.last_samples = None

    def ask_for_samples(self) -> None:
        """Sample this rank's exchanges until :meth:`stop_sampling`: norms of gradients and residuals, and counts."""
        self.samples = ParameterSamples()

    def stop_sampling(self) -> None:
        """End sampling. :attr:`last_samples` does not change."""
        self.samples = None
