"""Records of elements, bytes and times of each step. Only reading a record may synchronize with the GPU."""

import math
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor
from torch.autograd import profiler

from lightning_sparse.compressors.selection import FlatSelection, Selection, sent_count
from lightning_sparse.engine.samples import ParameterSamples
from lightning_sparse.schedule.costs import dense_bytes, sent_bytes


def shown(stage: str) -> AbstractContextManager[Any]:
    """Return a context that a running torch profiler shows as ``sparse.<stage>``."""
    return profiler.record_function(f"sparse.{stage}") if profiler._is_profiler_enabled else nullcontext()


Timestamp = Any  # host time in seconds (float), or a CUDA event
_dense_bytes_each = cache(partial(dense_bytes, 1))  # bytes per element of DDP's all-reduce, by world size
_ALL = "data that all buckets of a step share"
_MAX_RECORDS = 256  # maximum number of stored records, which limits the memory


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
        event.record(module.current_stream(self._device))  # The thread's current device may be another device.
        return event

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
    counts: int = 0  # number of elements that the densities of the parameters ask for
    wire_bytes: float = 0.0
    spans: list[Span] = field(default_factory=list)  # times of the stages, in order

    def seconds(self, *stages: str) -> float:
        """Return the total seconds of the named stages. Synchronizes with the GPU."""
        return _seconds(self.spans, stages)


@dataclass
class StepRecord:
    """Elements, bytes and times of an exchange. A record has no received tensors, so many records fit into memory.

    An optimizer step has one record for each backward with an exchange. Reading seconds synchronizes with the GPU.
    """

    world_size: int = 1
    local_world_size: int = 1
    elements: float = 0.0  # number of gradient elements; with two levels only elements of this rank's parts
    wire_bytes: float = 0.0  # bytes that this rank sends, including indices, counts, flags and padding
    node_bytes: float = 0.0  # part of wire_bytes that stays inside the node, with two levels
    step: int = 0  # number that all exchanges of one optimizer step share; not consecutive
    covered_steps: int = 0  # number of local steps in the exchanged round; 0 for an exchange of gradients
    is_logged: bool = False  # whether CompressionMonitor has logged the record
    is_dense: bool = False  # whether gradients were averaged as in DDP; such a record has no times
    is_typical: bool = True  # False in Adam's warm-up, which sends more elements than later steps
    sent: list[Union[float, Tensor]] = field(default_factory=list)  # numbers of sent elements, perhaps on a GPU
    buckets: list[BucketRecord] = field(default_factory=list)  # records of buckets in the order of exchange
    spans: list[Span] = field(default_factory=list)  # times of stages outside of buckets
    ready: dict[str, Optional[Timestamp]] = field(default_factory=dict)  # ready times by name, in exchange order
    backward_start: Optional[Timestamp] = None  # start of backward; None if no hook recorded the start
    backward_end: Optional[Timestamp] = None  # time when the last gradient was ready
    end: Optional[Timestamp] = None  # time when all means had been written
    exposed: list[tuple[Timestamp, Timestamp]] = field(default_factory=list)  # intervals in which training waited

    @classmethod
    def of_dense(cls, numel: int, nbytes: int, world_size: int, local_world_size: int) -> "StepRecord":
        """Return the record of a dense ring all-reduce of ``numel`` elements. One rank per node sends to another."""
        wire_bytes = sent_bytes("all_reduce", nbytes, world_size)
        node_bytes, elements = wire_bytes * (local_world_size - 1) / local_world_size, numel / local_world_size
        return cls(world_size, local_world_size, elements, wire_bytes, node_bytes, is_dense=True, sent=[elements])

    @property
    def dense_bytes(self) -> float:
        """Bytes that this rank would have sent with DDP for the same steps, in all-reduces of fp32 gradients."""
        return _dense_bytes_each(self.world_size) * (self.elements * self.local_world_size * max(1, self.covered_steps))

    def seconds(self, *stages: str) -> float:
        """Return the total seconds of the named stages, inside and outside of buckets."""
        return _seconds([*chain.from_iterable(bucket.spans for bucket in self.buckets), *self.spans], stages)

    @property
    def backward_seconds(self) -> float:
        """Seconds from the start of backward to the last gradient."""
        has_both = self.backward_start is not None and self.backward_end is not None
        return Clock.seconds(self.backward_start, self.backward_end) if has_both else 0.0

    @property
    def exposed_seconds(self) -> float:
        """Seconds in which training waited: from the last gradient to the last written mean, and in later waits."""
        # The end may precede the start, if the exchange ended before the wait began.
        return sum(max(0.0, Clock.seconds(*each)) for each in self.exposed)


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


def compressed(records: Collection[StepRecord]) -> list[StepRecord]:
    """Return the records of optimizer steps in which every exchange was compressed."""
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
    """Sums of bytes over all steps of a training, and the seconds of the last steps."""

    def __init__(self) -> None:
        self.steps = 0  # optimizer steps, including steps with DDP's dense gradients
        self.wire_bytes = self.node_bytes = self.dense_bytes = 0.0
        self.forget_times()

    def forget_times(self) -> None:
        """Drop the seconds of all steps."""
        self._seconds = deque[float](maxlen=_MAX_RECORDS)
        self._border = perf_counter()  # host time in seconds when the current step began

    def add(self, record: StepRecord) -> None:
        """Add the record of an exchange. The GPU may still run the exchange."""
        self.wire_bytes += record.wire_bytes
        self.node_bytes += record.node_bytes
        self.dense_bytes += record.dense_bytes

    def end_step(self, is_dense: bool) -> None:
        """End an optimizer step. The seconds of a step with DDP's dense gradients do not count."""
        border, self._border = self._border, perf_counter()
        self.steps += 1
        if not is_dense:
            self._seconds.append(self._border - border)

    def as_stats(self, has_levels: bool, exposed_seconds: float) -> dict[str, float]:
        """Return the public statistics. ``exposed_seconds`` are a mean over the last steps, or NaN."""
        stats = {
            "total_wire_bytes": self.wire_bytes,
            "total_dense_bytes": self.dense_bytes,
            "total_compression_ratio": compression_ratio(self.dense_bytes, self.wire_bytes),
        }
        if has_levels:
            stats["total_inter_node_bytes"] = self.wire_bytes - self.node_bytes
        if self.steps:
            stats["total_steps"] = float(self.steps)
            # The median excludes validations, which make the time between two steps longer. Host time may be shorter
            # than exposed GPU time, because the GPU may be behind the host.
            share = exposed_seconds / median(self._seconds) if self._seconds else math.nan
            stats["exposed_share"] = min(share, 1.0)  # NaN stays NaN in this order of arguments
        return stats


class Recorder:
    """Record the current exchange, and store the records of earlier exchanges."""

    def __init__(self, device: torch.device, world_size: int, local_world_size: int = 1) -> None:
        self.clock = Clock(device)
        self._sizes = (world_size, local_world_size)
        self.has_levels = local_world_size > 1  # whether the ranks of a node divide each gradient into parts
        self.current = StepRecord(*self._sizes)  # record of the current exchange; replaced only between backwards
        self.forget()
        self.watches_gradients = False  # whether each ready gradient gets a timestamp, even on a GPU
        self.samples: Optional[ParameterSamples] = None  # norms and counts of this exchange; None if not requested
        self.last_samples: Optional[ParameterSamples] = None  # norms and counts of the last sampled exchange
        self.subject = _ALL  # description of the exchanged data, for error messages
        self._bucket: Optional[BucketRecord] = None

    def forget(self) -> None:
        """Drop all records, because the training continues from another state."""
        self.totals = Totals()
        self.records = deque[StepRecord](maxlen=_MAX_RECORDS)  # records of the last complete exchanges

    def begin_backward(self) -> None:
        """Record the start of a backward. Of several backwards before an exchange, the last backward counts."""
        self.current.backward_start = self.clock.mark()

    def end_backward(self) -> None:
        """Record the time when the last gradient was ready."""
        self.current.backward_end = self.clock.mark()

    def mark_gradient(self) -> Optional[Timestamp]:
        """Return the timestamp of a ready gradient, or ``None`` on a GPU, where a timestamp costs a CUDA event."""
        return self.clock.mark() if self.clock.is_host or self.watches_gradients else None

    @contextmanager
    def bucket(self, names: Sequence[str]) -> Iterator[None]:
        """Begin a bucket. Elements, bytes and times that are recorded inside the context belong to this bucket."""
        self._bucket = BucketRecord(tuple(names))
        self.current.buckets.append(self._bucket)
        self.subject = f"the bucket of {len(names)} parameters from {names[0]!r} to {names[-1]!r}"
        try:
            yield
        finally:
            self._bucket, self.subject = None, _ALL

    def see_selection(self, selection: Sequence[Selection], counts: Sequence[float]) -> None:
        """Count the sent elements of a bucket. ``counts`` are the numbers that the parameters' densities ask for."""
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
        """Record sent bytes. With ``is_inside_node`` all receivers are ranks of this node."""
        self.current.wire_bytes += count
        self.current.node_bytes += count * is_inside_node
        if self._bucket is not None:
            self._bucket.wire_bytes += count

    @contextmanager
    def of_last_step(self, subject: str, is_counted: bool = True) -> Iterator[None]:
        """Count bytes sent inside the context as bytes of the last exchange. Without ``is_counted`` ignore bytes."""
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

    @contextmanager
    def span(self, stage: str) -> Iterator[None]:
        """Record the time inside the context for a stage. A running torch profiler shows the stage, too."""
        with shown(stage):
            start = self.clock.mark()
            yield
        record = self.current if self._bucket is None else self._bucket
        record.spans.append(Span(stage, start, self.clock.mark()))

    def end_exchange(self) -> StepRecord:
        """End the record of the current exchange, begin the next record, and return the ended record."""
        record, self.current = self.current, StepRecord(*self._sizes)
        record.end = self.clock.mark()
        if record.backward_end is not None:
            record.exposed.append((record.backward_end, record.end))
        self._append(record)
        return record

    def _append(self, record: StepRecord) -> None:
        self.totals.add(record)
        record.step = self.totals.steps
        self.records.append(record)

    @property
    def last(self) -> Optional[StepRecord]:
        """The last complete exchange, or ``None``."""
        return self.records[-1] if self.records else None

    def end_step(self) -> None:
        """End an optimizer step."""
        self.totals.end_step(self.last is not None and self.last.is_dense)

    def total_stats(self) -> dict[str, float]:
        """Return the public statistics of the whole training. Synchronizes with the GPU."""
        exposed = mean_of(compressed(self.records), lambda each: each.exposed_seconds)
        return self.totals.as_stats(self.has_levels, exposed)

    @property
    def last_step(self) -> list[StepRecord]:
        """All records of the optimizer step to which the last exchange belongs."""
        return [each for each in self.records if each.step == self.records[-1].step]

    def add_dense_step(self, numel: int, nbytes: int) -> None:
        """Record an exchange of ``numel`` dense gradient elements, which take ``nbytes`` bytes."""
        self._append(StepRecord.of_dense(numel, nbytes, *self._sizes))
        self.samples = self.last_samples = None

    def ask_for_samples(self) -> None:
        """Record norms of gradients and residuals, and counts of sent elements, until :meth:`stop_sampling`."""
        self.samples = ParameterSamples()

    def stop_sampling(self) -> None:
        """End sampling. :attr:`last_samples` does not change."""
        self.samples = None
