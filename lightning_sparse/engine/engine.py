"""The engine: builds the nouns for one wrapped model, starts the worker and registers the hook."""

import logging
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Optional

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.density.table import Densities
from lightning_sparse.compressors.feedback import Clipping, Hyperparameters
from lightning_sparse.compressors.layout import ModelLayout, layout_of
from lightning_sparse.engine.adam.memory import AdamMemory
from lightning_sparse.engine.collectives import Collectives, Uncopied
from lightning_sparse.engine.local_steps import Rounds
from lightning_sparse.engine.observe import Recorder, StepMarks, mean_stats
from lightning_sparse.engine.planning.planner import StepPlanner
from lightning_sparse.engine.replicas import ReplicaAverager
from lightning_sparse.engine.settings import Settings
from lightning_sparse.engine.step.arrived import ArrivedGradients
from lightning_sparse.engine.step.hook import GradientStream
from lightning_sparse.engine.step.node import Node
from lightning_sparse.engine.step.step import Exchanged, Pipeline, StepContext
from lightning_sparse.engine.step.worker import ExchangeWorker
from lightning_sparse.engine.wire import Wires, build_wires
from lightning_sparse.schedule import Merged, Schedule
from lightning_sparse.schedule.plan import Plan

_LOGGER = logging.getLogger(__name__)
_ARRIVAL_BYTES = 12  # of an element that a rank has selected: its value, and its place as int64
_RESIDUAL_BYTES = 4


class Engine(Uncopied):
    """Exchange the gradients of one wrapped model, until closed.

    Args:
        ddp: the wrapped model. It should have been built with the ``bucket_cap_mb`` that
            :func:`~lightning_sparse.engine.step.hook.bucket_cap_mb` returns; its communication hook is registered here.
        settings: what the user chose.
        timeout: how long an exchange may wait for its peers; ``None`` for the backend's default.
        say: called on rank 0 with lines for the user.
        node_ranks: how many ranks, one after the other, are on one node and average their gradients there first; 1 for
            one level.
        begin: called on the thread of backward before the first gradients of a step are taken, where nobody calls
            :meth:`begin_backward` before backward begins.

    Attributes:
        arrived: what exchanges have brought of gradients whose step is not over.
        densities: how much is sent of each parameter; rules may raise it between two steps, alike on all ranks.
        memory: what is kept.
        pipeline: what every group goes through.
        recorder: the facts of the steps.
        rounds: of local steps; ``None`` where gradients are exchanged in every step.

    Raises:
        RuntimeError: if the backend lacks a collective that the compressor needs.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        settings: Settings,
        timeout: Optional[timedelta] = None,
        say: Callable[[str], None] = _LOGGER.info,
        node_ranks: int = 1,
        begin: Optional[Callable[[], None]] = None,
    ) -> None:
        parameters = list(ddp.module.parameters())
        device = parameters[0].device
        self._settings, self._begin = settings, begin
        self.arrived = ArrivedGradients()
        everybody = dist.get_process_group_ranks(ddp.process_group)
        self.recorder = Recorder(device, len(everybody), node_ranks)
        self._collectives = Collectives(everybody, device, timeout)
        self._node, self._across = _levels_of(self._collectives, everybody, node_ranks, timeout)
        compressor = settings.compressor
        self.densities = Densities(compressor, settings.density_at(0))
        ranks = self._across.ranks
        wires = _wires_of(settings, self._across.rank, ranks)
        self._collectives.check(wires.collectives)
        if wires.owners is None and compressor.wire_format == "gather":
            _tell_of_memory(_ARRIVAL_BYTES * ranks * settings.density, node_ranks, say)
        self._layout = layout_of(ddp.module, self._collectives.rank, self._collectives.ranks, device)
        self._numels = self._exchanged_numels()
        self._learned: Optional[Mapping[str, Any]] = None
        self._epoch = 0
        compressor.begin(self._exchanged_layout())
        # Those of frozen parameters, too: they may be unfrozen.
        dtypes = {each.dtype for each in parameters if each.is_floating_point()}
        self.memory = settings.memory_for(dtypes, ranks, None if self._node is None else self._node.share_of)
        self.pipeline = Pipeline(
            compressor,
            self.memory,
            wires,
            self._across,
            self.recorder,
            self.densities.of,
            self._node,
            self._collectives,
        )
        self._worker = ExchangeWorker(device)
        diverges, every = compressor.replicas_diverge, compressor.param_sync_every
        self._averager = ReplicaAverager(ddp.module, self._collectives, every) if diverges else None
        self._planner = None if settings.local_steps else self._planner_of(settings.schedule, say)
        self._stream = None if settings.local_steps else self._stream_from(ddp)
        self.rounds = self._rounds_of(ddp, say)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of the parameters whose gradients are exchanged, in the order of the model."""
        return self._layout.names

    @property
    def topology(self) -> tuple[int, int]:
        """How many ranks there are, and how many of a node share what is kept; 1 where there is one level."""
        return self._collectives.ranks, 1 if self._node is None else self._node.ranks

    def share_of(self, flat: Tensor) -> Tensor:
        """Return the part of a flat tensor of a parameter's size that this rank exchanges and keeps."""
        return flat if self._node is None else self._node.share_of(flat)

    def _exchanged_layout(self) -> ModelLayout:
        """Return what is exchanged, and between whom, as compressors see it."""
        node = self._node
        if node is None:
            return self._layout
        numels = tuple(map(node.share_numel, self._layout.numels))
        return self._layout._replace(numels=numels, rank=self._across.rank, ranks=self._across.ranks)

    def _exchanged_numels(self) -> dict[str, int]:
        layout = self._exchanged_layout()
        return dict(zip(layout.names, layout.numels))

    def _stream_from(self, ddp: DistributedDataParallel) -> GradientStream:
        schedule, overlaps = self._settings.schedule, self._settings.overlaps_backward
        worker, recorder = self._worker, self.recorder
        holds = self._settings.feedback.has_moments or ddp.find_unused_parameters or ddp.static_graph
        arrived = self.arrived if holds else None
        return GradientStream(
            ddp, self.pipeline, schedule, worker, recorder, self._end_step, overlaps, self._begin, arrived
        )

    @property
    def used_parameters(self) -> Optional[AbstractSet[Parameter]]:
        """Parameters that have taken part since the last exchange; ``None`` where that is not tracked."""
        return None if self._stream is None else self._stream.used

    def _rounds_of(self, ddp: DistributedDataParallel, say: Callable[[str], None]) -> Optional[Rounds]:
        local, schedule = self._settings.local_steps, self._settings.schedule
        if local is None:
            return None
        names, worker, recorder = self._layout.names, self._worker, self.recorder
        return Rounds(ddp.module, names, local, self.pipeline, schedule, worker, recorder, self._collectives, say)

    def _end_step(self, step: Sequence[Exchanged]) -> None:
        """Finish a step all of whose groups have arrived; on the worker, before the next backward can begin."""
        self.pipeline.commit(step)
        marks = self.recorder.end_step().marks
        # Now, so that it does not count as time of the step.
        self.recorder.close_samples(self.memory.state_dict, self.memory.update_norms)
        if self._planner is not None:
            self._planner.end_step(marks)

    def detach(self) -> None:
        """Let go of the wrapped model, between two steps; what is kept stays."""
        if self.rounds is not None:
            self.synchronize_replicas()
        if self._stream is not None:
            self._stream.close()

    def attach(self, ddp: DistributedDataParallel) -> None:
        """Exchange the gradients of a new wrapper of the same model from now on, whichever are trained now.

        What is kept of a parameter waits until it is trained again.
        """
        layout = layout_of(ddp.module, *self._layout[2:5])
        if layout != self._layout:
            self._worker.run(lambda: self._train_others(layout))
        if self._planner is not None:
            self._planner.expect_other_order()
        if self.rounds is None:
            self._stream = self._stream_from(ddp)
        else:
            self.rounds.follow(ddp.module, layout.names)

    def _train_others(self, layout: ModelLayout) -> None:
        compressor = self._settings.compressor
        # What was read from a checkpoint may be of the parameters that are trained from now on.
        learned = compressor.state_dict() if self._learned is None else dict(self._learned)
        self._layout = layout
        compressor.begin(self._exchanged_layout())
        compressor.load_state_dict(learned)
        self._numels.update(self._exchanged_numels())

    def plan_anew(self) -> None:
        """Measure what things cost once more, from the next step on; all ranks must call."""
        if self._planner is not None:
            self._planner.start_anew()

    def leave_optimizers(self) -> None:
        """Prepare for steps of plain DDP, in which optimizers learn from gradients again."""
        self.arrived.clear()
        if isinstance(self.memory, AdamMemory):
            self._worker.run(self.memory.leave)

    @property
    def compressor(self) -> Compressor:
        """The compressor."""
        return self.pipeline.compressor

    @property
    def corrects_adam(self) -> bool:
        """Whether the updates of Adam or AdamW are made before selection."""
        return isinstance(self.memory, AdamMemory)

    def target_density(self, name: str) -> float:
        """Return the density of a parameter when warm-up is over, as the user asked for it."""
        return self.compressor.density_of(name, self._settings.density)

    def target_densities(self) -> dict[str, float]:
        """Return those of all parameters whose gradients are exchanged, by name."""
        return {name: self.target_density(name) for name in self.parameter_names}

    def present_densities(self) -> dict[str, float]:
        """Return the density of each parameter in the next step, by name."""
        return {name: self.densities.of(name) for name in self.parameter_names}

    def clip(self, clipping: Clipping) -> None:
        """Clip gradients before compression from the next step on, where the optimizer is corrected; on all ranks."""
        if isinstance(self.memory, AdamMemory):
            self.memory.clip_to(clipping)

    def mean_over_ranks(self, number: float) -> float:
        """Return the mean of a number over ranks, which all must call between two steps; the host waits for it."""
        means: list[float] = []
        self._worker.run(lambda: means.append(float(self._collectives.gather_numbers([number]).mean())))
        return means[0]

    def send_all(self, is_wanted: bool) -> None:
        """Send every gradient whole in the next steps, with what waits; all ranks must call."""
        self.densities.sends_all = is_wanted

    def _planner_of(self, schedule: Schedule, say: Callable[[str], None]) -> Optional[StepPlanner]:
        if not isinstance(schedule, Merged):
            return None
        return StepPlanner(
            schedule,
            self._collectives,
            self.recorder,
            self._numels,
            self.densities,
            self._settings.adapts_density,
            self.pipeline.waits_for_whole_step or not self._settings.overlaps_backward,
            say,
        )

    def begin_backward(
        self,
        loss_scale: Optional[Tensor] = None,
        hyperparameters: Mapping[str, Hyperparameters] = MappingProxyType({}),
        epoch: int = 0,
        whole: AbstractSet[str] = frozenset(),
        settled: float = 1.0,
    ) -> None:
        """Begin a step: its backward comes next.

        Args:
            loss_scale: what its loss was multiplied by, tensor of one element on the gradients' device; ``None`` for 1.
            hyperparameters: what the optimizer does, by parameter name.
            epoch: from 0.
            whole: names of the parameters whose gradients are sent whole, whatever the compressor; as on all ranks.
            settled: how much of the warm-up of corrected optimizers lies behind, from 0 to 1.
        """
        self._learned = None
        self.recorder.begin_backward()
        self.recorder.current.marks.is_typical = settled >= 1
        self.pipeline.context = StepContext(loss_scale, hyperparameters, whole, self.recorder.samples_deltas)
        self.densities.density = self._settings.density_at(epoch, settled)

    def begin_plain_backward(self) -> None:
        """Begin a backward whose gradients plain DDP exchanges."""
        self.recorder.add_plain_step(self._layout.numel)

    def end_step(self, optimizer: int = 0, epoch: int = 0, agreed: Sequence[float] = ()) -> None:
        """End a step after the optimizer's; average the replicas, or exchange what has changed, where that is due.

        Args:
            optimizer: its number.
            epoch: from 0.
            agreed: numbers that have to be the same on all ranks where a round ends.
        """
        self.recorder.totals.end_step()
        if self.rounds is not None:
            self._epoch = epoch
            self.rounds.end_step(optimizer, self._begin_exchange, agreed)
            return
        self.recorder.samples_deltas = False
        if self._averager is not None and self._averager.count_step():
            self.synchronize_replicas()

    def _begin_exchange(self) -> Callable[[], StepContext]:
        """Return what the worker calls before an exchange of local steps that begins now: others come before it."""
        epoch = self._epoch
        samples_deltas, self.recorder.samples_deltas = self.recorder.samples_deltas, False

        def prepare() -> StepContext:
            self.densities.density = self._settings.density_at(epoch)
            return StepContext(samples_deltas=samples_deltas)

        return prepare

    def synchronize_replicas(self) -> None:
        """Make all replicas one, where the method lets them drift apart; all ranks must call.

        Parameters and buffers are averaged over ranks; a round of local steps is closed.
        """
        if self.rounds is not None:
            self.rounds.close(self._begin_exchange)
        if self._averager is not None:
            self._worker.run(self._averager.make_one)
            self.recorder.add_to_last(self._averager.sent_bytes)

    @property
    def plan(self) -> Optional[Plan]:
        """The plan in force; ``None`` if the schedule follows none, or none yet."""
        return None if self._planner is None else self._planner.plan

    @property
    def last_marks(self) -> Optional[StepMarks]:
        """Marks of the stages of the last step that ended; ``None`` before the first."""
        return None if self.recorder.last is None else self.recorder.last.marks

    def raise_error(self) -> None:
        """Raise what the exchange worker has raised, if it has."""
        self._worker.raise_error()

    def compression_stats(self) -> dict[str, float]:
        """Return the facts of the last step that ended; empty before the first."""
        recorder = self.recorder
        if recorder.last is None:
            return {}
        waited_seconds = None if self.rounds is None else self.rounds.total_waited_seconds
        totals = recorder.totals.as_stats(recorder.has_levels, waited_seconds)
        stats = {**mean_stats([recorder.last], recorder.has_levels), **totals}
        if recorder.last.is_plain:
            return stats
        if self.rounds is not None:
            return self.rounds.in_stats(stats)
        return stats if self._averager is None else {**stats, "replica_divergence": float(self._averager.divergence)}

    def settle(self) -> None:
        """Wait until the exchanges that are queued have been done, so that :meth:`state_dict` is that of a whole step.

        Raises:
            BaseException: what the exchange worker has raised.
        """
        self._worker.run(lambda: None)

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept and what the method has learned, as plain tensors and numbers (not copied)."""
        state = {"memory": self.memory.state_dict(), "compressor": self._settings.compressor.state_dict()}
        if self.plan is not None:
            state["plan"] = {**self.plan.state_dict(), "schedule": type(self._settings.schedule).__name__}
        if self.rounds is not None:
            state["rounds"] = self.rounds.state_dict()
        return state if self._averager is None else {**state, "averager": self._averager.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace those parts that ``state`` holds by a copy; the others stay as they are.

        Raises:
            ValueError: if a part is that of another method.
        """

        def load() -> None:
            if "memory" in state:
                self.memory.load_state_dict(state["memory"])
            if "compressor" in state:
                self._settings.compressor.load_state_dict(state["compressor"])
                self._learned = state["compressor"]
            if self.rounds is not None and "rounds" in state:
                self.rounds.load_state_dict(state["rounds"])
            if self._averager is not None and "averager" in state:
                self._averager.load_state_dict(state["averager"])

        # On a device the copies are then memory of the worker's stream, which alone reads them. It drops some of them
        # when it has been told to read them, but has not yet: memory of another stream would be written over.
        self._worker.run(load)

    def restore_plan(self, state: Mapping[str, Any], topology: tuple[int, int]) -> bool:
        """Follow the plan of a run before; return whether it is for these ranks, this schedule, these parameters."""
        is_ours = topology == self.topology and state["schedule"] == type(self._settings.schedule).__name__
        return is_ours and self._planner is not None and self._planner.restore(state)

    def close(self, has_failed: bool = False) -> bool:
        """End the worker and give the process group back; safe to call twice.

        Args:
            has_failed: whether training ends by an error of this rank, so that others may wait for it.

        Returns:
            whether what is kept is that of a whole step: no exchange has failed, or hangs.
        """
        if self._stream is not None:
            self._stream.close()
        # A worker that hangs in a collective still needs the process group that it hangs in.
        has_ended = self._worker.close()
        if has_ended:
            inside = [] if self._node is None else [self._across, self._node.collectives]
            for collectives in (*inside, self._collectives):
                collectives.close(has_failed or self._worker.error is not None)
        return has_ended and self._worker.error is None


def _levels_of(
    collectives: Collectives, everybody: list[int], node_ranks: int, timeout: Optional[timedelta]
) -> tuple[Optional[Node], Collectives]:
    """Return this rank's node, ``None`` where there is one level, and the ranks that it exchanges selections with."""
    if node_ranks == 1:
        return None, collectives
    nodes = [everybody[first : first + node_ranks] for first in range(0, len(everybody), node_ranks)]
    rows = [list(row) for row in zip(*nodes)]  # of ranks with the same share
    number, place = divmod(collectives.rank, node_ranks)
    node = Node(Collectives(nodes[number], collectives.device, timeout, nodes))
    node.collectives.check(("all_to_all", "all_gather"))
    return node, Collectives(rows[place], collectives.device, timeout, rows)


def _wires_of(settings: Settings, rank: int, ranks: int) -> Wires:
    compressor = settings.compressor
    # While Adam's second moment is learned, everything is sent whole, whatever the compressor.
    dense_format = compressor.dense_wire_format or (None if settings.feedback.adam is None else "reduce")
    return build_wires(
        compressor.wire_format, dense_format, settings.wire, rank, ranks, settings.exchange, settings.wire_bits
    )


def _tell_of_memory(arrival_bytes: float, shared_by: int, say: Callable[[str], None]) -> None:
    """Say so where what arrives in a step takes more bytes for each element than the residual, of what ranks share."""
    if arrival_bytes > _RESIDUAL_BYTES:
        say(
            f"what arrives in a step takes {arrival_bytes / shared_by:.1f} bytes for each parameter, beside"
            f" {_RESIDUAL_BYTES / shared_by:g} for what waits: exchange='auto' takes ways that do not grow with the"
            " number of ranks."
        )
