"""One training from start to end: batches, backwards, optimizer steps, and changes of the model."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

import lightning_sparse.loop.summary as summary
from lightning_sparse.compressors.base import layout_of
from lightning_sparse.engine import Engine
from lightning_sparse.engine.adam.steps import is_correctable
from lightning_sparse.engine.collectives import backend_of, ddp_parameters
from lightning_sparse.engine.memory import optimizer_parameters
from lightning_sparse.engine.replicas import Replicas, sync_module_states
from lightning_sparse.engine.settings import Settings
from lightning_sparse.engine.step.reducer import Wrapper, after_closure
from lightning_sparse.engine.step.topology import ShardedModel, named_module, reshard
from lightning_sparse.loop.backend_choice import AutoBackend
from lightning_sparse.loop.changes import LoadedParameters, TrainedParameters, check_alike
from lightning_sparse.loop.checks import check_optimizers, checked_total_steps, in_one_order
from lightning_sparse.loop.optimizers import (
    CountedSteps,
    OptimizerView,
    all_optimizer_parameters,
    listed,
    warn_of_adaptive,
)
from lightning_sparse.loop.state import (
    HINT,
    act_together,
    collect_state,
    load_state,
    load_states,
    match_state,
    states_of,
)
from lightning_sparse.schedule import Auto, Plan

_NEW = (
    "the model has other parameters to train, or other shards, than at the start of the last forward. Add, replace and"
    " unfreeze layers between two batches, such as in on_train_batch_start, before a call of the whole model. Change a"
    " sharded model's layers before training"
)
_BROKEN = (
    "an optimizer steps before gradients are exchanged: the last backward failed on this rank, or the step runs inside"
    " backward. After a failed backward, end training on all ranks, or call sparsify_gradients on the model again"
)
_OWN = (
    "an optimizer steps with local gradients of this rank, so replicas would diverge. Run the last backward of a step"
    " outside of no_sync(), because only that backward exchanges the sum. Under automatic optimization run no backward"
    " after Lightning's, such as in on_after_backward. Under manual optimization call backward in training_step, or"
    " manual_backward. In a plain loop compute the loss from outputs of the whole model in training mode"
)
Log = Callable[[str], None]


class RuntimeOptions(NamedTuple):
    """Runtime options of a training that are not part of the settings."""

    timeout: Optional[timedelta] = None  # maximum time that an exchange waits for other ranks
    scaler: Any = None  # gradient scaler, or ``None``
    local_world_size: int = 1  # number of ranks that average gradients before the exchange (two levels, or FSDP)


class Session:
    """Base of the Trainer's strategies and of handles: settings, and the current training or ``None``."""

    settings: Settings  # the user's settings; a training with Adam's correction sets the field ``adam``
    _log: Log
    training: Optional["Training"] = None  # ``None`` also while a single process trains without an exchange
    final_state: Optional[dict[str, Any]] = None  # state after training, on the CPU
    _last: tuple[Mapping[str, float], Optional[Plan]] = {}, None  # statistics and plan after training

    @property
    def engine(self) -> Optional[Engine]:
        """The engine that exchanges gradients, or ``None`` outside of a training and on one process."""
        return None if self.training is None else self.training.engine

    @property
    def replicas(self) -> Replicas:
        """Replica manager of the current training, or a no-op manager."""
        return Replicas() if self.engine is None else self.engine.replicas

    def _begin_training(
        self, ddp: Wrapper, optimizers: Sequence[Optimizer], given: RuntimeOptions, goes_alone: bool = False
    ) -> None:
        """Check the optimizers, and begin a training. A single process compresses only if ``goes_alone``."""
        self._last, self.final_state = ({}, None), None
        self.settings = settings = self.settings.correcting_adam(list(map(is_correctable, optimizers)))
        check_optimizers(settings, optimizers)
        module, description = named_module(ddp), summary.describe(settings)
        is_alone = dist.get_world_size(ddp.process_group) == 1
        if is_alone and not goes_alone:
            settings.compressor.begin(layout_of(module, 0, 1, next(module.parameters()).device))
            self._log(f"one process, so there is nothing to exchange or compress; on several processes {description}.")
        else:
            self._log(f"{description}.")
            if is_alone:
                self._log("one process continues a compressed training, so that the model receives the residuals.")
            self.training = Training(ddp, optimizers, settings, given, self._log)
        warn_of_adaptive(settings, optimizers)

    def _expect_steps(self, total_steps: Optional[int]) -> None:
        """Set the optimizer steps of the whole training (``None``: unknown)."""
        total_steps = checked_total_steps(self.settings, total_steps)
        if (training := self.training) is None:
            return
        training.engine.densities.expect_steps(total_steps)
        training.engine.memory.total_steps = total_steps

    def _end_training(self, has_failed: bool = False, keeps_state: bool = False) -> None:
        """End the training. If ``keeps_state``, store the final state on the CPU. A second call does nothing.

        ``has_failed`` means that this rank has raised an error.
        """
        if (training := self.training) is None:
            return
        # After an error, an exchange may block the GPU forever, so this method must not wait for the GPU.
        can_ask = not has_failed or training.device.type == "cpu"
        self._last = (self.compression_stats(), self.exchange_plan()) if can_ask else ({}, None)
        if self._last[0].get("total_steps") and not has_failed and training.engine.pipeline.levels.world.world_size > 1:
            self._log(summary.report(self._last[0], None if training.choice is None else training.choice.verdict))
        is_whole = training.close(has_failed)
        self.training = None
        if is_whole and can_ask and keeps_state:  # copies to the CPU, because residuals are as large as the model
            self.final_state = tree_map_only(Tensor, lambda each: each.detach().cpu(), training.state())
        vars(training).clear()  # breaks a reference cycle that would hold model-sized tensors until garbage collection

    def compression_stats(self) -> dict[str, float]:
        """Return this rank's statistics of the last step's exchange and of the whole training.

        The dictionary is empty before the first step, and on one process. After training, the final values remain. If
        Lightning spawned the ranks, the main process has no values. On a GPU the call waits for the exchange.

        Returns:
            ``density`` (fraction of elements that this rank sent), ``wire_bytes`` (bytes that left this rank),
            ``dense_bytes`` (bytes of DDP's fp32 all-reduce, or of HSDP's for this rank's shards),
            ``compression_ratio`` (of dense to wire bytes), with two levels ``inter_node_bytes`` (bytes for other
            nodes), ``total_wire_bytes``, ``total_dense_bytes``, ``total_compression_ratio`` and
            ``total_inter_node_bytes`` (sums over this training), ``total_steps`` (optimizer steps), ``select_seconds``
            (residual, selection, encoding), ``exchange_seconds`` (collectives), ``exposed_seconds`` (from the end of
            backward until gradients are ready), ``exposed_share`` (mean exposed seconds, divided by the median time of
            the last 256 steps; excludes plain DDP's steps), and for diverging replicas ``replica_divergence`` (see
            :class:`~lightning_sparse.compressors.A2SGD`). Seconds are NaN in steps of plain DDP.
        """
        return dict(self._last[0]) if self.engine is None else self.engine.compression_stats()

    def exchange_plan(self) -> Optional[Plan]:
        """Return this rank's exchange plan, also after training, or ``None`` if the schedule has made no plan."""
        return self._last[1] if self.engine is None else self.engine.plan

    def reset_residuals(self) -> None:
        """Set residuals, momentum and unsent updates to zero. Call this after writing weights by ``copy_``.

        All ranks must call, between two steps. After ``load_state_dict`` of weights, no call is needed.
        """
        if self.training is not None:
            self.training.reset_residuals()


class Training:
    """One training of a wrapped model, until :meth:`close`. With local steps, ranks exchange changes of parameters."""

    def __init__(
        self, ddp: Wrapper, optimizers: Sequence[Optimizer], settings: Settings, given: RuntimeOptions, log: Log
    ) -> None:
        self.settings, self.optimizers, self.log, self._given = settings, optimizers, log, given
        self._is_implicit = True  # whether a backward that no caller announces may exchange gradients
        module, self.device = named_module(ddp), next(ddp.module.parameters()).device
        ordered = in_one_order(settings, module, backend_of(self.device, ddp.process_group))
        self._trained = TrainedParameters(module, all_optimizer_parameters(optimizers))
        if rest := self._trained.without_optimizer():
            log(summary.WITHOUT_OPTIMIZER.format(names=listed(rest)))
        around = (self._open, self._end_exchange)
        parts = (ordered, given.timeout, log, given.local_world_size, *around, self._trained.parameters)
        self.engine = Engine(ddp, *parts)
        self.choice = AutoBackend(self.engine, self.device, log) if isinstance(settings.schedule, Auto) else None
        self._attend()
        self._loaded = LoadedParameters(module)

    def _attend(self) -> None:
        self.steps = CountedSteps(self.optimizers, self._before_step, self._end_step)
        parameters, engine = ddp_parameters(self.engine.module), self.engine
        parts = (self.settings.feedback, engine.densities.target, engine.memory)
        self.view = OptimizerView(parameters, self.optimizers, *parts)

    def restart_if_changed(self, optimizers: Optional[Sequence[Optimizer]] = None) -> None:
        """If trained parameters or optimizers have changed since the last batch, use the present objects from now on.

        All ranks must make the same change. A parameter's residual stays with the parameter if the name changes.
        Parameters that were exchanged and then frozen count as unused.
        """
        optimizers = self.optimizers if optimizers is None else optimizers
        has_others = len(optimizers) != len(self.optimizers) or not all(map(is_, optimizers, self.optimizers))
        before, held, module = self._trained, all_optimizer_parameters(optimizers), self.engine.module
        if not (before.may_have_changed(held) or has_others):
            return
        reshard(module)  # after an evaluation, FSDP's unsharded parameters would count as replaced
        present = TrainedParameters(module, held, before.parameters.values())
        has_new, changes = before.has_others(), before.changes_to(present)
        if has_new and isinstance(self.engine.wrapper, ShardedModel):
            raise RuntimeError(_NEW)
        before.record_use(held)
        if not (has_new or changes or has_others):
            return
        description = " and ".join(filter(None, (changes, "the optimizers" * has_others)))
        check_alike(description, dist.get_rank(), self._given.timeout)
        if has_others:
            self._take_optimizers(optimizers)
        self._loaded.watch(module)
        if has_new or changes:
            self._restart(present)
            self.log(f"the trained parameters have changed: {len(present.parameters)} are exchanged from now on.")

    def _restart(self, present: TrainedParameters) -> None:
        before, module = self._trained, self.engine.module
        if before.has_others():
            sync_module_states(module, [present.names[each] for each in before.names if each in present.names])
        self._trained = present
        self.view.set_names(ddp_parameters(module))
        self.engine.restart(present.parameters, {name: present.names.get(each) for each, name in before.names.items()})

    def _take_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        check_optimizers(self.settings, optimizers)
        self.optimizers = optimizers
        self.view.close()
        self.steps.close()
        self._attend()
        warn_of_adaptive(self.settings, optimizers)

    def begin_batch(self, optimizers: Optional[Sequence[Optimizer]] = None) -> None:
        """Before a forward, process changed parameters, and begin the first round of local steps."""
        self.engine.worker.raise_error()
        self.restart_if_changed(optimizers)
        self._begin_round()
        self.steps.see_weights(self.engine.module)

    def _begin_round(self) -> None:
        if self.engine.rounds is not None:
            self.engine.rounds.begin_round()
            self._reset_loaded()

    def begin(self) -> None:
        """Prepare for a backward that Lightning announces."""
        self.engine.reducer.allow_implicit_backward = True
        self.engine.reducer.prepare_for_backward()

    def set_inside(self, is_inside: bool) -> None:
        """Set whether a backward without a call of :meth:`begin` may exchange gradients (manual optimization)."""
        self._is_implicit = self.engine.reducer.allow_implicit_backward = is_inside

    def _open(self) -> None:
        """Begin the dense or compressed exchange of a backward, before the first gradient is ready."""
        self.engine.worker.raise_error()
        adam, choice, reducer = self.view.adam, self.choice, self.engine.reducer
        is_warm_up = adam is not None and adam.is_dense
        is_dense = is_warm_up or (choice is not None and choice.wants_dense)
        if is_dense != reducer.is_dense:
            self.engine.send_dense(is_dense)
        continued = reducer.reduced.continued
        if is_dense:
            self.engine.begin_dense_backward(is_warm_up and choice is None)
        elif not continued:
            self.engine.recorder.totals.begun += 1
        self._reset_loaded()
        context = self.view.next_step(is_dense, continued)
        if (scaler := self._given.scaler) is not None:  # not `get_scale`, which synchronizes with the device
            context = context._replace(loss_scale=scaler.scale(torch.ones((), device=self.device)))
        self.engine.begin_backward(context)

    def _end_exchange(self) -> None:
        if self.view.adam is not None:
            self.view.adam.store_updates(self.engine.pipeline.context.loss_scale)

    def reset_residuals(self, loaded: Optional[AbstractSet[Tensor]] = None) -> None:
        """Set residuals and momentum of ``loaded``, or of all parameters, to zero.

        With local steps, the current weights become the shared model.
        """
        parameters = ddp_parameters(self.engine.module).items()
        names = [name for name, each in parameters if loaded is None or each in loaded]
        self.engine.worker.run(lambda: self.engine.memory.reset(names))
        self.log(f"residuals and momentum of {len(names)} parameters restart at zero.")
        if self.engine.rounds is not None:
            self.engine.rounds.reset_shared_model()

    def _reset_loaded(self) -> None:
        loaded = self._loaded.take()
        if loaded and self.engine.recorder.last is not None:
            self.reset_residuals(loaded)

    def end_backward(self) -> None:
        """Finish the exchange of a backward. Raise an error if the exchange has failed."""
        self.engine.reducer.finalize_backward()
        self.engine.reducer.allow_implicit_backward = self._is_implicit
        self.engine.worker.raise_error()

    def _before_step(self, optimizer: Optimizer, *step: Any) -> Any:
        if self.engine.reducer.is_open:
            raise RuntimeError(_BROKEN)
        return after_closure(self._before_update)(optimizer, *step)

    def _before_update(self, optimizer: Optimizer) -> None:
        if self.engine.reducer.holds_own(optimizer_parameters(optimizer)):
            raise RuntimeError(_OWN)
        if self._trained.lacks_any(optimizer_parameters(optimizer)):
            raise RuntimeError(_NEW)
        self._begin_round()  # needed if the user has called submodules only, because then no forward hook ran

    def _end_step(self, optimizer: Optimizer) -> None:
        if self.choice is not None:
            self.choice.end_step()
        self.engine.reducer.reduced.drop(optimizer_parameters(optimizer))
        self.engine.end_step(self.optimizers.index(optimizer))

    def state(self, together: bool = False) -> dict[str, Any]:
        """Return this rank's state between two steps, without copies. With ``together``, all ranks must call this."""
        if together:
            self.engine.worker.drain()
        state = collect_state(self.engine, together)
        if self.settings.replicas_diverge:  # the model's file holds the optimizer states of one rank only
            state["optimizers"] = states_of(self.optimizers)
            if self._given.scaler is not None:
                state["scaler"] = self._given.scaler.state_dict()
        return state

    def load(self, state: Mapping[str, Any]) -> list[str]:
        """Load a state, and return descriptions of the parts that this training cannot use."""
        usable, unused = match_state(state, self.engine)
        if self.engine.rounds is not None:  # the user may load inside ``with shared_model()``, which this call ends
            self.engine.rounds.leave()
        stored = [usable["rounds"]["local"]] if "rounds" in usable else usable.get("memory", {}).values()
        exchanged = set(chain.from_iterable(stored))
        frozen = [each for name, each in self.engine.module.named_parameters() if name in exchanged]
        held = all_optimizer_parameters(self.optimizers)
        self._restart(TrainedParameters(self.engine.module, held, [*self._trained.parameters.values(), *frozen]))
        self.engine.load_state_dict(usable)
        if self.settings.replicas_diverge:
            load_states(self.optimizers, state.get("optimizers", ()))
            if self._given.scaler is not None and "scaler" in state:
                self._given.scaler.load_state_dict(state["scaler"])
        self._loaded.take()  # drops records, because the residuals belong to the loaded weights
        return unused

    def close(self, has_failed: bool) -> bool:
        """End the exchange, and remove all hooks. Return whether the worker has ended without an error."""
        self.steps.close()
        self._loaded.close()
        is_whole = self.engine.close(has_failed)
        self.view.close()
        return is_whole


def load_folder(training: Training, folder: str, source: str) -> list[str]:
    """Load a folder of compression states, and return descriptions of unused parts. All ranks must call."""
    state = load_state(folder, training.engine)
    if "is_mean" in state:
        before, now = state["header"]["world_size"], training.engine.pipeline.levels.world.world_size
        training.log(f"{before} ranks saved {source}, {now} ranks continue, each from the mean residual.")
    return act_together(partial(training.load, state), f"{source} does not fit this training. {HINT}")
