"""Gather the facts of a step from the threads on which they happen."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Optional

import torch
from torch import Tensor
from torch.autograd import profiler

from lightning_sparse.compressors.group_selection import GroupSelection
from lightning_sparse.compressors.selection import Selection
from lightning_sparse.engine.observe.facts import StepFacts, Totals
from lightning_sparse.engine.observe.marks import Clock, GroupMarks, Mark, Span
from lightning_sparse.engine.observe.samples import ParameterSamples


class Recorder:
    """Gather the facts of the step in progress, and keep those of the last one that ended."""

    def __init__(self, device: torch.device, ranks: int, node_ranks: int = 1) -> None:
        self.clock = Clock(device)
        self.totals = Totals()
        self._ranks = (ranks, node_ranks)
        self.has_levels = node_ranks > 1  # some ranks share a gradient
        self.current = StepFacts(*self._ranks)  # changes only between two backwards
        self.last: Optional[StepFacts] = None  # that ended, with the engine or with plain DDP
        self.watches_gradients = False  # mark each, also where that costs an event of the device; the planner's
        self.is_watched = False  # the same, for whoever looks on from outside the engine
        self.samples_deltas = False  # of the next step, on all ranks: costs a dense all-reduce
        self.samples: Optional[ParameterSamples] = None  # of the step in progress, if somebody asked
        self.last_samples: Optional[ParameterSamples] = None  # of the last step for which they were asked
        self._group: Optional[GroupMarks] = None

    def begin_backward(self) -> None:
        """Record that a backward begins; of several in one step the last one counts."""
        self.current.marks.backward_start = self.clock.mark()

    def end_backward(self) -> None:
        """Record that the last gradient is ready."""
        self.current.marks.backward_end = self.clock.mark()

    def add_ready(self, names: Sequence[str]) -> None:
        """Record that gradients are ready, those of a bucket at once."""
        is_marked = self.clock.is_host or self.watches_gradients or self.is_watched
        self.current.marks.ready.update(dict.fromkeys(names, self.clock.mark() if is_marked else None))

    @contextmanager
    def group(self, names: Sequence[str], ready: Optional[Mark] = None) -> Iterator[None]:
        """Count what is recorded inside as that of one group."""
        self._group = GroupMarks(tuple(names), ready)
        self.current.marks.groups.append(self._group)
        try:
            yield
        finally:
            self._group = None

    def see_gradients(self, gradients: Sequence[Tensor], loss_scale: Optional[Tensor]) -> None:
        """Look at the group's fresh gradients, which were multiplied by ``loss_scale`` (``None`` for 1)."""
        if self.samples is not None and self._group is not None:
            self.samples.add_gradients(self._group.names, gradients, loss_scale)

    def see_selection(self, selection: GroupSelection, counts: Sequence[float]) -> None:
        """Look at what is sent of some of the group's parameters; ``counts`` is what the density of each asks for."""
        self.current.add_selection(selection)
        if self._group is not None:
            self._group.elements += selection.numel
            if selection.is_whole:
                self._group.dense_elements += selection.numel
            else:
                self._group.counts += round(sum(counts))

    def see_sent(self, names: Sequence[str], sent: Callable[[], Sequence[Selection]]) -> None:
        """Look at what is sent of each parameter, for which the host may wait."""
        if self.samples is not None:
            self.samples.add_sent(names, sent())

    def add_bytes(self, count: float, is_inside_node: bool = False) -> None:
        """Record that bytes leave this rank, maybe for others of its node."""
        self.current.wire_bytes += count
        self.current.node_bytes += count * is_inside_node
        if self._group is not None:
            self._group.wire_bytes += count

    def add_to_last(self, count: float) -> None:
        """Record that bytes have left this rank that belong to the last step."""
        if self.last is not None:
            self.last.wire_bytes += count
            self.totals.wire_bytes += count

    @contextmanager
    def span(self, stage: str) -> Iterator[None]:
        """Time what is done inside, as part of a stage; to a profiler of torch that is on it is ``sparse.<stage>``."""
        is_profiled = profiler._is_profiler_enabled
        with profiler.record_function(f"sparse.{stage}") if is_profiled else nullcontext():
            start = self.clock.mark()
            yield
        marks = self.current.marks if self._group is None else self._group
        marks.spans.append(Span(stage, start, self.clock.mark()))

    def end_step(self) -> StepFacts:
        """Close the facts of this step, open the next, and return the former."""
        self.current.marks.end = self.clock.mark()
        self.totals.add(self.current)
        self.last, self.current = self.current, StepFacts(*self._ranks)
        return self.last

    def add_plain_step(self, numel: int) -> None:
        """Record a step whose gradients, of so many elements, plain DDP exchanges."""
        self.last = StepFacts.of_plain_ddp(numel, *self._ranks)
        self.samples = self.last_samples = None
        self.totals.add(self.last)

    def ask_for_samples(self, counts: bool = True, histograms: bool = False) -> None:
        """Ask for :attr:`last_samples` of the next step, on any ranks; norms read gradients and residuals once more."""
        if self.samples is not None:  # somebody else has asked for the same step
            counts, histograms = counts or self.samples.has_counts, histograms or self.samples.has_histograms
        self.samples = ParameterSamples(counts, histograms)

    def close_samples(
        self,
        kept_after: Callable[[], Mapping[str, Mapping[str, Tensor]]],
        update_norms: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        """Close the samples of a step, if asked for, with what the memory keeps after it.

        ``update_norms`` returns the norms of the updates that the step added to it, where gradients do not wait.
        """
        if self.samples is None:
            return
        kept = kept_after()
        self.samples.add_kept({**kept.get("residual", {}), **kept.get("update", {})}, update_norms())
        self.last_samples, self.samples = self.samples, None
