"""The engine: builds the nouns for one model, starts the worker, and takes the gradients."""

import logging
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, Optional
from weakref import proxy

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sparse.compressors.base import ModelLayout, layout_of, trained_in
from lightning_sparse.engine.collectives import Communicator, SharedOnCopy, backend_of, timeout_of_job
from lightning_sparse.engine.local_steps import LocalStepsController
from lightning_sparse.engine.memory.residual import Memory, Renaming, renamed
from lightning_sparse.engine.observe import Recorder, mean_stats
from lightning_sparse.engine.planner import Planner, StepPlanner
from lightning_sparse.engine.replicas import AveragedReplicas, ReplicaAverager, Replicas, averaged
from lightning_sparse.engine.settings import Settings
from lightning_sparse.engine.shared_model import SharedModel
from lightning_sparse.engine.step.backward import ReducerContext
from lightning_sparse.engine.step.reduced import ReducedGradients
from lightning_sparse.engine.step.reducer import SparseReducer, Wrapper
from lightning_sparse.engine.step.step import EMPTY_CONTEXT, Pipeline, StepContext
from lightning_sparse.engine.step.topology import (
    FlatTopology,
    HierarchicalTopology,
    ShardedModel,
    Shards,
    Topology,
    named_module,
)
from lightning_sparse.engine.step.worker import ExchangeWorker
from lightning_sparse.engine.wire import Wires
from lightning_sparse.schedule import Merged

_LOGGER = logging.getLogger(__name__)
_RECEIVED_BYTES = 12  # of an element that a rank has selected: its value, and its place as int64
_RESIDUAL_BYTES = 4


class Engine(SharedOnCopy):
    """Exchange the gradients of one wrapped model, until closed; they are taken from here on.

    ``local_world_size`` of a node average their gradients first, or have done so where they hold one replica in shards.
    ``begin`` is called before a backward's first gradient is taken, and told whether anybody has told of it; ``end`` is
    called when gradients are means. Between two steps ``densities`` may be raised, alike on all ranks.
    """

    def __init__(
        self,
        ddp: Wrapper,
        settings: Settings,
        timeout: Optional[timedelta] = None,
        log: Callable[[str], None] = _LOGGER.info,
        local_world_size: int = 1,
        begin: Callable[[bool], None] = lambda is_explicit: None,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self.module = module = named_module(ddp)
        compressor = settings.compressor
        if settings.replicas_diverge:
            # It refuses what cannot be averaged, before a thread runs.
            averaged(chain(module.named_parameters(), module.named_buffers()))
        device, trained = next(module.parameters()).device, trained_in(module)
        # NCCL takes memory for each group. Those of others serve where nothing travels while others may send, too.
        is_nccl, has_their_timeout = backend_of(device) == "nccl", timeout in (None, timeout_of_job(device))
        shares_groups = is_nccl and local_world_size > 1 and has_their_timeout and not settings.overlaps_backward
        levels = _levels_between(device, ddp, local_world_size, timeout, shares_groups)
        wires = _wires_between(levels, settings, log)
        memory = _memory_of(module, settings, levels)

        self.levels, self.memory = levels, memory
        self.recorder = levels.inter.recorder
        self.reduced = ReducedGradients()
        self.densities = settings.densities()
        self._settings = settings
        self.wrapper, self._broadcasts_buffers = ddp, ddp.broadcast_buffers
        self._numels: dict[str, int] = {}  # that this rank exchanges, by name, also of what is exchanged no more
        self._begin(self._layout_of(trained))  # it may raise, before a thread runs
        self.planner = self._planner_of(settings, log)
        self.pipeline = Pipeline(compressor, memory, wires, levels, self.densities.of, self.planner)
        self.worker = ExchangeWorker(device)
        self.reducer = self._reducer_from(ddp, begin, end)
        self.replicas = self._replicas_of(module)
        self.reducer.track(trained)
        self.send_dense(False)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of the parameters whose gradients are exchanged, in the order of the model."""
        return self._layout.names

    @property
    def topology(self) -> Topology:
        """Who keeps what."""
        return Topology(self.levels.world.world_size, self.levels.local_world_size)

    def _reducer_from(self, ddp: Wrapper, begin: Callable[[bool], None], end: Callable[[], None]) -> SparseReducer:
        settings = self._settings
        parts = (self.worker, self.reduced, self.levels.same_shard)
        is_sharded = isinstance(ddp, ShardedModel)
        route = ReducerContext(self.pipeline, settings.schedule, *parts, settings.overlaps_backward, is_sharded, {})
        return SparseReducer(ddp, route, begin, end, is_dense=settings.local_steps is not None)

    def _replicas_of(self, module: nn.Module) -> Replicas:
        settings = self._settings
        if (local := settings.local_steps) is not None:
            shared = SharedModel(module, self.parameter_names, local, self.pipeline, settings.schedule, self.worker)
            begin = partial(type(self)._begin_exchange, proxy(self))  # no cycle, in which memory waits for a collection
            return LocalStepsController(local, shared, self.levels.world, self.worker, begin)
        if settings.replicas_diverge:
            averager = ReplicaAverager(module, self.levels.world)
            return AveragedReplicas(averager, settings.compressor.param_sync_every, self.worker)
        return Replicas()

    @property
    def rounds(self) -> Optional[LocalStepsController]:
        """Rounds of local steps; ``None`` where gradients are exchanged in every step."""
        return self.replicas if isinstance(self.replicas, LocalStepsController) else None

    def _layout_of(self, trained: Mapping[str, Tensor]) -> ModelLayout:
        world = self.levels.world
        return layout_of(self.module, world.rank, world.world_size, world.device, trained)

    def _begin(self, layout: ModelLayout) -> None:
        """Set what the compressor works on."""
        self._layout, inter = layout, self.levels.inter
        numels = tuple(map(self.levels.share_numel, layout.numels))
        self._settings.compressor.begin(layout._replace(numels=numels, rank=inter.rank, world_size=inter.world_size))
        self._numels.update(zip(layout.names, numels))

    def restart(self, trained: Mapping[str, Tensor], names: Renaming) -> None:
        """Exchange these parameters of the model from the next backward on; all ranks call, between two.

        State of a parameter follows it from the name that it had to the one that it has by ``names``, if it has one.
        """
        layout = self._layout_of(trained)
        if self.rounds is not None:
            self.rounds.restart(layout.names, names)

        def load() -> None:
            learned = self.pipeline.compressor.state_dict()
            self._begin(layout)
            self.pipeline.compressor.load_state_dict(renamed(learned, names))
            if any(was != now for was, now in names.items()):
                self.memory.rename(names)

        self.worker.run(load)
        self.reducer.track(trained)

    def send_dense(self, is_dense: bool) -> None:
        """Have the coming steps send everything, as DDP does, or only what is selected, or nothing but in rounds."""
        if self.rounds is None:
            self.reducer.is_dense = is_dense
            if is_dense:  # optimizers learn from gradients again
                self.reduced.clear()
                self.worker.run(self.memory.leave)
        else:
            self.reducer.is_paused = not is_dense
            self.wrapper.broadcast_buffers = self._broadcasts_buffers and is_dense

    def target_densities(self) -> dict[str, float]:
        """Return the densities that the user asked for, of all parameters whose gradients are exchanged, by name."""
        return {name: self.densities.target(name) for name in self.parameter_names}

    def present_densities(self) -> dict[str, float]:
        """Return the density of each parameter in the next step, by name."""
        return {name: self.densities.of(name) for name in self.parameter_names}

    def mean_over_ranks(self, number: float) -> float:
        """Return the mean of a number over ranks, which all must call between two steps; the host waits for it."""
        return self.worker.run(lambda: self.levels.world.mean_of_numbers([number]))[0]

    def _planner_of(self, settings: Settings, log: Callable[[str], None]) -> Planner:
        if settings.local_steps is not None or not isinstance(settings.schedule, Merged):
            return Planner()
        parts = (settings.schedule, self.levels.world, self.recorder, self._numels, self.densities)
        memory = proxy(self.memory)  # which does not wait for a collection, as a planner and its course do
        adapts, overlaps = settings.compressor.adaptive_density, settings.overlaps_backward
        return StepPlanner(*parts, adapts, lambda: memory.clips_gradients or not overlaps, log)

    def begin_backward(self, context: StepContext = EMPTY_CONTEXT, epoch: int = 0) -> None:
        """Begin a step, before any of its gradients is taken."""
        if self.recorder.current.backward_start is None:  # nobody has heard of this backward before its first gradient
            self.recorder.begin_backward()
        self.recorder.current.is_typical = context.warm_up_progress >= 1
        self.pipeline.begin_step(context)
        self.densities.begin_step(epoch, context.warm_up_progress)

    def begin_dense_backward(self, is_warm_up: bool) -> None:
        """Begin a backward of which everything is sent: in a warm-up in the wire's type, if that has fp32's range."""
        wire = self._settings.wire
        nbytes = self.reducer.send_dense_in(wire if is_warm_up and wire is torch.bfloat16 else None)
        self.recorder.add_dense_step(self.reducer.numel, nbytes)

    def end_step(self, optimizer: int = 0, epoch: int = 0) -> None:
        """End a step."""
        self.densities.count_step(optimizer, epoch)
        if type(self.replicas) is not Replicas:  # which have nothing to count
            self.replicas.count_step(optimizer)
        self.recorder.totals.end_step()  # which waits for what replicas exchange after it, too

    def _begin_exchange(self) -> StepContext:
        """Begin an exchange of local steps."""
        self.densities.begin_step(self.densities.epoch)
        return StepContext()

    def compression_stats(self) -> dict[str, float]:
        """Return the facts of the last step that ended; empty before the first."""
        recorder = self.recorder
        if recorder.last is None:
            return {}
        totals = recorder.totals.as_stats(recorder.has_levels)
        stats = {**mean_stats(recorder.last_step, recorder.has_levels), **totals}
        return stats if recorder.last.is_dense else self.replicas.in_stats(stats, recorder.last.covered_steps)

    def state_dict(self, together: bool = False) -> dict[str, Any]:
        """Return what is kept and learned, as plain tensors and numbers, not copied; all ranks call if ``together``."""
        compressor = self.pipeline.compressor
        state: dict[str, Any] = {"memory": self.memory.state_dict(), "compressor": compressor.state_dict()}
        state["order"] = self.reducer.order
        if warm_up := self.densities.state_dict():
            state["warm_up"] = warm_up
        return {**state, **self.replicas.state_dict(together)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace those parts that ``state`` holds by a copy; the others stay as they are."""
        if "warm_up" in state:
            self.densities.load_state_dict(state["warm_up"])

        def load() -> None:
            if "memory" in state:
                self.memory.load_state_dict(state["memory"])
            self.replicas.load_state_dict(state)
            if "compressor" in state:
                self.pipeline.compressor.load_state_dict(dict(state["compressor"]))

        # On a device the copies are then memory of the worker's stream, which alone reads them. It drops some of them
        # when it has been told to read them, but has not yet: memory of another stream would be written over.
        self.worker.run(load)
        self.recorder.forget()  # steps of a search for a learning rate, after which training begins anew

    def close(self, has_failed: bool = False) -> bool:
        """End the worker, give the process groups back, and return whether what is kept is that of a whole step."""
        self.reducer.close()
        self.wrapper.broadcast_buffers = self._broadcasts_buffers
        # A worker that hangs in a collective still needs the process group that it hangs in.
        has_ended = self.worker.close()
        if has_ended:
            self.levels.close(has_failed or self.worker.error is not None)
        return has_ended and self.worker.error is None


def _levels_between(
    device: torch.device, wrapper: Wrapper, local_world_size: int, timeout: Optional[timedelta], shares_groups: bool
) -> FlatTopology:
    """Build which ranks this one exchanges what with, and the record of it."""
    world_size, is_sharded = dist.get_world_size(), isinstance(wrapper, ShardedModel)
    # Beside shards the dense exchange is that of equal shards, between replicas.
    sizes = (world_size // local_world_size, 1) if is_sharded else (world_size, local_world_size)
    recorder = Recorder(device, *sizes)
    shared = dist.group.WORLD if shares_groups else None
    world = Communicator(list(range(world_size)), device, timeout, shared=shared, recorder=recorder)
    if local_world_size == 1:
        return FlatTopology(world)
    nodes = [list(range(first, first + local_world_size)) for first in range(0, world_size, local_world_size)]
    rows = [list(row) for row in zip(*nodes)]  # of ranks with the same share
    number, place = divmod(world.rank, local_world_size)
    shards, replicas = wrapper.groups if shares_groups and isinstance(wrapper, ShardedModel) else (None, None)
    intra = Communicator(nodes[number], device, timeout, nodes, shards, recorder, is_inside_node=True)
    intra.check(("all_to_all", "all_gather"))
    inter = Communicator(rows[place], device, timeout, rows, replicas, recorder)
    return (Shards if is_sharded else HierarchicalTopology)(intra, inter, world)


def _wires_between(levels: FlatTopology, settings: Settings, log: Callable[[str], None]) -> Wires:
    """Build how selections are written; say so where what arrives of them takes more than the residual."""
    world_size, shared_by = levels.inter.world_size, levels.local_world_size
    wires = settings.wires_for(levels.inter.rank, world_size)
    levels.world.check(wires.collectives)
    is_gathered = wires.owners is None and settings.compressor.wire_format == "gather"
    received_bytes = _RECEIVED_BYTES * world_size * settings.density
    if is_gathered and received_bytes > _RESIDUAL_BYTES:
        log(
            f"what arrives in a step takes {received_bytes / shared_by:.1f} bytes for each parameter, beside"
            f" {_RESIDUAL_BYTES / shared_by:g} for the residual: exchange='auto' takes ways that do not grow with the"
            " number of ranks."
        )
    return wires


def _memory_of(module: nn.Module, settings: Settings, levels: FlatTopology) -> Memory:
    """Build what keeps residuals; of frozen parameters, too: they may be unfrozen."""
    dtypes = {each.dtype for each in module.parameters() if each.is_floating_point()}
    local_share = levels.local_share if isinstance(levels, HierarchicalTopology) else None
    total_of = (levels.total_of,) if isinstance(levels, Shards) else ()
    return settings.memory_for(dtypes, levels.inter.world_size, local_share, *total_of)
