"""The loop: what a training does around an exchange, the same behind the Trainer, Fabric and a loop of one's own."""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import chain
from operator import is_
from types import FrameType
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_sparse.compressors.base import NOT_CLIPPED, Clipping, layout_of
from lightning_sparse.engine import Engine
from lightning_sparse.engine.collectives import align, backend_of
from lightning_sparse.engine.refusals import refuse
from lightning_sparse.engine.replicas import Replicas
from lightning_sparse.engine.settings import Settings
from lightning_sparse.engine.step.exchange import Wrapper
from lightning_sparse.engine.step.levels import Topology
from lightning_sparse.engine.step.shards import ShardedModel
from lightning_sparse.loop.backend_choice import BackendChoice
from lightning_sparse.loop.checks import in_one_order
from lightning_sparse.loop.kept import EVERYWHERE, RANK, fitted, kept_by, load_states, states_of
from lightning_sparse.loop.optimizers import (
    CountedSteps,
    OptimizerView,
    TrainedParameters,
    UnfinishedStep,
    can_correct,
    chain_of,
    handled,
)
from lightning_sparse.loop.summary import (
    CHANGED,
    FEW_ROUNDS,
    RESUMES_ALONE,
    SAFE_STEPS,
    SHORTEST_PART,
    TAKES_MOMENTUM,
    closing,
    counted,
    summary,
    takes_adam,
    tells_default_warm_up,
    tells_warm_up,
    warning_of_rounds,
    warning_of_validations,
)
from lightning_sparse.schedule import Auto, Plan

CLOSED = (
    "closed: to train on, sparsify the model anew, in a new DistributedDataParallel if it was in one; or"
    " train a copy of the model alone"
)
_NEW = (
    "the model has parameters that it did not have when its forward began, or shards that it did not have: add and"
    " replace layers between two batches, such as in on_train_batch_start, and those of a sharded model before training"
)
_BROKEN = (
    "an optimizer steps before gradients are exchanged: the last backward has ended in an error on this rank, so that"
    " training has to end on all, or to go on with a model that is sparsified anew; or the step is made inside backward"
)


_ONE = Replicas()
_NOT_USERS = {__name__.partition(".")[0], "lightning", "pytorch_lightning", "lightning_fabric", "torch"}


class Loop:
    """What a training does around the exchange of one wrapped model; nothing on one process, and until it starts."""

    def __init__(self, settings: Settings, log: Callable[[str], None]) -> None:
        self.settings = settings  # what the user chose, checked, and what it asks of the memory in this training
        self._log = log
        self.engine: Optional[Engine] = None  # also on one process
        self.optimizers: Sequence[Optimizer] = ()  # that train the model
        self._scaler: Any = None
        self.remember({}, None)
        self._forget()

    def _forget(self) -> None:
        self.epoch: Optional[int] = None  # that goes on, from 0, if anybody has told
        self.is_dense = False  # steps send everything, as DDP does
        self.choice: Optional[BackendChoice] = None  # whether the coming steps are left to plain DDP
        self.unfinished = UnfinishedStep()
        self.view = OptimizerView({}, (), self.settings.feedback)
        self.steps = CountedSteps((), self._begin_step, self._end_step, warn_user)
        self._has_warned_of_validations = False

    def start(
        self,
        ddp: Wrapper,
        optimizers: Sequence[Optimizer],
        timeout: Optional[timedelta] = None,
        scaler: Any = None,
        clipping: Clipping = NOT_CLIPPED,
        node_ranks: int = 1,
        goes_alone: bool = False,
    ) -> None:
        """Begin, after checks that one process makes as well; it exchanges with itself if it ``goes_alone``."""
        self.end()
        self.remember({}, None)
        settings = replace(self.settings, adam=None)
        self.settings = settings = settings.correcting_adam() if can_correct(settings, optimizers) else settings
        if settings.replicas_diverge:
            refuse(chain.from_iterable(map(of_communication, optimizers)))
        parameters = dict(ddp.module.named_parameters())
        self._device = next(iter(parameters.values())).device
        OptimizerView(parameters, optimizers, settings.feedback).close()  # it checks them
        self.optimizers = optimizers
        if dist.get_world_size(ddp.process_group) == 1 and not goes_alone:
            settings.compressor.begin(layout_of(ddp.module, 0, 1, self._device))
            self._log(f"one process, so there is nothing to exchange or compress; on several {summary(settings)}.")
            self._attend_to(optimizers)
            return
        self._log(f"{summary(settings)}.")
        if dist.get_world_size(ddp.process_group) == 1:
            self._log(RESUMES_ALONE)
        self._scaler = scaler
        self.engine = engine = self._engine_of(ddp, node_ranks, timeout)
        self._clipping = clipping
        self._trained = TrainedParameters(ddp.module, timeout)
        if isinstance(settings.schedule, Auto):
            self.choice = BackendChoice(engine, self._device, self._log)
        self._attend_to(optimizers)
        if self.view.takes_momentum:
            self._log(TAKES_MOMENTUM)

    def _engine_of(self, ddp: Wrapper, node_ranks: int, timeout: Optional[timedelta]) -> Engine:
        backend = backend_of(self._device, ddp.process_group)
        settings, told = in_one_order(self.settings, ddp.module, backend)
        for line in told:
            self._log(line)
        around = (self._open, lambda: self.view.note_arrived())
        return Engine(ddp, settings, timeout, self._log, node_ranks, *around)

    def _attend_to(self, optimizers: Sequence[Optimizer]) -> None:
        """See what the optimizers are to do, hear of each step, and warn of those that learn from sparse gradients."""
        self.view.close()
        self.steps.close()
        if self.engine is not None:
            parameters = dict(self.engine.wrapper.module.named_parameters())
            feedback, target_of, memory = self.settings.feedback, self.engine.densities.target, self.engine.memory
            self.view = OptimizerView(parameters, optimizers, feedback, target_of, memory)
            if self.view.adam is not None:
                self.view.adam.watch(partial(warn_user, CHANGED), _unscaling_changes(self._scaler, self._device))
                self.view.adam.clip(self._clipping, parameters.values())
            self.steps = CountedSteps(optimizers, self._begin_step, self._end_step, warn_user)
        self.steps.warn_of_adaptive(self.settings, optimizers)

    def track_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Go on with the optimizers that there are now, between two steps; residuals stay with their parameters."""
        if len(optimizers) == len(self.optimizers) and all(map(is_, optimizers, self.optimizers)):
            return
        if self.engine is None:
            self.optimizers = optimizers
            return
        before = self.view.adam
        if self.unfinished.is_begun and before is not None:
            raise ValueError(
                "trainer.optimizers = [...] came between backward and step, where what has arrived is an update of the"
                " optimizer before: assign it after a step, such as in on_train_epoch_start"
            )
        if self.settings.replicas_diverge:
            refuse(chain.from_iterable(map(of_communication, optimizers)))
        can_correct(self.settings, optimizers)  # it refuses what has to be corrected and cannot be
        self.optimizers = optimizers
        self._attend_to(optimizers)
        if before is not None and self.view.adam is not None:
            self.view.adam.total_steps = before.total_steps
            self.view.adam.begin_anew()

    def expect_steps(self, total_steps: Optional[int]) -> None:
        """Know how many optimizer steps the whole training has, if that is known, for warm-ups."""
        total_steps = None if total_steps is None else int(total_steps)  # of numpy's, too
        if self.engine is not None:
            self.engine.densities.expect_steps(total_steps)
            if self.engine.densities.warm_up_steps is not None:
                self._log(tells_default_warm_up(self.settings, self.engine.densities.warm_up_steps))
        adam = self.view.adam
        if adam is not None:
            adam.total_steps = total_steps
        if adam is not None and adam.is_dense:
            self._log(takes_adam(self.settings, self.optimizers, total_steps, adam.is_resumed))

    def tell_of_rounds(self, total_steps: Optional[int], is_trial: bool = False) -> None:
        """Say how many rounds a training of so many optimizer steps makes, and warn of few, unless it ``is_trial``."""
        local = self.settings.local_steps
        if self.engine is None or local is None or total_steps is None or not isinstance(local.every, int):
            return
        count = -(-max(0, total_steps - local.synchronous_steps) // local.every)
        rounds = f"{counted(count, 'round')} of {counted(local.every, 'local step')}"
        self._log(f"up to {counted(total_steps, 'optimizer step')}, that is {rounds}.")
        if count < FEW_ROUNDS and local.every > SAFE_STEPS and not is_trial:
            warn_user(warning_of_rounds(local.every, count, total_steps))

    @property
    def wants_length(self) -> bool:
        """Whether a warm-up depends on how many steps the whole training has."""
        return self.view.adam is not None or (self.engine is not None and self.settings.bounds_warm_up)

    @contextmanager
    def clipped_before(self, clipping: Clipping, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Have the next gradients clipped that updates are made of, and keep those updates out of sight meanwhile."""
        adam = self.view.adam
        if adam is not None:
            adam.clip(clipping, parameters)
        with nullcontext() if adam is None else adam.hidden():
            yield

    def _wants_dense(self) -> bool:
        """Tell whether the batch that begins is left to plain DDP; the same on all ranks."""
        assert self.engine is not None
        if self.engine.rounds is not None:
            return self.engine.rounds.is_synchronous
        is_chosen = False if self.choice is None else self.choice.begin_batch(self.is_dense)
        if (adam := self.view.adam) is None:
            return is_chosen
        is_resumed, warm_up = adam.is_resumed, adam.look(self.engine.mean_over_ranks)
        if warm_up is not None and not is_resumed:
            self._log(tells_warm_up(warm_up, self.settings.density))
        return adam.is_dense or is_chosen

    def _track_model(self, forgets: bool = False, between: bool = False) -> None:
        """Exchange what is trained of the model by now, on which all ranks agree, and not what is frozen if it forgets.

        A round ends with that, and writes what a backward still needs: it waits until this is asked ``between`` two.
        """
        if self.engine is None:
            return
        if between and self._trained.is_round_behind:
            self._trained.is_round_behind = False
            self.engine.track(self._trained.parameters)
        if not self._trained.have_changed(self.optimizers, forgets):
            return
        trained, module = self._trained, self.engine.wrapper.module
        has_new = trained.has_new()
        if has_new and (not between or isinstance(self.engine.wrapper, ShardedModel)):
            raise RuntimeError(_NEW)
        known = trained.known_names
        # What is frozen between two batches of a step has gradients that are to be exchanged.
        keeps = self.unfinished.is_begun and not self.is_silent
        changes = trained.agree(forgets, keeps, dist.get_rank())
        if not (changes or has_new):
            return
        if has_new:
            align(module, known)
        self.view.know(dict(module.named_parameters()))
        if self.is_silent and not between:
            self.engine.source.track(trained.parameters)
            self._trained.is_round_behind = True
        else:
            self.engine.track(trained.parameters)
        self._log(f"other parameters are trained from now on, {len(trained.parameters)} in all.")

    def _turn(self) -> None:
        """Have the coming steps send everything, as DDP does, or not, or leave them to rounds; between two steps."""
        assert self.engine is not None
        is_dense, rounds = self._wants_dense(), self.engine.rounds
        if is_dense == self.is_dense:
            return
        if rounds is not None and not is_dense:  # they begin with one model
            align(self.engine.wrapper.module)
        self.leave_to_ddp(is_dense)

    def leave_to_ddp(self, is_dense: bool) -> None:
        """Have the coming steps send everything, as DDP does, or not; between two steps."""
        assert self.engine is not None
        self.is_dense = is_dense
        self.engine.leave_to_ddp(is_dense)

    @property
    def replicas(self) -> Replicas:
        """Those of the engine; the model is one, without anything done for it, after steps that come before rounds."""
        is_one = self.is_dense and self.settings.local_steps is not None
        return _ONE if self.engine is None or is_one else self.engine.replicas

    @property
    def is_silent(self) -> bool:
        """Whether exchanges are left to rounds of local steps."""
        return self.settings.local_steps is not None and not self.is_dense

    def begin_batch(self, adopts: bool = False, forgets: bool = False) -> None:
        """Begin a batch, before its forward.

        Rounds go on from the model that there is now if it ``adopts`` that. What is frozen is exchanged no more if it
        ``forgets`` that: where models are toggled within a step, it is frozen for a moment.
        """
        if self.engine is None:
            return
        self._track_model(forgets, between=True)
        self._turn()
        if self.replicas.are_apart:
            self.replicas.begin_round()
        if adopts:
            self.replicas.adopt()
        if self.is_silent and self.engine.topology.are_islands:
            # DDP would leave buffers as they are in the batch after a validation, but not after a resume.
            self.engine.wrapper.require_forward_param_sync = True
        if self.settings.replicas_diverge or self.choice is not None:
            self.steps.see_weights(self.engine.wrapper.module)

    def end_round(self, is_trial: bool = False) -> None:
        """End a round for a validation, so that what is validated has moved; warn where rounds are far shorter so."""
        rounds, local = None if self.engine is None else self.engine.rounds, self.settings.local_steps
        if rounds is None or local is None:
            return
        steps = rounds.steps_since_ended
        rounds.synchronize()
        is_short = isinstance(local.every, int) and 0 < steps * SHORTEST_PART < local.every
        if is_short and not (is_trial or self._has_warned_of_validations):
            self._has_warned_of_validations = True
            warn_user(warning_of_validations(local.every, steps))

    def begin(self, is_automatic: bool = False) -> None:
        """Begin a backward, under Lightning's automatic optimization or by hand."""
        if self.engine is not None:
            self._track_model()
        self.unfinished.add_backward(self.optimizers, is_automatic)
        if self.engine is not None:
            self.engine.source.expect()

    def _open(self, is_told: bool) -> None:
        """Begin a step's exchange, before the first of its gradients is taken."""
        assert self.engine is not None
        if not is_told:
            self.check_epoch()
            self._track_model()
            if self.engine.rounds is None:  # else a model is made one, between two backwards
                self._turn()
            self.unfinished.add_backward(self.optimizers, False)
        continued = self.engine.arrived.state().keys()
        self.engine.recorder.continues_step = bool(continued)
        if self.is_dense:
            adam = self.view.adam
            self.engine.begin_dense_backward(self.choice is None and adam is not None and adam.is_dense)
        if self.settings.local_steps is None:
            context = self.view.coming_step(self.is_dense, continued)
            # Scaling a one gives the scale without asking the device for its value.
            scale = None if self._scaler is None else self._scaler.scale(torch.ones((), device=self._device))
            self.engine.begin_backward(context._replace(loss_scale=scale), self.epoch or 0)

    def is_any(self, flag: bool) -> bool:
        """Tell whether a flag is set on any rank, which all must ask."""
        assert self.engine is not None
        return self.engine.mean_over_ranks(float(flag)) > 0

    def check_epoch(self) -> None:
        """Raise what an exchange has raised, and where nobody has told of the epoch."""
        assert self.engine is not None
        self.engine.worker.raise_error()
        if self.epoch is None and self.settings.warmup_epochs and self.engine.densities.warm_up_steps is None:
            raise RuntimeError(
                f"warmup_epochs={self.settings.warmup_epochs} counts epochs, of which a loop of one's own has to tell:"
                " call set_epoch(epoch), of what sparsify returned or of fabric.strategy, at the start of each, or give"
                f" warmup_epochs=0{' or total_steps' if self.settings.bounds_warm_up else ''}"
            )

    def end_backward(self) -> None:
        """End a backward; raise what its exchange has raised."""
        if self.engine is not None:
            self.engine.source.finish()
            self.view.note_arrived()
            self.engine.worker.raise_error()

    def _begin_step(self) -> None:
        if self.engine is not None and self.engine.source.is_open:
            raise RuntimeError(_BROKEN)

    def _end_step(self, optimizer: Optimizer) -> None:
        self.unfinished.end(optimizer)
        if self.view.adam is not None:
            self.view.adam.end_step(optimizer)
        if self.choice is not None:
            self.choice.end_step()
        if self.engine is not None:
            if self.is_silent:
                self._track_model(between=True)
            self.engine.arrived.forget(handled(optimizer))
            number = next((number for number, each in enumerate(self.optimizers) if each is optimizer), None)
            if number is None:
                raise RuntimeError(
                    f"{type(optimizer).__name__} makes a step in a batch that began without it: assign"
                    " trainer.optimizers = [...] between two batches, such as in on_train_batch_start"
                )
            self.engine.end_step(number, self.epoch or 0)

    def pause(self) -> None:
        """Count no time from here on, before a validation."""
        if self.engine is not None:
            self.engine.recorder.totals.pause()

    def resume(self) -> None:
        """Count time from here on, after a validation."""
        if self.engine is not None:
            self.engine.recorder.totals.resume()

    def stats(self) -> dict[str, float]:
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
        """Return what this rank keeps between two steps (not copied), or has kept; ``None`` if nothing.

        All ranks must ask: of what they hold differently each then keeps its own.
        """
        kept = self.final_state
        if self.engine is not None:
            self.engine.worker.drain()
            kept = kept_by(self.engine, together=True)
        if kept is None:
            return None
        own = dict(kept[RANK])
        if self.settings.replicas_diverge:
            # The file of the model holds those of one rank; they differ, as the gradients that they were fed with.
            own["optimizers"] = states_of(self.optimizers)
            if self._scaler is not None:
                own["scaler"] = self._scaler.state_dict()
        clips = [] if self.view.adam is None else self.view.adam.clips()
        return {**kept, RANK: own, EVERYWHERE: {**kept[EVERYWHERE], "clips": clips}, "epoch": self.epoch}

    def load(self, kept: Mapping[str, Any]) -> list[str]:
        """Go on from what a rank kept, maybe of another topology; return in words what is of no use here."""
        assert self.engine is not None
        usable, unused = fitted(kept, self.engine)
        self.engine.load_state_dict(usable)
        own, everywhere = kept[RANK], kept[EVERYWHERE]
        if self.view.adam is not None:
            self.view.adam.restore_clips(everywhere["clips"])
        if self.settings.replicas_diverge:
            load_states(self.optimizers, own.get("optimizers", ()))
            if self._scaler is not None and "scaler" in own:
                self._scaler.load_state_dict(own["scaler"])
        if "plan" in usable and not self.engine.restore_plan(usable["plan"], Topology(*kept["topology"])):
            unused.append("its plan, which is for another number of ranks, another schedule or other parameters")
        return unused

    def remember(self, stats: Mapping[str, float], plan: Optional[Plan]) -> None:
        """Know what a training has come to that has ended, maybe in other processes."""
        self._final_stats, self._final_plan = dict(stats), plan
        self.final_state: Optional[dict[str, Any]] = None

    def end(self, has_failed: bool = False, keeps_state: bool = False) -> None:
        """End the exchange and leave the optimizers alone; safe to call twice.

        ``has_failed`` says that training ends by an error of this rank, for which others may wait.
        """
        self.steps.close()
        engine, verdict = self.engine, None if self.choice is None else self.choice.verdict
        if engine is not None:
            # After an error a device may be in the midst of an exchange that never ends: it is not asked for anything.
            can_ask = not has_failed or self._device.type == "cpu"
            stats, plan = (self.stats(), self.plan()) if can_ask else ({}, None)
            if stats.get("total_steps") and not has_failed and engine.topology.ranks > 1:
                self._log(closing(stats, verdict, "HSDP" if isinstance(engine.wrapper, ShardedModel) else "DDP"))
            self.remember(stats, plan)
            if engine.close(has_failed) and can_ask and keeps_state:  # on a GPU it takes as much memory as the model
                kept = kept_by(engine)
                self.final_state = tree_map_only(Tensor, lambda each: each.detach().cpu(), kept)
            self.engine = None
        vars(self).pop("_trained", None)
        self.view.close()
        self._forget()


def of_communication(optimizer: Optimizer) -> Iterator[str]:
    """Yield what is said of an optimizer that sends in its step, where each rank makes steps of its own."""
    for each in chain_of(optimizer):
        if any(map(_sends, vars(each).values())):
            yield (
                f"{type(each).__name__} holds a process group, to send in its own step, and with local steps or A2SGD"
                " each rank steps by itself: what ranks have learned would be overwritten. Give the optimizer that is"
                " inside, such as torch.optim.AdamW, or exchange in every step, with local_steps=1"
            )


def _sends(held: Any) -> bool:
    """Tell whether what an optimizer holds is a process group, or an averager that has one."""
    within = getattr(held, "__dict__", {}) if isinstance(held, ModelAverager) else {}
    return isinstance(held, ProcessGroup) or any(isinstance(each, ProcessGroup) for each in within.values())


def _unscaling_changes(scaler: Any, device: torch.device) -> int:
    """Return how many changes of a gradient torch counts where a scaler unscales it; devices differ."""
    if scaler is None or not scaler.is_enabled():
        return 0
    gradient, factor, found = torch.ones(1, device=device), torch.ones(1, device=device), torch.zeros(1, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, factor)
    return gradient._version


def warn_user(message: str) -> None:
    """Warn, on one rank, at the line of the user's own that has led here, whichever packages lie between."""
    if dist.get_rank() != 0:
        return
    frame: Optional[FrameType] = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
