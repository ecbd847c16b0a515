"""What was done in a step, and when: gathered on the threads where it happens, read later, so that no step waits."""

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
    """Return what shows a stage to a profiler of torch that is on, as ``sparse.<stage>``."""
    return profiler.record_function(f"sparse.{stage}") if profiler._is_profiler_enabled else nullcontext()


def _no_mark() -> None:
    """Mark nothing: on a device each gradient would cost an event."""


Timestamp = Any  # a host time in seconds (float), or an event of the device
_FP32_BYTES = 4
_ALL = "what all buckets of a step share"
_MAX_RECORDS = 256  # of a step that may never end, or between two lines of a log
_dense_bytes_each = cache(partial(dense_bytes, 1))  # by ranks


class Clock:
    """Mark points in time: on the host's clock for CPU, as events on the current stream elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_host = device.type == "cpu"  # marks are host times, which cost next to nothing

    def mark(self) -> Timestamp:
        """Return the present; on a device, the moment at which the work queued so far has been done."""
        if self.is_host:
            return perf_counter()
        module = torch.get_device_module(self._device)
        event = module.Event(enable_timing=True)
        event.record(module.current_stream(self._device))  # the calling thread may have chosen another device
        return event

    @staticmethod
    def has_passed(mark: Timestamp) -> bool:
        """Tell whether a device has come to a mark, without waiting for it."""
        return isinstance(mark, float) or bool(mark.query())

    @staticmethod
    def seconds(start: Timestamp, end: Timestamp) -> float:
        """Return the seconds between two marks; on a device this waits until both have passed."""
        if isinstance(start, float):
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000.0


class Span(NamedTuple):
    """A stretch of one stage: ``"select"``, ``"encode"``, ``"exchange"`` or ``"commit"``."""

    stage: str
    start: Timestamp
    end: Timestamp


@dataclass
class BucketRecord:
    """The life of one bucket."""

    names: tuple[str, ...]
    elements: int = 0
    counts: int = 0  # elements that the density asked for
    wire_bytes: float = 0.0
    spans: list[Span] = field(default_factory=list)  # in their order; exchanges are at the same time on all ranks

    def seconds(self, *stages: str) -> float:
        """Return the time spent in stages; on a device this waits for them."""
        return _seconds(self.spans, stages)


@dataclass
class StepRecord:
    """What one exchange did, and when, without a tensor of what arrived, so that many can be kept.

    An optimizer step has one for each of its backwards. All seconds wait for a device.
    """

    world_size: int = 1
    local_world_size: int = 1
    elements: float = 0.0  # of gradients to be exchanged; with two levels those of this rank's shares
    wire_bytes: float = 0.0  # by ``sent_bytes``, indices, counts, flags and padding included
    node_bytes: float = 0.0  # those of them for ranks of the same node, with two levels
    step: int = 0  # number of the optimizer step that it is for
    covered_steps: int = 0  # those of a round of local steps; 0 for an exchange of gradients, of one step
    is_logged: bool = False
    is_dense: bool = False  # plain DDP made the exchange, whose times are not known
    is_typical: bool = True  # sends as much as most steps: none of a warm-up, and learns no mean gradient
    sent: list[Union[float, Tensor]] = field(default_factory=list)  # elements, by bucket; of a device not yet asked
    buckets: list[BucketRecord] = field(default_factory=list)  # in the order of exchange
    spans: list[Span] = field(default_factory=list)  # stages that belong to no bucket
    ready: dict[str, Optional[Timestamp]] = field(
        default_factory=dict
    )  # by parameter, in order; on a device if watched
    backward_start: Optional[Timestamp] = None  # if anybody said so
    backward_end: Optional[Timestamp] = None  # the last gradient was ready
    end: Optional[Timestamp] = None  # the last exchange had been written back
    exposed: list[tuple[Timestamp, Timestamp]] = field(default_factory=list)  # in which training stood still

    @classmethod
    def of_dense(cls, numel: int, nbytes: int, world_size: int, local_world_size: int) -> "StepRecord":
        """Return that of an all-reduce of gradients as they are, whose ring leaves each node once."""
        wire_bytes = _dense_bytes_each(world_size) * (nbytes / _FP32_BYTES)
        node_bytes, elements = wire_bytes * (local_world_size - 1) / local_world_size, numel / local_world_size
        return cls(world_size, local_world_size, elements, wire_bytes, node_bytes, is_dense=True, sent=[elements])

    @property
    def dense_bytes(self) -> float:
        """Bytes that would have left this rank in DDP's all-reduces of fp32 gradients."""
        return _dense_bytes_each(self.world_size) * (self.elements * self.local_world_size * max(1, self.covered_steps))

    def seconds(self, *stages: str) -> float:
        """Return the time spent in stages, of buckets and of the exchange as a whole."""
        return _seconds([*chain.from_iterable(bucket.spans for bucket in self.buckets), *self.spans], stages)

    @property
    def backward_seconds(self) -> float:
        """Seconds from the start of backward to the last gradient."""
        has_both = self.backward_start is not None and self.backward_end is not None
        return Clock.seconds(self.backward_start, self.backward_end) if has_both else 0.0

    @property
    def exposed_seconds(self) -> float:
        """Seconds from the last gradient until all means had been written, and of waits after that."""
        return sum(starmap(_exposed, self.exposed))


def _exposed(start: Timestamp, end: Timestamp) -> float:
    """Return the seconds between two marks of which the latter may come first, when nothing was left to wait for."""
    return max(0.0, Clock.seconds(start, end))


def _seconds(spans: Iterable[Span], stages: Container[str]) -> float:
    return sum(Clock.seconds(span.start, span.end) for span in spans if span.stage in stages)


def mean_stats(records: Sequence[StepRecord], has_levels: bool) -> dict[str, float]:
    """Return the public statistics, means over optimizer steps (times: not over plain DDP's); waits for a device."""
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
    """Return those of the steps of which nothing was left to plain DDP."""
    dense = {each.step for each in records if each.is_dense}
    return [each for each in records if each.step not in dense]


def mean_of(records: Sequence[StepRecord], number: Callable[[StepRecord], float]) -> float:
    """Return what the exchanges of an optimizer step come to together, on average; NaN of no step."""
    steps = len({each.step for each in records if not each.covered_steps}) + sum(e.covered_steps for e in records)
    return sum(map(number, records)) / steps if steps else math.nan


def compression_ratio(dense: float, sent: float) -> float:
    """Return how many times fewer bytes were sent than DDP would have sent; 1 where nothing travels."""
    return dense / sent if sent else 1.0


class Totals:
    """Add up what the steps of a training sent, and how long they took, without a wait for a device."""

    def __init__(self) -> None:
        self.steps = 0  # of optimizers, those left to plain DDP included
        self.wire_bytes = self.node_bytes = self.dense_bytes = 0.0
        self._exposed: list[tuple[Timestamp, Timestamp]] = []  # in the step in progress
        self._is_dense = False
        self._paused: Optional[float] = None
        self.forget_times()

    def forget_times(self) -> None:
        """Forget how long the steps so far have taken."""
        self._seconds = self._exposed_seconds = 0.0
        self._unread: deque[tuple[Timestamp, Timestamp]] = (
            deque()
        )  # exposed, and a device may not have come to the end of it
        self._border = perf_counter()

    def add(self, record: StepRecord) -> None:
        """Add an exchange that has ended, as far as the host knows."""
        self.wire_bytes += record.wire_bytes
        self.node_bytes += record.node_bytes
        self.dense_bytes += record.dense_bytes
        self._is_dense |= record.is_dense
        self.expose(record.exposed)

    def expose(self, exposed: Iterable[tuple[Timestamp, Timestamp]]) -> None:
        """Count the time between two marks each as one in which the step in progress stands still."""
        if self._paused is None:
            self._exposed += exposed

    def pause(self) -> None:
        """Count no time until :meth:`resume`: a validation between two batches of a step is no part of it."""
        self._paused = perf_counter() if self._paused is None else self._paused

    def resume(self) -> None:
        """Count time from here on; where nothing was paused, all that went before is no part of a step."""
        now = perf_counter()
        if self._paused is None:
            self._exposed.clear()
        self._border, self._paused = now if self._paused is None else self._border + now - self._paused, None

    def end_step(self) -> None:
        """Count a step of an optimizer."""
        border, self._border = self._border, perf_counter()
        if not self._is_dense:  # of which nobody knows what was exposed
            self._seconds += self._border - border
            self._unread.extend(self._exposed)
        self._exposed.clear()
        self._is_dense = False
        self.steps += 1
        while self._unread and Clock.has_passed(self._unread[0][1]):
            self._exposed_seconds += _exposed(*self._unread.popleft())

    def as_stats(self, has_levels: bool) -> dict[str, float]:
        """Return the public statistics; on a device this may wait."""
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
            # A device may be behind the host, by whose clock steps are timed.
            stats["exposed_share"] = min(1.0, exposed / self._seconds) if self._seconds else math.nan
        return stats


class Recorder:
    """Write the record of the exchange in progress, and keep that of the last one that ended."""

    def __init__(self, device: torch.device, world_size: int, local_world_size: int = 1) -> None:
        self.clock = Clock(device)
        self._sizes = (world_size, local_world_size)
        self.has_levels = local_world_size > 1  # some ranks share a gradient
        self.current = StepRecord(*self._sizes)  # changes only between two backwards
        self.forget()
        self.begun_steps = 0  # some of which have not ended, as no optimizer has stepped
        self.watches_gradients = False  # mark each, also where that costs an event of the device
        self.samples: Optional[ParameterSamples] = None  # of the exchanges since somebody asked
        self.last_samples: Optional[ParameterSamples] = None  # the last that an exchange was part of
        self.subject = _ALL  # what an exchange is about that is made now, to be named in an error
        self._bucket: Optional[BucketRecord] = None

    def forget(self) -> None:
        """Forget the steps so far, of a training that goes on from another state than theirs."""
        self.totals = Totals()
        self.last: Optional[StepRecord] = None  # that ended, with the engine or with plain DDP
        self.records = deque[StepRecord](maxlen=_MAX_RECORDS)  # that ended last

    def begin_backward(self) -> None:
        """Record that a backward begins; of several in one step the last one counts."""
        self.current.backward_start = self.clock.mark()

    def end_backward(self) -> None:
        """Record that the last gradient is ready."""
        self.current.backward_end = self.clock.mark()

    def mark_of_gradients(self) -> Callable[[], Optional[Timestamp]]:
        """Return what marks that a gradient is ready, in the exchange in progress."""
        if self.clock.is_host:
            return perf_counter
        return self.clock.mark if self.watches_gradients else _no_mark

    @contextmanager
    def bucket(self, names: Sequence[str]) -> Iterator[None]:
        """Count what is recorded inside as that of one bucket."""
        self._bucket = BucketRecord(tuple(names))
        self.current.buckets.append(self._bucket)
        self.subject = f"the bucket of {len(names)} parameters from {names[0]!r} to {names[-1]!r}"
        try:
            yield
        finally:
            self._bucket, self.subject = None, _ALL

    def see_selection(self, selection: Sequence[Selection], counts: Sequence[float]) -> None:
        """Look at what is sent of some of the bucket's parameters; ``counts`` is what the density of each asks for."""
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
        """Record that bytes leave this rank, maybe for others of its node."""
        self.current.wire_bytes += count
        self.current.node_bytes += count * is_inside_node
        if self._bucket is not None:
            self._bucket.wire_bytes += count

    @contextmanager
    def of_last_step(self, subject: str, is_counted: bool = True) -> Iterator[None]:
        """Count bytes that leave this rank inside, between two steps, as the last one's, if there was any, or not."""
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
        """Count what is done inside as time in which training stands still, after the last exchange's step."""
        start = self.clock.mark()
        yield
        exposed = [(start, self.clock.mark())]
        if self.last is not None:
            self.last.exposed += exposed
            self.last.spans += [Span("exchange", *each) for each in exposed if is_exchange]
        self.totals.expose(exposed)

    @contextmanager
    def span(self, stage: str) -> Iterator[None]:
        """Time what is done inside, as part of a stage; to a profiler of torch that is on it is ``sparse.<stage>``."""
        with shown(stage):
            start = self.clock.mark()
            yield
        record = self.current if self._bucket is None else self._bucket
        record.spans.append(Span(stage, start, self.clock.mark()))

    def end_exchange(self) -> StepRecord:
        """Close the record of this exchange, open the next, and return the former."""
        record, self.current = self.current, StepRecord(*self._sizes)
        record.end = self.clock.mark()
        if record.backward_end is not None:
            record.exposed.append((record.backward_end, record.end))
        self._keep(record)
        return record

    def _keep(self, record: StepRecord) -> None:
        self.totals.add(record)
        record.step = self.totals.steps + self.begun_steps
        self.records.append(record)
        self.last = record

    @property
    def last_step(self) -> list[StepRecord]:
        """All of the optimizer step that goes on, or of the last one if none has come since."""
        return [each for each in self.records if each.step == self.records[-1].step]

    def add_dense_step(self, numel: int, nbytes: int) -> None:
        """Record a step whose gradients, of so many elements and bytes, plain DDP exchanges."""
        self._keep(StepRecord.of_dense(numel, nbytes, *self._sizes))
        self.samples = self.last_samples = None

    def ask_for_samples(self) -> None:
        """Ask for :attr:`last_samples` of the exchanges until :meth:`stop_sampling`, on any ranks.

        Norms read gradients and residuals once more.
        """
        self.samples = ParameterSamples()

    def stop_sampling(self) -> None:
        """Ask for nothing more; what has been gathered stays."""
        self.samples = None
