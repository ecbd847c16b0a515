"""The plain loop's entry point: a model, wrapped or not, whose gradients are exchanged by the engine."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Optional, Union
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from typing_extensions import Self, Unpack

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.base import Clipping
from lightning_sparse.engine.collectives import Watch, sync_module_states
from lightning_sparse.engine.requirements import missing_capabilities, refuse
from lightning_sparse.engine.settings import Compression, Settings
from lightning_sparse.engine.step.hooks import is_in_backward
from lightning_sparse.engine.step.reducer import SparseReducer, Wrapper
from lightning_sparse.engine.step.topology import UnwrappedModule
from lightning_sparse.functional.reductions import fingerprint
from lightning_sparse.loop.arguments import pop_settings, with_settings_signature
from lightning_sparse.loop.checks import (
    check_bare,
    check_facts,
    check_replicas,
    check_rounds,
    check_total_steps,
    check_trainers,
    check_wrapped,
    refuse_training,
)
from lightning_sparse.loop.levels import agreed_ranks_of_node, own_node
from lightning_sparse.loop.loop import CLOSED, Loop, RuntimeOptions, Training
from lightning_sparse.loop.optimizers import (
    all_optimizer_parameters,
    before_step_of_training,
    optimizer_parameters,
    unwrapped,
)
from lightning_sparse.loop.state import act_together, exists, load_state, match_state, save_state
from lightning_sparse.removed import refuse_removed

_LOGGER = logging.getLogger(__name__)


@with_settings_signature()
def sparsify_gradients(
    model: Module,
    optimizer: Union[Optimizer, Iterable[Optimizer]],
    compressor: Union[str, Compressor] = "lags",
    density: Optional[float] = None,
    *,
    scaler: Optional[GradScaler] = None,
    total_steps: Optional[int] = None,
    timeout: Optional[timedelta] = None,
    **given: Unpack[Compression],
) -> "GradientSparsifier":
    """Have a model send only the part of each gradient that matters most, in a training loop of your own.

    Call it on all ranks, once, before the first backward. Parameters and buffers are copied from rank 0. Gradients are
    taken as backward makes them, and are means when it ends. On one process it makes the same checks, and does nothing.

    Args:
        model: a module as it is, which is called as ever; its buffers are rank 0's before the first forward of a step
            that trains, as with DDP. Or a ``DistributedDataParallel`` of all processes, which then exchanges nothing
            itself.
        optimizer: that trains it, or several; those that others have wrapped, such as Accelerate, are unwrapped.
        compressor: any that does not let replicas drift apart.
        density: fraction of elements sent; ``None`` for the compressor's own.
        scaler: the gradient scaler, if there is one: residuals are kept without its scale.
        total_steps: optimizer steps of the whole training, for Adam's warm-up and a ``warmup_steps`` that is a
            fraction (``"dgc"``, ``"sdagc"``: 0.1 by default); ``None`` if unknown.
        timeout: how long an exchange may wait for other ranks; ``None`` for as long as the job's process group.
        **given: settings as of :class:`~lightning_sparse.Compression`. Nodes, for ``levels``, are identified by
            torchrun's numbers of them, or by host names. With ``local_steps`` all ranks make equally many steps,
            evaluate and save the model inside :meth:`GradientSparsifier.shared_model`, and end with
            :meth:`GradientSparsifier.close`.

    Raises:
        ValueError: for a value out of range, a name that is not known, or something that a plain loop has no way for.
        TypeError: for an object of the wrong kind.
            An argument that nobody knows is one, too.
        RuntimeError: if the model has a communication hook, or the gradients of a part of it are exchanged already.
    """
    optimizers = [unwrapped(each) for each in ([optimizer] if isinstance(optimizer, Optimizer) else optimizer)]
    settings = pop_settings(sparsify_gradients, compressor, density, given)
    refuse(missing_capabilities("in a loop of one's own", settings))
    check_facts(scaler, total_steps)
    check_total_steps(settings, total_steps)
    wrapped = getattr(model, "_orig_mod", None)  # what torch.compile was given, as Accelerate does
    model = wrapped if isinstance(wrapped, DistributedDataParallel) else model
    return GradientSparsifier(model, optimizers, settings, RuntimeOptions(timeout, scaler), total_steps, _log)


def _log(line: str) -> None:
    if dist.get_rank() == 0:
        _LOGGER.info("sparsify_gradients: %s", line)


class GradientSparsifier(Loop):
    """Exchange the gradients of a model until closed; what :func:`sparsify_gradients` returns.

    As a context manager it closes itself. It checks the model and its optimizers; ``settings`` are of this model alone.

    Attributes:
        engine: what exchanges gradients; ``None`` on one process, and once closed.
        optimizers: that train the model.
    """

    def __init__(
        self,
        model: Module,
        optimizers: Sequence[Optimizer],
        settings: Settings,
        given: RuntimeOptions,
        total_steps: Optional[int],
        log: Callable[[str], None],
    ) -> None:
        super().__init__(settings, log)
        self._model: Wrapper
        _check_unattended(model)
        if isinstance(model, DistributedDataParallel):
            check_wrapped(model, dist.get_world_size())
            model.join_hook = _refuse_join  # type: ignore[method-assign]
            self._model = model
        else:
            self._model = model if isinstance(model, UnwrappedModule) else UnwrappedModule(model)
            check_bare(self._model.module)
        self._called = model
        module = self._model.module
        check_trainers(module, optimizers, settings)
        check_rounds(settings.local_steps, module)
        node = own_node() if given.node is None else given.node
        given = given._replace(local_world_size=agreed_ranks_of_node(settings, node, log))
        self._followed = FollowedModel(self._model)
        self._parts = _trained_parts(module)
        self._handles: list[Any] = []
        if model is not self._model:
            sync_module_states(module)
        try:
            self.start(self._model, optimizers, given)
            self._attend(model, given.scaler, total_steps)
        except BaseException:  # such as a warning that is an error
            self._leave(has_failed=True)
            raise
        _OPEN[self] = None

    def _attend(self, model: Module, scaler: Optional[GradScaler], total_steps: Optional[int]) -> None:
        """Take what is trained for this one's; follow it where nobody tells of batches, evaluations and saves."""
        _ATTENDED.update(self._parts)
        for each in self._model.module.modules():
            if (refusal := _REFUSALS.pop(each, None)) is not None:
                refusal.remove()
        if (training := self.training) is None:
            return
        training.expect_steps(total_steps)
        self._handles += self._followed.follow(training, model)
        if training.engine.rounds is None:
            return
        if scaler is not None:
            training.steps.count_skipped(scaler)
        training.turn()

    def _leave(self, has_failed: bool) -> None:
        """Leave model and optimizers to others."""
        _OPEN.pop(self, None)
        _ATTENDED.difference_update(self._parts)
        for handle in self._handles:
            handle.remove()
        self._followed.training = None
        self.end(has_failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close(has_failed=error is not None)

    @property
    def module(self) -> Module:
        """The model, without what it is wrapped in."""
        return self._model.module

    def clip(
        self, norm: Optional[float] = None, value: Optional[float] = None, optimizer: Optional[Optimizer] = None
    ) -> None:
        """Clip gradients between backward and the optimizer's step, as ``torch.nn.utils.clip_grad_norm_`` would.

        Where Adam is corrected, what has arrived are updates, which are not to be clipped: the gradients that they are
        made of are clipped before that instead, in the next step. With a gradient scaler call its ``unscale_``
        first, as ever.

        Args:
            norm: largest norm of the gradient, of the whole model or of one optimizer; ``None`` for no limit.
            value: largest magnitude of an element; ``None`` for no limit.
            optimizer: whose gradients are clipped, together; ``None`` for all of the model together. Where it trains
                several models and Adam is corrected, each of them is clipped by a norm of its own.

        Raises:
            ValueError: for one norm of several optimizers of which some are corrected, and some are not.
        """
        parameters = [*self._model.module.parameters()] if optimizer is None else optimizer_parameters(optimizer)
        if norm is not None and self.training is not None:
            self.training.view.check_one_norm(parameters)
        with self.clipped_before(Clipping(norm=norm, value=value), parameters):
            trained = [each for each in parameters if each.grad is not None]
            if value is not None and trained:
                torch.nn.utils.clip_grad_value_(trained, value)
            if norm is not None and trained:
                torch.nn.utils.clip_grad_norm_(trained, norm)

    @contextmanager
    def clipped_before(self, clipping: Clipping, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Have gradients exchanged that are clipped inside, and those clipped that the next updates are made of.

        Those of other models, too, that the optimizer trains as well.
        """
        clipped = set(parameters)
        with ExitStack() as hidden:
            for each in list(_OPEN):
                is_clipped = each is self or not clipped.isdisjoint(each.module.parameters())
                if is_clipped and each.training is not None:
                    hidden.enter_context(each.training.view.clipped_before(clipping, parameters))
            yield

    def no_sync(self) -> AbstractContextManager[None]:
        """Have gradients stay this rank's own inside: put it around all batches of a step but the last.

        The next backward outside exchanges the sum. Forward and backward both belong inside. It is DDP's ``no_sync()``.
        """
        no_sync: AbstractContextManager[None] = self._model.no_sync()
        return no_sync

    @contextmanager
    def shared_model(self) -> Iterator[None]:
        """Have the model be the one of all ranks inside, to evaluate and save it; then each rank goes on with its own.

        Nothing is sent. Where gradients are exchanged in every step the model is that already. The time inside counts
        for no statistics.
        """
        with self._followed.shown():
            yield

    def check_replicas(self) -> None:
        """Check that all ranks have one model, between two steps; all must call. It reads all parameters once.

        Raises:
            ReplicaError: on all ranks, if a parameter differs by a bit.
        """
        if self.engine is not None:
            with self.shared_model():
                check_replicas(self.engine, "here")

    def synchronize(self) -> None:
        """End the round of local steps early, and go on from the shared model; all ranks must call."""
        self._followed.take_up()
        self.replicas.synchronize()

    def reset_shared_model(self) -> None:
        """Share the model that there is now, such as one that was loaded in the midst of training; all ranks must call.

        With local steps, what else changes the model would be taken for a change by training.
        """
        self._followed.take_up()
        self.replicas.reset_shared_model()

    def save_state(self, folder: Union[str, Path]) -> None:
        """Write what each rank has between two optimizer steps into a folder of its own; all ranks must call.

        Save model and optimizers as ever, on one rank. Give each save a new folder. On one process nothing is written.
        """
        self._check_open()
        self._followed.take_up()
        if (state := self.state()) is not None:
            save_state({**state, "shared model": self._followed.prints()}, str(folder))

    def load_state(self, folder: Union[str, Path]) -> None:
        """Continue from what :meth:`save_state` wrote; all ranks must call, in any order with model and optimizers.

        On as many ranks training continues bitwise identically; on others the mean of the residuals continues.

        Raises:
            CheckpointError: for files that are missing, damaged, or of another format.
            ValueError: for a state of another compressor or another model, or on one process.
        """
        self._check_open()
        if (training := self.training) is None:
            if exists(str(folder)):
                raise ValueError(f"one process has no residuals, which {folder} holds: start several, or leave it out")
            return
        state = load_state(str(folder), training.engine)
        _, unused = act_together(partial(match_state, state, training.engine), f"{folder} does not fit")
        if unused:
            raise ValueError(
                f"{folder} holds what is of no use here, {'; '.join(unused)}: build the same model, optimizers and"
                " compressor, or leave it out to start with empty residuals"
            )
        self._followed.waiting = state
        if training.engine.rounds is None:
            self._followed.take_up()
        else:
            training.engine.rounds.leave()

    def _check_open(self) -> None:
        if self._followed.is_closed:
            raise RuntimeError(CLOSED)

    def __getattr__(self, name: str) -> Any:
        refuse_removed(f"{type(self).__name__}.{name}", f"GradientSparsifier.{name}", AttributeError)
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def load(self, state: Mapping[str, Any]) -> list[str]:
        """Continue from a state; return in words what of it is of no use here."""
        return self._followed.load(state)

    def close(self, has_failed: bool = False) -> None:
        """End the exchange, and leave the optimizers alone; safe to call twice.

        With local steps it ends the round: all ranks must call. Train on by giving the model to
        :func:`sparsify_gradients` anew, in a new wrapper if it was in one, or in any ``DistributedDataParallel``.
        ``has_failed`` says that training ends by an error of this rank, for which others may wait.
        """
        engine, self._followed.is_closed = self.engine, True
        try:
            if engine is not None and not has_failed and engine.worker.error is None:
                self.synchronize()
        except BaseException:
            has_failed = True
            raise
        finally:
            if engine is not None:
                _refuse_training_of(self._called)
            self._leave(has_failed)


class FollowedModel:
    """Follow a model where nobody tells of batches, evaluations and saves, and know in rounds whose model it is."""

    def __init__(self, model: Wrapper) -> None:
        self.training: Optional[Training] = None  # with which it is followed
        self.waiting: Optional[dict[str, Any]] = None  # a state of rounds, for when model and optimizers are loaded
        self.is_closed = False
        self._model = model
        self._is_shown = False  # inside of shared_model
        self._broadcasts = True

    def follow(self, training: Training, model: Module) -> list[Any]:
        """Hear of the calls of a model, as the user calls it, from now on; return hooks that are removed at the end."""
        self.training, rounds, module = training, training.engine.rounds, self._model.module
        self._broadcasts = model is not self._model  # which broadcasts buffers itself where it is called
        listen = Watch(model, torch.compiler.disable(partial(self._listen, training.engine.reducer)))
        hooks: list[Any] = [model.register_forward_hook(listen)]
        for called in {model} if rounds is None else {model, module}:  # a rank may evaluate what is inside of DDP alone
            forward = Watch(called, torch.compiler.disable(partial(self._before_forward, training)))
            hooks.append(called.register_forward_pre_hook(forward, prepend=True))
        if rounds is not None:
            hooks.append(module.register_state_dict_pre_hook(Watch(module, self._check_shared)))
            training.before_step = partial(self._begin_rounds, training)
            training.after_step = partial(self._end_step, training)
            # An optimizer may look into its own state before it calls the closure that goes forward, as LBFGS does.
            look = before_step_of_training(lambda *step: self.take_up())
            hooks += [each.register_step_pre_hook(look) for each in training.optimizers]
        return hooks

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Have the model be the one of all ranks inside."""
        self.take_up()
        before, training = self._is_shown, self.training
        recorder = None if training is None or before else training.engine.recorder
        if recorder is not None:
            recorder.totals.pause()
        with nullcontext() if training is None else training.replicas.shared_model():
            self._is_shown = True
            try:
                yield
            finally:
                self._is_shown = before
                if recorder is not None:
                    recorder.totals.resume()  # those of a state that was loaded inside are others

    def take_up(self) -> None:
        """Go on from the state that was loaded, if one was; with local steps from the model that there is now."""
        state, self.waiting = self.waiting, None
        if state is None or self.training is None:
            return
        if state["shared model"] != self.prints():
            raise ValueError(
                "this state is of another model than there is now: before the first step, load the one that was saved"
                " with it, inside `with handle.shared_model():`"
            )
        self.load(state)

    def load(self, state: Mapping[str, Any]) -> list[str]:
        """Continue from a state; return in words what of it is of no use here."""
        assert self.training is not None
        engine = self.training.engine
        if engine.rounds is not None:  # also where the shared model is shown
            engine.rounds.leave()
        unused = self.training.load(state)
        if engine.rounds is not None:
            self.training.is_dense = engine.rounds.is_synchronous
            engine.send_dense(self.training.is_dense)
        return unused

    def prints(self) -> Optional[list[int]]:
        """Return what tells shared models of local steps apart; ``None`` where each step exchanges."""
        if self.training is None or self.training.settings.local_steps is None:
            return None
        # What no optimizer has, such as a moving average, each rank may have written by itself.
        trained = set(all_optimizer_parameters(self.training.optimizers))
        with self.training.replicas.shared_model():
            held = (each for each in self._model.module.parameters() if each in trained)
            return [int(fingerprint(each)) for each in held if each.numel()]

    def _before_forward(self, training: Training, inputs: Any) -> None:
        """Begin a batch; none of the gradients of a new layer would tell of it."""
        is_training, has_grad = self._model.module.training, torch.is_grad_enabled()
        if has_grad and (is_training or self.waiting is not None) and not is_in_backward():  # by a checkpoint
            if training.engine.rounds is None:
                training.restart_if_changed()
            else:
                self._begin_training()
                training.engine.worker.raise_error()
                training.begin_batch()
            if is_training and self._broadcasts and isinstance(self._model, UnwrappedModule):
                self._model.begin_forward()
        elif not (has_grad or is_training):  # any rank may evaluate alone
            self._check_shared()

    def _listen(self, reducer: SparseReducer, inputs: Any, output: Any) -> None:
        """Hear of a backward when it comes to the model, before it adds to gradients; refuse it once closed."""

        def on_backward_start(gradient: Tensor) -> None:
            if self.is_closed:
                raise RuntimeError(CLOSED)
            reducer.on_backward_start()

        is_training = self._model.module.training
        for each in tree_leaves(output):
            if isinstance(each, Tensor) and each.requires_grad and (is_training or reducer.allow_implicit_backward):
                each.register_hook(on_backward_start)
                # Before it is called in training mode it may be one that is trained by its parts, or without.
                reducer.allow_implicit_backward &= not is_training

    def _begin_training(self) -> None:
        """Go on from the state that was loaded, if one was."""
        if self._is_shown:
            raise RuntimeError("training inside shared_model() would be lost: leave the `with` before")
        self.take_up()

    def _begin_rounds(self, training: Training) -> None:
        """Begin rounds, if steps are not left to DDP so far, before the first of them changes the model."""
        self._begin_training()
        if training.backwards:  # by a backward of parts of the model, whose forward nobody hears of
            training.turn()
        training.begin_steps()

    def _end_step(self, training: Training) -> None:
        """Begin rounds after synchronous steps, though not between the steps of two optimizers by one backward."""
        if training.has_stepped:
            training.turn()

    def _check_shared(self, *save: Any) -> None:
        rounds = None if self.training is None else self.training.engine.rounds
        if not (self._is_shown or rounds is None or rounds.is_shared):
            raise RuntimeError(
                f"in a round of local steps this is the model of rank {dist.get_rank()} alone: evaluate and save inside"
                " `with handle.shared_model():`, of what sparsify_gradients returned or of fabric.strategy; or"
                " call synchronize()"
                " before, on all ranks"
            )


def _refuse_join(**settings: Any) -> Any:
    raise RuntimeError(
        "torch's Join, or ddp_model.join(), has ranks without a batch follow DDP's own collectives, and here others are"
        " made: leave it out, and give all ranks equally many batches (DistributedSampler, or as many as the shortest"
        " has)"
    )


_ATTENDED: WeakSet[Module] = WeakSet()  # parts of models whose gradients are exchanged
_OPEN: WeakKeyDictionary["GradientSparsifier", None] = (
    WeakKeyDictionary()
)  # those of all models, in one order on all ranks
_REFUSALS: WeakKeyDictionary[Module, Any] = WeakKeyDictionary()  # hooks that models without a wrapper have once closed


def _refuse_training_of(model: Module) -> None:
    """Refuse a forward that trains what nobody attends to any more; of a wrapped model the wrapper's alone."""
    if isinstance(model, (DistributedDataParallel, UnwrappedModule)):
        model.register_forward_pre_hook(partial(refuse_training, CLOSED))
    else:
        hook = Watch(model, torch.compiler.disable(partial(_refuse_alone, model)))
        _REFUSALS[model] = model.register_forward_pre_hook(hook)


def _refuse_alone(module: Module, inputs: Any) -> None:
    if DistributedDataParallel._get_active_ddp_module() is None:
        refuse_training(CLOSED, module, None)


def _trained_parts(module: Module) -> set[Module]:
    """Return the modules that hold what is trained."""
    return {each for each in module.modules() if any(one.requires_grad for one in each.parameters(recurse=False))}


def _check_unattended(model: Any) -> None:
    if not isinstance(model, Module):
        raise TypeError(
            f"model={type(model).__name__} must be a torch.nn.Module: as it is, or in a DistributedDataParallel"
        )
    if not _ATTENDED.isdisjoint(_trained_parts(model)):
        raise RuntimeError(
            f"model={type(model).__name__} holds parameters whose gradients are already exchanged: give all optimizers"
            " of a model in one call of sparsify_gradients; to begin anew, call close() of what"
            " sparsify_gradients had returned before, or"
            " of fabric.strategy"
        )
