"""What was done in a step, and when: gathered on the threads where it happens, read later, so that no step waits."""

import math
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from itertools import chain, starmap
from time import perf_counter
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor
from torch.autograd import profiler

from lightning_sparse.compressors.selection import FlatSelection, Selection, sent_count
from lightning_sparse.schedule.network import dense_bytes


def shown(stage: str) -> AbstractContextManager[Any]:
    """Return what shows a stage to a profiler of torch that is on, as ``sparse.<stage>``."""
    return profiler.record_function(f"sparse.{stage}") if profiler._is_profiler_enabled else nullcontext()


class ParameterFacts(NamedTuple):
    """Facts of one parameter in a step, as plain numbers."""

    numel: int
    sent: float  # elements of this rank; NaN if they were not counted
    gradient_norm: float  # of this rank's, before anything was added to it, without the loss scale
    residual_norm: float  # of what is kept after the step; 0 where nothing is
    added_norm: float  # of what the step added to the residual: the gradient, or the update where updates wait


class ParameterSamples:
    """Gather what steps do to each parameter, as tensors of the device, and read it when nobody waits.

    Of several exchanges norms of what is new add up as squares: most parameters are used in one of them.
    """

    def __init__(self, has_counts: bool = True) -> None:
        self.has_counts = has_counts  # of elements that are sent
        self.update_norms: dict[str, Tensor] = {}  # of updates that the step added, where updates wait
        self._numels: dict[str, int] = {}
        self._gradient_norms: dict[str, Tensor] = {}
        self._residual_norms: dict[str, Tensor] = {}
        self._sent: dict[str, Union[int, Tensor]] = {}

    def add_gradients(self, names: Sequence[str], gradients: Sequence[Tensor], scale: Optional[Tensor]) -> None:
        """Record fresh gradients that were multiplied by ``scale`` (``None`` for 1)."""
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(list(gradients))])
        norms = norms if scale is None else norms / scale
        self._gradient_norms.update(_with_earlier(dict(zip(names, norms.unbind())), self._gradient_norms))
        self._numels.update((name, gradient.numel()) for name, gradient in zip(names, gradients))

    def add_sent(self, names: Sequence[str], sent: Sequence[Selection]) -> None:
        """Record what this rank sends of parameters."""
        if self.has_counts:
            self._sent.update(zip(names, map(sent_count, sent)))

    def add_kept(self, residuals: Mapping[str, Tensor], update_norms: Mapping[str, Tensor]) -> None:
        """Record what is kept of the parameters whose gradients were seen, and what was added where updates wait."""
        # The memory may know of others, which were frozen before.
        norms = {name: norm.float() for name, norm in update_norms.items() if name in self._gradient_norms}
        self.update_norms.update(_with_earlier(norms, self.update_norms))
        names = [name for name in self._gradient_norms if name in residuals]
        if names:
            kept = torch._foreach_norm([residuals[name] for name in names])
            self._residual_norms.update((name, norm.float()) for name, norm in zip(names, kept))

    def norms(self) -> tuple[float, float]:
        """Return the norms of the whole gradient of this rank, and of all that it keeps; on a device this waits."""
        gradient, residual = (
            torch.stack(list(norms.values())).double().norm() if norms else torch.zeros(())
            for norms in (self._gradient_norms, self._residual_norms)
        )
        return float(gradient), float(residual)

    def update_error(self) -> float:
        """Return the norm of all updates that wait over that of those that were added; on a device this waits.

        NaN where none was added.
        """
        if not self.update_norms:
            return math.nan
        waiting = torch.stack([self._residual_norms[name] for name in self.update_norms])
        return float(waiting.norm() / torch.stack(list(self.update_norms.values())).norm())

    def facts(self) -> dict[str, ParameterFacts]:
        """Return plain numbers by parameter name; on a device this waits for them, all at once."""
        facts: list[Union[int, float, Tensor]] = []
        for name, gradient in self._gradient_norms.items():
            norms = gradient, self._residual_norms.get(name, 0.0), self.update_norms.get(name, gradient)
            facts.extend((self._sent.get(name, math.nan), *norms))
        tensors = [fact.double() for fact in facts if isinstance(fact, Tensor)]
        asked = iter(torch.stack(tensors).tolist() if tensors else [])
        numbers = iter([next(asked) if isinstance(fact, Tensor) else float(fact) for fact in facts])
        rows = zip(*[numbers] * 4)
        return {name: ParameterFacts(self._numels[name], *row) for name, row in zip(self._gradient_norms, rows)}


def _with_earlier(norms: dict[str, Tensor], earlier: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the norms of vectors at right angles to those of ``earlier`` norms, together with them."""
    return {name: norm.hypot(earlier[name]) if name in earlier else norm for name, norm in norms.items()}


def _no_mark() -> None:
    """Mark nothing: on a device each gradient would cost an event."""


Mark = Any  # a host time in seconds (float), or an event of the device
_FP32_BYTES = 4
_MOST_RECORDS = 256  # of a step that may never end, or between two lines of a log
_dense_bytes_each = cache(partial(dense_bytes, 1))  # by ranks


class Clock:
    """Mark points in time: on the host's clock for CPU, as events on the current stream elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_host = device.type == "cpu"  # marks are host times, which cost next to nothing

    def mark(self) -> Mark:
        """Return the present; on a device, the moment at which the work queued so far has been done."""
        if self.is_host:
            return perf_counter()
        module = torch.get_device_module(self._device)
        event = module.Event(enable_timing=True)
        event.record(module.current_stream(self._device))  # the calling thread may have chosen another device
        return event

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

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.elements = 0
        self.counts = 0  # elements that the density asked for
        self.wire_bytes = 0.0
        self.spans: list[Span] = []  # in their order; exchanges are at the same time on all ranks

    def seconds(self, *stages: str) -> float:
        """Return the time spent in stages; on a device this waits for them."""
        return _seconds(self.spans, stages)


class ExchangeRecord:
    """What one exchange did, and when, without a tensor of what arrived, so that many can be kept.

    An optimizer step has one for each of its backwards. All seconds wait for a device.
    """

    def __init__(self, ranks: int = 1, node_ranks: int = 1) -> None:
        self._ranks = ranks
        self._node_ranks = node_ranks
        self.elements = 0.0  # of gradients to be exchanged; with two levels those of this rank's shares
        self.wire_bytes = 0.0  # by ``sent_bytes``, indices, counts, flags and padding included
        self.node_bytes = 0.0  # those of them for ranks of the same node, with two levels
        self.step = 0  # number of the optimizer step that it is for
        self.covered_steps = 0  # those of a round of local steps; 0 for an exchange of gradients, of one step
        self.is_logged = False
        self.is_dense = False  # plain DDP made the exchange, whose times are not known
        self.is_typical = True  # sends as much as most steps: none of a warm-up, and learns no mean gradient
        self.sent: list[Union[float, Tensor]] = []  # elements, by group; tensors as the device has not been asked
        self.backward_start: Optional[Mark] = None  # if anybody said so
        self.ready: dict[str, Optional[Mark]] = {}  # by parameter, in this order; on a device none unless watched
        self.groups: list[GroupMarks] = []  # in the order of exchange
        self.spans: list[Span] = []  # stages that belong to no group
        self.waits: list[tuple[Mark, Mark]] = []  # after the optimizer's step, in which training stood still
        self.backward_end: Optional[Mark] = None  # the last gradient was ready
        self.end: Optional[Mark] = None  # the last exchange had been written back

    @classmethod
    def of_dense(cls, numel: int, nbytes: int, ranks: int, node_ranks: int) -> "ExchangeRecord":
        """Return that of an all-reduce of gradients as they are, whose ring leaves each node once."""
        record = cls(ranks, node_ranks)
        record.is_dense, record.elements = True, numel / node_ranks
        record.sent.append(record.elements)
        record.wire_bytes = _dense_bytes_each(ranks) * (nbytes / _FP32_BYTES)
        record.node_bytes = record.wire_bytes * (node_ranks - 1) / node_ranks
        return record

    @property
    def dense_bytes(self) -> float:
        """Bytes that would have left this rank in DDP's all-reduces of fp32 gradients."""
        return _dense_bytes_each(self._ranks) * (self.elements * self._node_ranks * max(1, self.covered_steps))

    def seconds(self, *stages: str) -> float:
        """Return the time spent in stages, of groups and of the exchange as a whole."""
        return _seconds([*chain.from_iterable(group.spans for group in self.groups), *self.spans], stages)

    @property
    def backward_seconds(self) -> float:
        """Seconds from the start of backward to the last gradient."""
        known = self.backward_start is not None and self.backward_end is not None
        return Clock.seconds(self.backward_start, self.backward_end) if known else 0.0

    @property
    def exposed_seconds(self) -> float:
        """Seconds from the last gradient until all means had been written, and of waits after that."""
        known = self.backward_end is not None and self.end is not None
        return (_exposed(self.backward_end, self.end) if known else 0.0) + sum(starmap(_exposed, self.waits))


def _exposed(start: Mark, end: Mark) -> float:
    """Return the seconds between two marks of which the latter may come first, when nothing was left to wait for."""
    return max(0.0, Clock.seconds(start, end))


def _seconds(spans: Iterable[Span], stages: Container[str]) -> float:
    return sum(Clock.seconds(span.start, span.end) for span in spans if span.stage in stages)


def mean_stats(records: Sequence[ExchangeRecord], has_levels: bool) -> dict[str, float]:
    """Return the public statistics, means over optimizer steps (times: not over plain DDP's); waits for a device."""
    wire_bytes = mean_of(records, lambda each: each.wire_bytes)
    dense = mean_of(records, lambda each: each.dense_bytes)
    ours = compressed(records)
    sent = sum(chain.from_iterable(each.sent for each in records))
    return {
        "density": float(sent) / max(1, sum(each.elements for each in records)),
        "wire_bytes": wire_bytes,
        **({"link_bytes": wire_bytes - mean_of(records, lambda each: each.node_bytes)} if has_levels else {}),
        "dense_bytes": dense,
        "compression_ratio": compression_ratio(dense, wire_bytes),
        "select_seconds": mean_of(ours, lambda each: each.seconds("select", "encode")),
        "exchange_seconds": mean_of(ours, lambda each: each.seconds("exchange")),
        "exposed_seconds": mean_of(ours, lambda each: each.exposed_seconds),
    }


def compressed(records: Sequence[ExchangeRecord]) -> list[ExchangeRecord]:
    """Return those of the steps of which nothing was left to plain DDP."""
    dense = {each.step for each in records if each.is_dense}
    return [each for each in records if each.step not in dense]


def mean_of(records: Sequence[ExchangeRecord], number: Callable[[ExchangeRecord], float]) -> float:
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
        self._exposed: list[tuple[Mark, Mark]] = []  # in the step in progress
        self._is_dense = False
        self._paused: Optional[float] = None
        self.forget_times()

    def forget_times(self) -> None:
        """Forget how long the steps so far have taken."""
        self._seconds = self._exposed_seconds = 0.0
        self._unread: deque[tuple[Mark, Mark]] = deque()  # exposed, and a device may not have come to the end of it
        self._border = perf_counter()

    def add(self, record: ExchangeRecord) -> None:
        """Add an exchange that has ended, as far as the host knows."""
        self.wire_bytes += record.wire_bytes
        self.node_bytes += record.node_bytes
        self.dense_bytes += record.dense_bytes
        if record.is_dense:
            self._is_dense = True
        elif record.backward_end is not None and record.end is not None:
            self.expose(record.backward_end, record.end)

    def expose(self, start: Mark, end: Mark) -> None:
        """Count the time between two marks as one in which the step in progress stands still."""
        if self._paused is None:
            self._exposed.append((start, end))

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
            stats["total_link_bytes"] = self.wire_bytes - self.node_bytes
        if self.steps:
            stats["total_steps"] = float(self.steps)
            exposed = self._exposed_seconds + sum(starmap(_exposed, self._unread))
            # A device may be behind the host, by whose clock steps are timed.
            stats["exposed_share"] = min(1.0, exposed / self._seconds) if self._seconds else math.nan
        return stats


class Recorder:
    """Write the record of the exchange in progress, and keep that of the last one that ended."""

    def __init__(self, device: torch.device, ranks: int, node_ranks: int = 1) -> None:
        self.clock = Clock(device)
        self._ranks = (ranks, node_ranks)
        self.has_levels = node_ranks > 1  # some ranks share a gradient
        self.current = ExchangeRecord(*self._ranks)  # changes only between two backwards
        self.forget()
        self.begun_steps = 0  # some of which have not ended, as no optimizer has stepped
        self.watches_gradients = False  # mark each, also where that costs an event of the device
        self.samples: Optional[ParameterSamples] = None  # of the exchanges since somebody asked
        self.last_samples: Optional[ParameterSamples] = None  # the last that an exchange was part of
        self._group: Optional[GroupMarks] = None

    def forget(self) -> None:
        """Forget the steps so far, of a training that goes on from another state than theirs."""
        self.totals = Totals()
        self.last: Optional[ExchangeRecord] = None  # that ended, with the engine or with plain DDP
        self.records = deque[ExchangeRecord](maxlen=_MOST_RECORDS)  # that ended last

    def begin_backward(self) -> None:
        """Record that a backward begins; of several in one step the last one counts."""
        self.current.backward_start = self.clock.mark()

    def end_backward(self) -> None:
        """Record that the last gradient is ready."""
        self.current.backward_end = self.clock.mark()

    def mark_of_gradients(self) -> Callable[[], Optional[Mark]]:
        """Return what marks that a gradient is ready, in the exchange in progress."""
        if self.clock.is_host:
            return perf_counter
        return self.clock.mark if self.watches_gradients else _no_mark

    @contextmanager
    def group(self, names: Sequence[str]) -> Iterator[None]:
        """Count what is recorded inside as that of one group."""
        self._group = GroupMarks(tuple(names))
        self.current.groups.append(self._group)
        try:
            yield
        finally:
            self._group = None

    @property
    def subject(self) -> str:
        """What an exchange is about that is made now, to be named in an error."""
        if self._group is None:
            return "what all groups of a step share"
        names = self._group.names
        return f"the group of {len(names)} parameters from {names[0]!r} to {names[-1]!r}"

    def see_selection(self, selection: Sequence[Selection], counts: Sequence[float]) -> None:
        """Look at what is sent of some of the group's parameters; ``counts`` is what the density of each asks for."""
        if isinstance(selection, FlatSelection):
            numel, sent, asked = sum(selection.numels), sent_count(selection), round(sum(counts))
        else:
            numel = sent = asked = sum(each.numel for each in selection)
        self.current.elements += numel
        self.current.sent.append(sent)
        if self._group is not None:
            self._group.elements += numel
            self._group.counts += asked

    def add_bytes(self, count: float, is_inside_node: bool = False) -> None:
        """Record that bytes leave this rank, maybe for others of its node."""
        self.current.wire_bytes += count
        self.current.node_bytes += count * is_inside_node
        if self._group is not None:
            self._group.wire_bytes += count

    def add_to_last(self, count: float) -> None:
        """Record bytes that the last exchange has sent."""
        if self.last is not None:
            self.last.wire_bytes += count
            self.totals.wire_bytes += count

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count what is done inside as an exchange of the last step for which training stands still."""
        start = self.clock.mark()
        yield
        end = self.clock.mark()
        if self.last is not None:
            self.last.spans.append(Span("exchange", start, end))
        self.expose(start, end)

    def expose(self, start: Mark, end: Mark) -> None:
        """Count the time between two marks, after the last exchange's step, as one in which training stands still."""
        if self.last is not None:
            self.last.waits.append((start, end))
        self.totals.expose(start, end)

    @contextmanager
    def span(self, stage: str) -> Iterator[None]:
        """Time what is done inside, as part of a stage; to a profiler of torch that is on it is ``sparse.<stage>``."""
        with shown(stage):
            start = self.clock.mark()
            yield
        record = self.current if self._group is None else self._group
        record.spans.append(Span(stage, start, self.clock.mark()))

    def end_exchange(self) -> ExchangeRecord:
        """Close the record of this exchange, open the next, and return the former."""
        self.current.end = self.clock.mark()
        record, self.current = self.current, ExchangeRecord(*self._ranks)
        self._keep(record)
        return record

    def _keep(self, record: ExchangeRecord) -> None:
        self.totals.add(record)
        record.step = self.totals.steps + self.begun_steps
        self.records.append(record)
        self.last = record

    @property
    def last_step(self) -> list[ExchangeRecord]:
        """All of the optimizer step that goes on, or of the last one if none has come since."""
        return [each for each in self.records if each.step == self.records[-1].step]

    def add_dense_step(self, numel: int, nbytes: int) -> None:
        """Record a step whose gradients, of so many elements and bytes, plain DDP exchanges."""
        self._keep(ExchangeRecord.of_dense(numel, nbytes, *self._ranks))
        self.samples = self.last_samples = None

    def ask_for_samples(self, counts: bool = True) -> None:
        """Ask for :attr:`last_samples` of the exchanges until :meth:`stop_sampling`, on any ranks.

        Norms read gradients and residuals once more.
        """
        # Somebody else may have asked for the same step.
        self.samples = ParameterSamples(counts or (self.samples is not None and self.samples.has_counts))

    def stop_sampling(self) -> None:
        """Ask for nothing more; what has been gathered stays."""
        self.samples = None
