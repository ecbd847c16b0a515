"""The loop: what a training does around an exchange, the same behind the Trainer, Fabric and a loop of one's own."""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from datetime import timedelta
from functools import partial
from operator import is_
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_sparse.compressors.base import NOT_CLIPPED, Clipping, layout_of
from lightning_sparse.engine import Engine
from lightning_sparse.engine.collectives import backend_of, ddp_parameters
from lightning_sparse.engine.replicas import Replicas, sync_module_states
from lightning_sparse.engine.settings import Settings
from lightning_sparse.engine.step.reducer import Wrapper, after_closure
from lightning_sparse.engine.step.topology import ShardedModel, named_module, reshard
from lightning_sparse.loop.backend_choice import AutoBackend
from lightning_sparse.loop.changes import ROLLED_BACK, LoadedParameters, TrainedParameters, check_alike
from lightning_sparse.loop.checks import check_optimizers, check_total_steps, in_one_order
from lightning_sparse.loop.levels import Node
from lightning_sparse.loop.optimizer_states import load_states, states_of
from lightning_sparse.loop.optimizers import (
    CountedSteps,
    OptimizerView,
    all_optimizer_parameters,
    before_step_of_training,
    calls_hooks,
    can_correct,
    chain_of,
    listed,
    optimizer_parameters,
    warn_of_adaptive,
)
from lightning_sparse.loop.state import collect_state, match_state
from lightning_sparse.loop.summary import (
    CHANGED,
    RESUMES_ALONE,
    TAKES_MOMENTUM,
    UNSAVED_GRADIENTS,
    WITHOUT_OPTIMIZER,
    adam_line,
    describe,
    log_rounds,
    report,
    warning_of_validations,
)
from lightning_sparse.schedule import Auto, Plan

CLOSED = (
    "closed: to train on, call sparsify_gradients on the model again, in a new DistributedDataParallel if it"
    " was in one; or"
    " train a copy of the model alone"
)
_NEW = (
    "the model has other parameters to train, or other shards, than when its last forward began: add, replace and"
    " unfreeze layers between two batches, such as in on_train_batch_start, and before a call of the model itself, not"
    " of its parts alone; those of a sharded model before training"
)
_BROKEN = (
    "an optimizer steps before gradients are exchanged: the last backward has ended in an error on this rank, so that"
    " training has to end on all, or to go on with a model that is sparsified anew; or the step is made inside backward"
)

_OWN = (
    "an optimizer steps by gradients that are this rank's own, and replicas would go apart: let the last backward of a"
    " step be outside of no_sync(), and of no_sync(), so that it exchanges the sum; under the Trainer's automatic"
    " optimization it is Lightning's own, and none may come after it, such as in on_after_backward; under manual"
    " optimization it comes in training_step, or by manual_backward; in a loop of one's own its loss is made of what"
    " the model itself has returned in training mode, not of what its parts have"
)

_OTHER_OPTIMIZERS = (
    "an optimizer was replaced inside a step: assign trainer.optimizers = [...] between two batches, such as in"
    " on_train_batch_start, when each optimizer has made its step"
)

_ONE = Replicas()
_NOT_USERS = {__name__.partition(".")[0], "lightning", "pytorch_lightning", "lightning_fabric", "torch"}


Log = Callable[[str], None]


class RuntimeOptions(NamedTuple):
    """What a training is given beside model, optimizers and settings."""

    timeout: Optional[timedelta] = None  # of an exchange
    scaler: Any = None
    clipping: Clipping = NOT_CLIPPED  # of every step
    local_world_size: int = 1  # that have averaged their gradients before, or do so first
    node: Optional[Node] = None  # of this rank, where an entry point without ``local_world_size`` knows it


class Loop:
    """What an entry point is from its making on: settings, and a training while one goes on with somebody."""

    def __init__(self, settings: Settings, log: Log) -> None:
        self.settings = settings  # what the user chose, checked, and what it asks of the memory in this training
        self._log = log
        self.training: Optional[Training] = None  # also on one process
        self.optimizers: Sequence[Optimizer] = ()  # that train the model, or have done so
        self._scaler: Any = None
        self._finish_with({}, None)

    @property
    def engine(self) -> Optional[Engine]:
        """What exchanges gradients, while there is somebody to exchange with."""
        return None if self.training is None else self.training.engine

    @property
    def replicas(self) -> Replicas:
        """Those of the training; the model is one without."""
        return _ONE if self.training is None else self.training.replicas

    def start(
        self, ddp: Wrapper, optimizers: Sequence[Optimizer], given: RuntimeOptions, goes_alone: bool = False
    ) -> None:
        """Begin, after checks that one process makes as well; it exchanges with itself if it ``goes_alone``."""
        self.end()
        self._finish_with({}, None)
        self.optimizers, self._scaler = optimizers, given.scaler
        settings = replace(self.settings, adam=None)
        self.settings = settings = settings.correcting_adam() if can_correct(settings, optimizers) else settings
        check_optimizers(settings, optimizers)
        module = named_module(ddp)
        OptimizerView(dict(module.named_parameters()), optimizers, settings.feedback).close()  # it checks them
        is_alone = dist.get_world_size(ddp.process_group) == 1
        if is_alone and not goes_alone:
            settings.compressor.begin(layout_of(module, 0, 1, next(module.parameters()).device))
            self._log(f"one process, so there is nothing to exchange or compress; on several {describe(settings)}.")
        else:
            self._log(f"{describe(settings)}.")
            if is_alone:
                self._log(RESUMES_ALONE)
            self.training = Training(ddp, optimizers, settings, given, self._log)
        hooks = warn_of_adaptive(settings, optimizers, warn_user)
        if self.training is not None:
            self.training.steps.handles += hooks

    def reset_residuals(self) -> None:
        """Set residuals and momentum to zero, as :meth:`~lightning_sparse.SparseDDPStrategy.reset_residuals` does."""
        if self.training is not None:
            self.training.reset_residuals()

    def compression_stats(self) -> dict[str, float]:
        """Return what the last step's exchange, and all of them, did on this rank, as plain floats.

        Names are those of :meth:`~lightning_sparse.SparseDDPStrategy.compression_stats`. In a loop of one's own all the
        time between two steps counts for ``exposed_share``, but that inside ``shared_model()``. Empty before the first
        step and on one process; at the end they stay what they were.
        """
        return dict(self._final_stats) if self.engine is None else self.engine.compression_stats()

    def plan(self) -> Optional[Plan]:
        """Return the plan that this rank follows, or did when training ended; ``None`` if none, or none yet."""
        return self._final_plan if self.engine is None else self.engine.planner.plan

    def state(self) -> Optional[dict[str, Any]]:
        """Return this rank's state between two steps, not copied, or that at the end; ``None`` on one process.

        All ranks must call: of tensors that they hold differently each then returns its own.
        """
        training = self.training
        state = self.final_state if training is None else training.state(together=True)
        if state is None or not self.settings.replicas_diverge:
            return state
        # The file of the model holds those of one rank; they differ, as the gradients that they were fed with.
        state = {**state, "optimizers": states_of(self.optimizers if training is None else training.optimizers)}
        return state if self._scaler is None else {**state, "scaler": self._scaler.state_dict()}

    def _finish_with(self, stats: Mapping[str, float], plan: Optional[Plan]) -> None:
        self._final_stats, self._final_plan = dict(stats), plan
        self.final_state: Optional[dict[str, Any]] = None

    def end(self, has_failed: bool = False, keeps_state: bool = False) -> None:
        """End the exchange and leave the optimizers alone; safe to call twice.

        ``has_failed`` says that training ends by an error of this rank, for which others may wait.
        """
        if (training := self.training) is None:
            return
        # After an error a device may be in the midst of an exchange that never ends: it is not asked for anything.
        can_ask = not has_failed or training.device.type == "cpu"
        self._finish_with(*((self.compression_stats(), self.plan()) if can_ask else ({}, None)))
        is_whole = training.close(self._final_stats, has_failed)
        self.training, self.optimizers = None, training.optimizers
        if is_whole and can_ask and keeps_state:  # on a GPU it takes as much memory as the model
            self.final_state = tree_map_only(Tensor, lambda each: each.detach().cpu(), training.state())
        vars(training).clear()  # its engine calls it: what is as large as the model would wait for Python's collection


class Training:
    """One training that exchanges, of one wrapped model, until closed."""

    def __init__(
        self, ddp: Wrapper, optimizers: Sequence[Optimizer], settings: Settings, given: RuntimeOptions, log: Log
    ) -> None:
        self.settings = settings
        self.optimizers = optimizers  # that train the model
        self.view: OptimizerView
        self.is_dense = False  # steps send everything, as DDP does
        self.backwards = 0  # since the last step of an optimizer
        self._waiting: Sequence[Optimizer] = ()  # for their step since the last backward
        self._has_warned_of_gradients = False
        self.before_step: Callable[[], None] = self.begin_steps
        self.after_step: Callable[[], None] = lambda: None
        self._given, self._log = given, log
        self._has_warned_of_validations = False
        module, self.device = named_module(ddp), next(ddp.module.parameters()).device
        ordered, told = in_one_order(settings, module, backend_of(self.device, ddp.process_group))
        for line in told:
            log(line)
        around = (self._open, lambda: self.view.note_arrived())
        self._trained = TrainedParameters(module, all_optimizer_parameters(optimizers))
        if rest := self._trained.without_optimizer():
            log(WITHOUT_OPTIMIZER.format(names=listed(rest)))
        parts = (ordered, given.timeout, log, given.local_world_size, *around, self._trained.parameters)
        self.engine = engine = Engine(ddp, *parts)
        # Whether the coming steps are left to plain DDP.
        self.choice = AutoBackend(engine, self.device, log) if isinstance(settings.schedule, Auto) else None
        self._attend()
        self._loaded = LoadedParameters(module, optimizers)
        if self.view.takes_momentum:
            log(TAKES_MOMENTUM)

    def _attend(self) -> None:
        """See what the optimizers are to do, and hear of each step."""
        parameters, engine = ddp_parameters(self.engine.module), self.engine
        feedback, optimizers = self.settings.feedback, self.optimizers
        look = before_step_of_training(self._before_step)
        stepping = [each for optimizer in optimizers for each in chain_of(optimizer)]
        hooks = [each.register_step_pre_hook(look) for each in stepping if calls_hooks(each)]
        self.view = OptimizerView(parameters, optimizers, feedback, engine.densities.target, engine.memory)
        if self.view.adam is not None:
            self.view.adam.watch(partial(warn_user, CHANGED), _unscaling_changes(self._given.scaler, self.device))
            self.view.adam.clips.ask(self._given.clipping, parameters.values())
        self.steps = CountedSteps(optimizers, self._begin_step, self._end_step, warn_user)
        self.steps.handles += hooks

    def restart_if_changed(self, optimizers: Optional[Sequence[Optimizer]] = None) -> None:
        """Exchange what there is to train by now, on which all ranks have to agree, between two batches.

        State follows parameters, whatever their names. What was exchanged once, and is frozen, counts as unused.
        """
        optimizers = self.optimizers if optimizers is None else optimizers
        has_others = len(optimizers) != len(self.optimizers) or not all(map(is_, optimizers, self.optimizers))
        if not (self._trains_others(optimizers) or has_others):
            return
        before = self._trained
        held = all_optimizer_parameters(optimizers)
        present = TrainedParameters(self.engine.module, held, before.parameters.values())
        if before.has_others() and isinstance(self.engine.wrapper, ShardedModel):
            raise RuntimeError(_NEW)
        changes = before.changes_to(present), "other optimizers" * has_others
        check_alike("; ".join(filter(None, changes)), dist.get_rank(), self._given.timeout)
        if has_others:
            self._take_optimizers(optimizers)
        has_restarted = self._restart(present)
        self._loaded.watch(self.engine.module, optimizers)
        if has_restarted:
            self._log(f"other parameters are trained from now on, {len(present.parameters)} in all.")

    def _restart(self, present: TrainedParameters) -> bool:
        """Exchange other parameters, if they are others; layers that are new are rank 0's."""
        before, module = self._trained, self.engine.module
        has_others = before.has_others()
        if not (has_others or before.changes_to(present)):
            return False
        if has_others:
            sync_module_states(module, before.known_in(present))
        self._trained = present
        self.view.know(ddp_parameters(module))
        self.engine.restart(present.parameters, before.renaming_to(present))
        return True

    def _trains_others(self, optimizers: Sequence[Optimizer]) -> bool:
        """Return whether the model has other parameters to train, once its own are in their place."""
        trained = all_optimizer_parameters(optimizers)
        if not self._trained.have_changed(trained):
            return False
        if isinstance(self.engine.wrapper, ShardedModel):
            reshard(self.engine.module)  # an evaluation may have left parameters whole
            return self._trained.have_changed(trained)
        return True

    def _take_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Go on with other optimizers, between two steps."""
        if self.backwards:
            raise RuntimeError(_OTHER_OPTIMIZERS)
        before = self.view.adam
        check_optimizers(self.settings, optimizers)
        can_correct(self.settings, optimizers)  # it refuses what has to be corrected and cannot be
        self.optimizers = optimizers
        self.view.close()
        self.steps.close()
        self._attend()
        self.steps.handles += warn_of_adaptive(self.settings, optimizers, warn_user)
        if before is not None and self.view.adam is not None:
            self.view.adam.see_other_states()
            self.view.adam.warm_up.resume_from(before.warm_up)

    def expect_steps(self, total_steps: Optional[int], tells_rounds: bool = True, is_trial: bool = False) -> None:
        """Know how many optimizer steps the whole training has, if known; say how many rounds that is, if it is."""
        total_steps = None if total_steps is None else int(total_steps)  # of numpy's, too
        densities = self.engine.densities
        check_total_steps(self.settings, total_steps)
        densities.expect_steps(total_steps)
        if (adam := self.view.adam) is not None:
            adam.warm_up.total_steps = total_steps
            if adam.warm_up.is_dense:
                self._log(adam_line(self.settings, self.optimizers, total_steps))
        if tells_rounds and total_steps is not None and (local := self.settings.local_steps) is not None:
            log_rounds(local, total_steps, self._log, None if is_trial else warn_user)

    def turn(self) -> None:
        """Have the coming steps send everything, as DDP does, or not, or leave them to rounds; between two steps."""
        rounds, adam = self.engine.rounds, self.view.adam
        if rounds is not None:
            is_dense = rounds.is_synchronous
            if self.is_dense and not is_dense:  # they begin with one model
                sync_module_states(self.engine.module)
        else:
            is_dense = self.choice is not None and self.choice.wants_dense
            if adam is not None:
                is_dense = adam.warm_up.is_dense or is_dense
        if is_dense != self.is_dense:
            self.is_dense = is_dense
            self.engine.send_dense(is_dense)

    @property
    def replicas(self) -> Replicas:
        """Those of the engine; the model is one, without anything done for it, after steps that come before rounds."""
        is_one = self.is_dense and self.settings.local_steps is not None
        return _ONE if is_one else self.engine.replicas

    @property
    def is_in_round(self) -> bool:
        """Whether exchanges are left to rounds of local steps."""
        return self.settings.local_steps is not None and not self.is_dense

    def begin_steps(self) -> None:
        """Begin local steps, if exchanges are left to rounds; all ranks must call, before an update of theirs."""
        if (rounds := self.engine.rounds) is not None and not self.is_dense:
            rounds.begin_steps()

    def begin_batch(self, optimizers: Optional[Sequence[Optimizer]] = None) -> None:
        """Begin a batch, before its forward."""
        self.restart_if_changed(optimizers)
        self.turn()
        has_loaded = self.is_in_round and self._reset_loaded()
        if self.replicas.are_apart:
            self.replicas.begin_round()
        if has_loaded:
            self.replicas.reset_shared_model()
        if self.settings.replicas_diverge or self.choice is not None:
            self.steps.see_weights(self.engine.module)

    def end_round(self, is_trial: bool = False) -> None:
        """End a round for a validation, so that what is validated has moved; warn where rounds are far shorter so."""
        if (rounds := self.engine.rounds) is None:
            return
        warning = warning_of_validations(rounds.local, rounds.steps_since_ended)
        rounds.synchronize()
        if warning and not (is_trial or self._has_warned_of_validations):
            self._has_warned_of_validations = True
            warn_user(warning)

    def begin(self, is_automatic: bool = False) -> None:
        """Begin a backward, under Lightning's automatic optimization or by hand."""
        self._add_backward()
        reducer = self.engine.reducer
        # Others may come before a step's last, by a hook of one's own, and go with it.
        reducer.allow_implicit_backward = not is_automatic or bool(self.engine.wrapper.require_backward_grad_sync)
        reducer.prepare_for_backward()

    def _add_backward(self) -> None:
        self.backwards, self._waiting = self.backwards + 1, self.optimizers

    @property
    def has_stepped(self) -> bool:
        """Whether each optimizer has made its step since the last backward."""
        return not self._waiting

    def set_inside(self, is_inside: bool) -> None:
        """Have backwards that Lightning does not announce be exchanged, as inside of manual optimization, or not."""
        self.engine.reducer.allow_implicit_backward = is_inside

    def _open(self, is_explicit: bool) -> None:
        """Begin a step's exchange, before the first of its gradients is taken."""
        if not is_explicit:
            self.engine.worker.raise_error()
            if self.engine.rounds is None:  # else a model is made one, between two backwards
                self.turn()
            self._add_backward()
            if self.view.adam is not None or self.settings.feedback.momentum is not None:
                self.steps.see_weights(self.engine.module)
        continued = self.engine.reducer.reduced.continued
        if not (continued or self.is_dense):
            self.engine.recorder.begun_steps += 1
        if self.is_dense:
            adam = self.view.adam
            self.engine.begin_dense_backward(self.choice is None and adam is not None and adam.warm_up.is_dense)
        if self.settings.local_steps is None:
            self._reset_loaded()
            context = self.view.next_step(self.is_dense, continued, self.engine.reducer.reduced.begun)
            scale = _scale_of(self._given.scaler, self.device)
            self.engine.begin_backward(context._replace(loss_scale=scale))

    def reset_residuals(self) -> None:
        """Drop all that has not been sent, and momentum; of rounds go on from the weights that there are now."""
        self._reset(set(self.engine.module.parameters()))
        if self.is_in_round:
            self.replicas.reset_shared_model()

    def _reset(self, parameters: AbstractSet[Tensor]) -> None:
        names = [name for name, each in ddp_parameters(self.engine.module).items() if each in parameters]
        self.engine.worker.run(lambda: self.engine.memory.reset(names))
        self._log(ROLLED_BACK.format(count=len(names)))

    def _reset_loaded(self) -> bool:
        """Reset the residuals of weights that were loaded since the last exchange, and return whether any were."""
        loaded = self._loaded.take()
        has_trained = self.engine.recorder.last is not None
        if loaded and has_trained:
            self._reset(loaded)
        return bool(loaded) and has_trained

    def end_backward(self, is_inside: bool) -> None:
        """End a backward; raise what its exchange has raised."""
        self.engine.reducer.finalize_backward()
        self.set_inside(is_inside)
        self.view.note_arrived()
        self.engine.worker.raise_error()

    def _begin_step(self) -> None:
        if self.engine.reducer.is_open:
            raise RuntimeError(_BROKEN)

    def _before_step(self, optimizer: Optimizer, *step: Any) -> Any:
        has_begun = self.engine.rounds is not None and self.engine.rounds.has_begun
        if has_begun and any(
            each.grad is not None for each in optimizer_parameters(optimizer)
        ):  # else a closure makes them
            self.before_step()  # a closure may begin with weights that were moved for it, as SAM's
        return after_closure(self._before_update)(optimizer, *step)

    def _before_update(self, optimizer: Optimizer) -> None:
        if self.engine.reducer.holds_own(optimizer_parameters(optimizer)):
            raise RuntimeError(_OWN)
        if self._trained.have_changed(all_optimizer_parameters(self.optimizers)) and self._trained.lacks_any(
            optimizer_parameters(optimizer)
        ):
            raise RuntimeError(_NEW)
        self.before_step()

    def _end_step(self, optimizer: Optimizer) -> None:
        self.before_step()  # of a first one that a scaler has left out
        self.backwards, self._waiting = 0, [each for each in self._waiting if each is not optimizer]
        if self.view.adam is not None:
            self.view.adam.clips.end_step(optimizer)
        if self.choice is not None:
            self.choice.end_step()
        self.engine.reducer.reduced.forget(optimizer_parameters(optimizer))
        number = next((number for number, each in enumerate(self.optimizers) if each is optimizer), None)
        if number is None:
            raise RuntimeError(_OTHER_OPTIMIZERS)
        self.engine.end_step(number)
        self.after_step()

    def state(self, together: bool = False) -> dict[str, Any]:
        """Return this rank's state between two steps, not copied; all ranks call if ``together``."""
        if together:
            self._warn_of_gradients()
            self.engine.worker.drain()
        clips = [] if self.view.adam is None else self.view.adam.clips.state()
        return {**collect_state(self.engine, together), "clips": clips}

    def _warn_of_gradients(self) -> None:
        """Warn once of a save between two batches of a step, whose gradients are in no checkpoint."""
        holds = self.backwards and any(each.grad is not None for each in all_optimizer_parameters(self.optimizers))
        if holds and not self._has_warned_of_gradients:
            self._has_warned_of_gradients = True
            warn_user(UNSAVED_GRADIENTS.format(backwards=self.backwards))

    def load(self, state: Mapping[str, Any]) -> list[str]:
        """Continue from a state; return in words what of it is of no use here."""
        usable, unused = match_state(state, self.engine)
        exchanged = set(usable["rounds"]["local"] if "rounds" in usable else usable.get("order", ()))
        frozen = [each for name, each in self.engine.module.named_parameters() if name in exchanged]
        held = all_optimizer_parameters(self.optimizers)
        self._restart(TrainedParameters(self.engine.module, held, [*self._trained.parameters.values(), *frozen]))
        self.engine.load_state_dict(usable)
        self.engine.reducer.restore_order(usable.get("order", ()))
        if self.view.adam is not None:
            self.view.adam.clips.load(state["clips"])
        if self.settings.replicas_diverge:
            load_states(self.optimizers, state.get("optimizers", ()))
            if self._given.scaler is not None and "scaler" in state:
                self._given.scaler.load_state_dict(state["scaler"])
        self._loaded.clear()
        return unused

    def close(self, stats: Mapping[str, float], has_failed: bool) -> bool:
        """End the exchange, leave the optimizers alone, and return whether what is kept is that of a whole step."""
        if stats.get("total_steps") and not has_failed and self.engine.topology.world_size > 1:
            dense = "HSDP" if isinstance(self.engine.wrapper, ShardedModel) else "DDP"
            self._log(report(stats, None if self.choice is None else self.choice.verdict, dense))
        self.steps.close()
        self._loaded.close()
        is_whole = self.engine.close(has_failed)
        self.view.close()
        return is_whole


def _scale_of(scaler: Any, device: torch.device) -> Optional[Tensor]:
    """Return the scale of the loss without asking a device for its value: that of a one."""
    return None if scaler is None else scaler.scale(torch.ones((), device=device))


def _unscaling_changes(scaler: Any, device: torch.device) -> int:
    """Return how many changes of a gradient torch counts where a scaler unscales it; devices differ."""
    if scaler is None or not scaler.is_enabled():
        return 0
    # In the one type that torch takes, whatever the default type.
    gradient, factor, found = (torch.full((1,), each, dtype=torch.float32, device=device) for each in (1.0, 1.0, 0.0))
    torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, factor)
    return gradient._version


def warn_user(message: str) -> None:
    """Warn, on one rank, at the line of the user's own that has led here, whichever packages lie between."""
    if dist.get_rank() != 0:
        return
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
