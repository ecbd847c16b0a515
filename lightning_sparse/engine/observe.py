"""Records of elements, bytes and times of each step. Only reading a record may synchronize with the GPU."""

import math
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor
from torch.autograd import profiler

from lightning_sparse.compressors.selection import FlatSelection, Selection, sent_count
from lightning_sparse.schedule.costs import dense_bytes, sent_bytes


def shown(stage: str) -> AbstractContextManager[Any]:
    """Return a context that a running torch profiler shows as ``sparse.<stage>``."""
    return profiler.record_function(f"sparse.{stage}") if profiler._is_profiler_enabled else nullcontext()


Timestamp = Any  # host time in seconds (float), or a CUDA event
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
    """The time of one stage of a step: ``"backward"``, ``"select"``, ``"encode"``, ``"exchange"``, ``"commit"``.

    ``"exposed"`` is time in which training waits for means: after the last gradient, or in an exchange of parameters.
    """

    stage: str
    start: Timestamp
    end: Timestamp


@dataclass
class BucketRecord:
    """Elements, bytes and times of a bucket's exchange."""

    names: tuple[str, ...]
    elements: int = 0
    counts: int = 0  # number of elements that the densities of the parameters ask for
    spans: list[Span] = field(default_factory=list)  # times of the stages, in order

    def seconds(self, *stages: str) -> float:
        """Return the total seconds of the named stages. Synchronizes with the GPU."""
        return _seconds(self.spans, stages)


@dataclass
class StepRecord:
    """Elements, bytes and times of an exchange. A record has no received tensors, so many records fit into memory.

    An optimizer step has one record for each backward with an exchange. Reading seconds synchronizes with the GPU.
    """

    elements: float = 0.0  # number of gradient elements; with two levels only elements of this rank's parts
    wire_bytes: float = 0.0  # bytes that this rank sends, including indices, counts, flags and padding
    node_bytes: float = 0.0  # part of wire_bytes that stays inside the node, with two levels
    dense_bytes: float = 0.0  # bytes that this rank would have sent with DDP for the same steps, in fp32
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

    def seconds(self, *stages: str) -> float:
        """Return the total seconds of the named stages, inside and outside of buckets."""
        return _seconds([*chain.from_iterable(bucket.spans for bucket in self.buckets), *self.spans], stages)


def _seconds(spans: Iterable[Span], stages: Container[str]) -> float:
    # The end may precede the start, if the exchange ended before the wait began.
    return sum(max(0.0, Clock.seconds(span.start, span.end)) for span in spans if span.stage in stages)


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
        "exposed_seconds": mean_of(ours, lambda each: each.seconds("exposed")),
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


class ParameterFacts(NamedTuple):
    """Norms and counts of one parameter in a step, as plain numbers."""

    numel: int
    sent: float  # number of elements that this rank sent
    gradient_norm: float  # norm of this rank's unscaled gradient, without the residual
    residual_norm: float  # norm of the residual after the step; 0 without a residual
    added_norm: float  # norm of the tensor added to the residual: the gradient, or with AdamCorrection the update


class ParameterSamples:
    """Collect norms and counts as tensors on the device, so that only :meth:`facts` waits for the device.

    With several exchanges in a step, a norm is the root of the sum of the squared norms of all exchanges.
    """

    def __init__(self) -> None:
        self.update_norms: dict[str, Tensor] = {}  # norms of updates, with AdamCorrection
        self._numels: dict[str, int] = {}
        self._gradient_norms: dict[str, Tensor] = {}
        self._residual_norms: dict[str, Tensor] = {}
        self._sent: dict[str, Union[int, Tensor]] = {}

    def add_gradients(self, names: Sequence[str], gradients: Sequence[Tensor], scale: Optional[Tensor]) -> None:
        """Record the norms of gradients before the residual is added. ``scale`` is the loss scale, ``None`` for 1."""
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(list(gradients))])
        norms = norms if scale is None else norms / scale
        self._gradient_norms.update(_with_earlier(dict(zip(names, norms.unbind())), self._gradient_norms))
        self._numels.update((name, gradient.numel()) for name, gradient in zip(names, gradients))

    def add_sent(self, names: Sequence[str], sent: Sequence[Selection]) -> None:
        """Record how many elements of each parameter this rank sent."""
        self._sent.update(zip(names, map(sent_count, sent)))

    def add_kept(self, residuals: Mapping[str, Tensor], update_norms: Mapping[str, Tensor]) -> None:
        """Record the norms of residuals and, with AdamCorrection, of updates."""
        # ``update_norms`` may still have parameters that are frozen now.
        norms = {name: norm.float() for name, norm in update_norms.items() if name in self._gradient_norms}
        self.update_norms.update(_with_earlier(norms, self.update_norms))
        names = [name for name in self._gradient_norms if name in residuals]
        if names:
            kept = torch._foreach_norm([residuals[name] for name in names])
            self._residual_norms.update((name, norm.float()) for name, norm in zip(names, kept))

    def facts(self) -> dict[str, ParameterFacts]:
        """Return norms and counts as numbers, by parameter name. The host waits for the device."""
        gradients, residuals = self._gradient_norms, self._residual_norms
        if not gradients:
            return {}
        nothing = torch.zeros_like(next(iter(gradients.values())))
        kinds = [gradients, {name: residuals.get(name, nothing) for name in gradients}, gradients | self.update_norms]
        columns = torch.stack([torch.stack([norms[name] for name in gradients]) for norms in kinds]).double().tolist()
        sent = (float(self._sent[name]) for name in gradients)
        return {name: ParameterFacts(self._numels[name], *row) for name, *row in zip(gradients, sent, *columns)}


def _with_earlier(norms: dict[str, Tensor], earlier: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Combine each norm with an earlier norm of the same name: return the root of the sum of squares."""
    return {name: norm.hypot(earlier[name]) if name in earlier else norm for name, norm in norms.items()}


@dataclass
class Totals:
    """Sums of bytes over all steps of a training, and the seconds of the last steps."""

    steps: int = 0  # optimizer steps, including steps with DDP's dense gradients
    begun: int = 0  # optimizer steps that began an exchange of compressed gradients, including skipped steps
    wire_bytes: float = 0.0
    node_bytes: float = 0.0
    dense_bytes: float = 0.0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_RECORDS))  # durations of compressed steps
    border: float = field(default_factory=lambda: perf_counter())  # host time when the current step began


class Recorder:
    """Record the current exchange, and store the records of earlier exchanges."""

    def __init__(self, device: torch.device, world_size: int, local_world_size: int = 1) -> None:
        self.clock = Clock(device)
        self._sizes = (world_size, local_world_size)
        self._dense_bytes_each = dense_bytes(1, world_size)  # bytes of DDP per element
        self.has_levels = local_world_size > 1  # whether the ranks of a node divide each gradient into parts
        self.current = StepRecord()  # record of the current exchange; replaced only between backwards
        self.reset()
        self.watches_gradients = False  # whether each ready gradient gets a timestamp, even on a GPU
        self.samples: Optional[ParameterSamples] = None  # norms and counts of this exchange; None if not requested
        self.last_samples: Optional[ParameterSamples] = None  # norms and counts of the last sampled exchange
        self.on_record: Optional[Callable[[StepRecord], None]] = None  # set while the planner makes trials
        self.subject = _ALL  # description of the exchanged data, for error messages
        self._bucket: Optional[BucketRecord] = None

    def reset(self) -> None:
        """Drop all records, because the training continues from another state."""
        self.totals = Totals()
        self.records = deque[StepRecord](maxlen=_MAX_RECORDS)  # records of the last complete exchanges

    def begin_backward(self) -> None:
        """Record the start of a backward. Of several backwards before an exchange, the last backward counts."""
        self.current.backward_start = self.clock.mark()

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

    def see_selection(self, selection: Sequence[Selection], count: int) -> None:
        """Count the sent elements of a bucket. The densities ask for ``count`` elements."""
        if isinstance(selection, FlatSelection):
            numel, sent, asked = sum(selection.numels), sent_count(selection), count
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

    @contextmanager
    def of_last_step(self, subject: str) -> Iterator[None]:
        """Add bytes and times inside the context to the last exchange. Errors name ``subject``."""
        current, self.current, self.subject = self.current, StepRecord(), subject
        try:
            yield
        finally:
            late, self.current, self.subject = self.current, current, _ALL
            if self.last is not None:
                self.last.wire_bytes += late.wire_bytes
                self.last.spans += late.spans
                self.totals.wire_bytes += late.wire_bytes

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Add the time inside the context to the last exchange, as exposed time."""
        start = self.clock.mark()
        yield
        if self.last is not None:
            self.last.spans.append(Span("exposed", start, self.clock.mark()))

    @contextmanager
    def span(self, stage: str) -> Iterator[None]:
        """Record the time inside the context for a stage. A running torch profiler shows the stage, too."""
        with shown(stage):
            start = self.clock.mark()
            yield
        (self._bucket or self.current).spans.append(Span(stage, start, self.clock.mark()))

    def end_exchange(self) -> StepRecord:
        """End the record of the current exchange, begin the next record, and return the ended record."""
        record, self.current = self.current, StepRecord()
        record.end = self.clock.mark()
        if record.backward_end is not None:
            record.spans.append(Span("exposed", record.backward_end, record.end))
            if record.backward_start is not None:
                record.spans.append(Span("backward", record.backward_start, record.backward_end))
        self._append(record)
        return record

    def _append(self, record: StepRecord) -> None:
        elements = record.elements * self._sizes[1] * max(1, record.covered_steps)
        record.dense_bytes = self._dense_bytes_each * elements
        self.totals.wire_bytes += record.wire_bytes
        self.totals.node_bytes += record.node_bytes
        self.totals.dense_bytes += record.dense_bytes
        record.step = self.totals.steps + self.totals.begun
        self.records.append(record)

    @property
    def last(self) -> Optional[StepRecord]:
        """The last complete exchange, or ``None``."""
        return self.records[-1] if self.records else None

    def end_step(self) -> None:
        """End an optimizer step."""
        totals, now = self.totals, perf_counter()
        totals.steps += 1
        if self.last is None or not self.last.is_dense:
            totals.seconds.append(now - totals.border)
        totals.border = now

    def total_stats(self) -> dict[str, float]:
        """Return the public statistics of the whole training. Synchronizes with the GPU."""
        totals = self.totals
        stats = {
            "total_wire_bytes": totals.wire_bytes,
            "total_dense_bytes": totals.dense_bytes,
            "total_compression_ratio": compression_ratio(totals.dense_bytes, totals.wire_bytes),
        }
        if self.has_levels:
            stats["total_inter_node_bytes"] = totals.wire_bytes - totals.node_bytes
        if totals.steps:
            stats["total_steps"] = float(totals.steps)
            # A median ignores the few steps with validations. GPU time divided by host time may exceed 1.
            exposed = mean_of(compressed(self.records), lambda each: each.seconds("exposed"))
            share = exposed / median(totals.seconds) if totals.seconds else math.nan
            stats["exposed_share"] = min(share, 1.0)  # NaN stays NaN in this order of arguments
        return stats

    @property
    def last_step(self) -> list[StepRecord]:
        """All records of the optimizer step to which the last exchange belongs."""
        return [each for each in self.records if each.step == self.records[-1].step]

    def add_dense_step(self, numel: int, nbytes: int) -> None:
        """Record a ring all-reduce of ``numel`` dense gradient elements, which take ``nbytes`` bytes.

        One rank per node sends to other nodes.
        """
        world_size, local_world_size = self._sizes
        elements, wire_bytes = numel / local_world_size, sent_bytes("all_reduce", nbytes, world_size)
        node_bytes = wire_bytes * (local_world_size - 1) / local_world_size
        self._append(StepRecord(elements, wire_bytes, node_bytes, is_dense=True, sent=[elements]))
        self.samples = self.last_samples = None
