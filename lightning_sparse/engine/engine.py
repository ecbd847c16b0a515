"""The engine builds all parts of the exchange for a model, starts the worker thread, and registers gradient hooks."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse.compressors.base import ModelLayout, layout_of, trained_in
from lightning_sparse.engine.collectives import Communicator, ExchangeWorker, SharedOnCopy
from lightning_sparse.engine.local_steps import LocalStepsController, SharedModel
from lightning_sparse.engine.memory import Renaming, renamed
from lightning_sparse.engine.observe import Recorder, mean_stats
from lightning_sparse.engine.planner import StepPlanner
from lightning_sparse.engine.replicas import AveragedReplicas, ReplicaAverager, Replicas
from lightning_sparse.engine.settings import Settings
from lightning_sparse.engine.step.backward import ReducerContext
from lightning_sparse.engine.step.reducer import SparseReducer, Wrapper
from lightning_sparse.engine.step.selecting import Densities
from lightning_sparse.engine.step.step import EMPTY_CONTEXT, Pipeline, StepContext
from lightning_sparse.engine.step.topology import (
    DividedRanks,
    FlatTopology,
    HierarchicalTopology,
    ShardedModel,
    named_module,
)
from lightning_sparse.schedule import Merged, Plan


class Engine(SharedOnCopy):
    """Exchange the gradients of a wrapped model, from construction until :meth:`close`.

    Args:
        timeout: timeout of each collective; by default the timeout of the job.
        log: function that writes a line to the log.
        local_world_size: ranks per node if nodes average gradients first, or ranks per sharded replica; otherwise 1.
        begin: function called before a backward's first gradient.
        end: function called when all gradients are means.
        trained: parameters to exchange, by name; by default all parameters that require a gradient.

    Attributes:
        densities: densities of parameters. A caller may raise densities between two steps, equally on all ranks.
        numels: elements that this rank exchanges of each parameter, by name, in the order of the model.
    """

    def __init__(
        self,
        ddp: Wrapper,
        settings: Settings,
        timeout: Optional[timedelta] = None,
        log: Callable[[str], None] = lambda line: None,
        local_world_size: int = 1,
        begin: Callable[[], None] = lambda: None,
        end: Callable[[], None] = lambda: None,
        trained: Optional[Mapping[str, Tensor]] = None,
    ) -> None:
        self.module = module = named_module(ddp)
        device, trained = next(module.parameters()).device, trained_in(module) if trained is None else trained
        levels = _levels_between(device, isinstance(ddp, ShardedModel), local_world_size, timeout)
        wires = settings.wires_for(levels.inter.rank, levels.inter.world_size)
        # Frozen parameters may be unfrozen later, so the dtypes of all parameters count.
        dtypes = {each.dtype for each in module.parameters() if each.is_floating_point()}
        memory = settings.memory_for(dtypes, levels)

        self.memory = memory
        self.recorder = levels.inter.recorder
        self.densities = Densities(settings.compressor, settings.density, settings.warmup_steps)
        self.wrapper, self._broadcasts_buffers = ddp, ddp.broadcast_buffers
        self.numels: dict[str, int] = {}
        self.pipeline = Pipeline(settings.compressor, memory, wires, levels, self.densities.of)
        self._begin(self._layout_of(trained))  # This call may raise an error, so the worker thread starts later.
        self._planner = _planner_of(settings, self, log)
        self.worker = ExchangeWorker(device)
        context = ReducerContext(
            self.pipeline,
            settings.schedule,
            self.worker,
            levels.same_shard,
            settings.overlaps_backward,
            isinstance(ddp, ShardedModel),
            begin,
            end,
            packages={},
            warm_up_dtype=torch.bfloat16 if settings.wire is torch.bfloat16 else None,
        )
        self.reducer = SparseReducer(ddp, context)
        self.replicas = self._replicas_of(settings)
        self._track(trained)
        if self.rounds is not None:
            self.reducer.is_paused, ddp.broadcast_buffers = True, False

    def _replicas_of(self, settings: Settings) -> Replicas:
        world = self.pipeline.levels.world
        if (local := settings.local_steps) is not None:
            shared = SharedModel(self.module, list(self.numels), local, self.pipeline, self.worker)
            return LocalStepsController(shared, self.densities.begin_step)
        if settings.replicas_diverge:
            averager = ReplicaAverager(self.module, world)
            return AveragedReplicas(averager, settings.compressor.param_sync_every, self.worker)
        return Replicas()

    @property
    def plan(self) -> Optional[Plan]:
        """The bucket plan in use, or ``None`` if there is no plan yet, or if the schedule needs no plan."""
        return None if self._planner is None else self._planner.plan

    @property
    def rounds(self) -> Optional[LocalStepsController]:
        """Controller of local steps, or ``None`` without local steps."""
        return self.replicas if isinstance(self.replicas, LocalStepsController) else None

    def _layout_of(self, trained: Mapping[str, Tensor]) -> ModelLayout:
        inter = self.pipeline.levels.inter
        return layout_of(self.module, inter.rank, inter.world_size, inter.device, trained)

    def _begin(self, layout: ModelLayout) -> None:
        numels = tuple(map(self.pipeline.levels.share_numel, layout.numels))
        self.pipeline.compressor.begin(layout._replace(numels=numels))
        self.numels.clear()  # in place, because the planner holds the dictionary
        self.numels.update(zip(layout.names, numels))

    def restart(self, trained: Mapping[str, Tensor], names: Renaming) -> None:
        """Exchange other parameters from the next backward on. All ranks must call this, between two backwards.

        Args:
            trained: parameters to exchange, by name.
            names: the new name of each earlier parameter, or ``None`` if the model has lost the parameter.
        """
        layout = self._layout_of(trained)
        if self.rounds is not None:
            self.rounds.restart(layout.names, names)

        def load() -> None:
            learned = self.pipeline.compressor.state_dict()
            self._begin(layout)
            self.pipeline.compressor.load_state_dict(renamed(learned, names))
            self.memory.rename(names)

        self.worker.run(load)
        self._track(trained)

    def _track(self, trained: Mapping[str, Tensor]) -> None:
        self.reducer.track(trained)
        if self._planner is not None:
            self._planner.start()  # The order of gradients may change.

    def send_dense(self, is_dense: bool) -> None:
        """Set whether the next steps send dense gradients, as DDP does, or compressed gradients."""
        self.reducer.is_dense = is_dense
        if is_dense:  # Dense steps change second moments, the divisors of updates: convert updates to gradients first.
            self.reducer.reduced.clear()
            self.worker.run(partial(self.memory.refresh, {}))

    def mean_over_ranks(self, number: float) -> float:
        """Return the mean of a number over ranks, and wait for the GPU. All ranks must call this between steps."""
        return self.worker.run(lambda: self.pipeline.levels.world.mean_of_numbers([number]))[0]

    def begin_backward(self, context: StepContext = EMPTY_CONTEXT) -> None:
        """Begin a backward with an exchange of compressed gradients. Call this before the first gradient is ready."""
        self.recorder.current.is_typical = context.warm_up_progress >= 1
        self.pipeline.context = context
        self.densities.begin_step(context.warm_up_progress)

    def begin_dense_backward(self, is_warm_up: bool) -> None:
        """Begin a backward that sends dense gradients. Only in Adam's warm-up, a bfloat16 wire rounds the gradients."""
        self.recorder.add_dense_step(*self.reducer.send_dense(is_warm_up))

    def end_step(self, optimizer: int = 0) -> None:
        """End a step of the optimizer with the index ``optimizer``."""
        self.densities.count_step(optimizer)
        if type(self.replicas) is not Replicas:  # The base class does not count steps.
            self.replicas.count_step(optimizer)
        self.recorder.end_step()  # The time of the replicas' exchange belongs to this step.

    def compression_stats(self) -> dict[str, float]:
        """Return the statistics of the last complete step, or an empty dictionary before the first step."""
        recorder = self.recorder
        if recorder.last is None:
            return {}
        stats = {**mean_stats(recorder.last_step, recorder.has_levels), **recorder.total_stats()}
        return stats if recorder.last.is_dense else {**stats, **self.replicas.statistics(recorder.last.covered_steps)}

    def state_dict(self, together: bool = False) -> dict[str, Any]:
        """Return the state, without copies. With ``together``, ranks compare tensors, so all ranks must call this."""
        compressor = self.pipeline.compressor
        state: dict[str, Any] = {"memory": self.memory.state_dict(), "compressor": compressor.state_dict()}
        if warm_up := self.densities.state_dict():
            state["warm_up"] = warm_up
        return {**state, **self.replicas.state_dict(together)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a copy of each part in ``state``. Parts of the engine's state that ``state`` lacks do not change."""
        if "warm_up" in state:
            self.densities.load_state_dict(state["warm_up"])

        def load() -> None:
            if "memory" in state:
                self.memory.load_state_dict(state["memory"])
            self.replicas.load_state_dict(state)
            if "compressor" in state:
                self.pipeline.compressor.load_state_dict(dict(state["compressor"]))

        # The worker allocates the copies, on the worker's stream. A copy may be freed while a queued kernel still
        # reads the memory. torch's allocator then reuses the memory safely only on the stream of the allocation.
        self.worker.run(load)
        self.recorder.reset()  # After a learning-rate search, the records of the search must not count.

    def close(self, has_failed: bool = False) -> bool:
        """Stop the worker, and destroy the process groups. Return whether the worker has ended without an error."""
        self.reducer.close()
        self.wrapper.broadcast_buffers = self._broadcasts_buffers
        # A worker that has not ended may still use the process groups.
        has_ended = self.worker.close()
        if has_ended:
            self.pipeline.levels.close(has_failed or self.worker.error is not None)
        return has_ended and self.worker.error is None


def _levels_between(
    device: torch.device, is_sharded: bool, local_world_size: int, timeout: Optional[timedelta]
) -> FlatTopology:
    world_size = dist.get_world_size()
    # With FSDP, each rank exchanges with one rank per replica, so the recorder counts each replica as one rank.
    sizes = (world_size // local_world_size, 1) if is_sharded else (world_size, local_world_size)
    recorder = Recorder(device, *sizes)
    world = Communicator(list(range(world_size)), device, timeout, recorder=recorder)
    world.gather_numbers([0.0])  # connects the ranks before the worker starts collectives on another thread
    if local_world_size == 1:
        return FlatTopology(world)
    nodes = [list(range(first, first + local_world_size)) for first in range(0, world_size, local_world_size)]
    rows = [list(row) for row in zip(*nodes)]  # A row has one rank per node, all with the same part of gradients.
    number, place = divmod(world.rank, local_world_size)
    intra = Communicator(nodes[number], device, timeout, nodes, recorder, is_inside_node=True)
    intra.gather_numbers([0.0])
    inter = Communicator(rows[place], device, timeout, rows, recorder)
    return (DividedRanks if is_sharded else HierarchicalTopology)(intra, inter, world)


def _planner_of(settings: Settings, engine: Engine, log: Callable[[str], None]) -> Optional[StepPlanner]:
    if settings.local_steps is not None or not isinstance(settings.schedule, Merged):
        return None
    parts = (settings.schedule, engine.pipeline.levels.world, engine.recorder, engine.numels, engine.densities)
    overlaps = settings.overlaps_backward and not engine.memory.clips_gradients
    return StepPlanner(*parts, settings.compressor.adaptive_density, overlaps, log)
