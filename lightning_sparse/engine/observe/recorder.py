"""Gather the facts of a step from the threads on which they happen."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Optional

import torch
from torch import Tensor

from lightning_sparse.compressors.group_selection import GroupSelection
from lightning_sparse.compressors.selection import Selection
from lightning_sparse.engine.observe.clock import Clock, Mark
from lightning_sparse.engine.observe.facts import StepFacts
from lightning_sparse.engine.observe.marks import GroupMarks, Span
from lightning_sparse.engine.observe.samples import ParameterSamples
from lightning_sparse.engine.observe.totals import Totals


class Recorder:
    """Gather the facts of the step in progress, and keep those of the last one that ended.

    Args:
        device: of the gradients.
        ranks: of the training.
        node_ranks: how many of them share a gradient; 1 where there is one level.

    Attributes:
        totals: of all steps so far.
        current: the step in progress; it changes only between two backwards.
        last: the last step that ended.
        watches_gradients: mark when each gradient is ready also where that costs an event of the device; the planner's.
        is_watched: the same, for whoever looks on from outside the engine.
        samples: where the step in progress is to be noted by parameter; ``None`` unless somebody asked.
        last_samples: of the last step for which they were asked.
    """

    def __init__(self, device: torch.device, ranks: int, node_ranks: int = 1) -> None:
        self.clock = Clock(device)
        self.totals = Totals()
        self._ranks = (ranks, node_ranks)
        self.current = StepFacts(*self._ranks)
        self.last: Optional[StepFacts] = None
        self.watches_gradients = False
        self.is_watched = False
        self.samples: Optional[ParameterSamples] = None
        self.last_samples: Optional[ParameterSamples] = None
        self._group: Optional[GroupMarks] = None

    @property
    def total_wire_bytes(self) -> float:
        """Bytes that left this rank in all steps that have ended."""
        return self.totals.wire_bytes

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
    def group(self, names: Sequence[str], ready: Optional[Mark] = None) -> Iterator["GroupObserver"]:
        """Count the spans inside as those of one group, and look at what it is told of."""
        self._group = GroupMarks(tuple(names))
        self._group.ready = ready
        self.current.marks.groups.append(self._group)
        try:
            yield GroupObserver(self._group, self.current, self.samples)
        finally:
            self._group = None

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
        """Time what is done inside, as part of a stage."""
        start = self.clock.mark()
        yield
        marks = self.current.marks if self._group is None else self._group
        marks.spans.append(Span(stage, start, self.clock.mark()))

    def end_step(self) -> StepFacts:
        """Close the facts of this step, open the next, and return the former."""
        self.current.marks.end = self.clock.mark()
        self.current.close()
        self.totals.add(self.current)
        self.last, self.current = self.current, StepFacts(*self._ranks)
        return self.last

    def ask_for_samples(self, counts: bool = True, histograms: bool = False) -> None:
        """Ask for :attr:`last_samples` of the next step. No rank has to do as the others do.

        For their norms, that step reads every gradient and every residual once more.

        Args:
            counts: take note of how many elements of each parameter are sent.
            histograms: count the magnitudes of what is sent and kept; that reads them some more times.
        """
        if self.samples is not None:  # somebody else has asked for the same step
            counts, histograms = counts or self.samples.has_counts, histograms or self.samples.has_histograms
        self.samples = ParameterSamples(counts, histograms)

    def close_samples(
        self,
        kept_after: Callable[[], Mapping[str, Mapping[str, Tensor]]],
        update_norms: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        """Close the samples of a step, if somebody asked for them, with what the memory keeps after it.

        Args:
            kept_after: returns what is kept.
            update_norms: returns the norms of the updates that the step added to it, where gradients do not wait.
        """
        if self.samples is None:
            return
        kept = kept_after()
        self.samples.add_kept({**kept.get("residual", {}), **kept.get("update", {})}, update_norms())
        self.last_samples, self.samples = self.samples, None


class GroupObserver:
    """Observer of a group on its way, which records as much as somebody asked for.

    Args:
        marks: of the group.
        facts: of the step.
        samples: by parameter; ``None`` unless somebody asked.
    """

    def __init__(self, marks: GroupMarks, facts: StepFacts, samples: Optional[ParameterSamples]) -> None:
        self._marks = marks
        self._facts = facts
        self._samples = samples

    def see_gradients(self, gradients: Sequence[Tensor], loss_scale: Optional[Tensor]) -> None:
        """Look at fresh gradients, which were multiplied by ``loss_scale`` (``None`` for 1)."""
        if self._samples is not None:
            self._samples.add_gradients(self._marks.names, gradients, loss_scale)

    def see_selection(self, selection: GroupSelection, counts: Sequence[float]) -> None:
        """Look at what is sent of some of the group's parameters; ``counts`` is what the density of each asks for."""
        self._marks.elements += selection.numel
        if selection.is_whole:
            self._marks.dense_elements += selection.numel
        else:
            self._marks.counts += round(sum(counts))
        self._facts.add_selection(selection)

    def see_means(self, means: GroupSelection) -> None:
        """Look at what arrived of them."""
        self._facts.add_means(means)

    def see_parameters(
        self, names: Sequence[str], sent: Callable[[], Sequence[Selection]], means: Sequence[Selection]
    ) -> None:
        """Look at what was sent and what arrived of each parameter; the host may wait for the former."""
        if self._samples is not None:
            self._samples.add_sent(names, sent(), means)
