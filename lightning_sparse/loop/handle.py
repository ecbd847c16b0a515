"""The entry point for loops without a Trainer: :func:`sparsify_gradients`, and the handle that the function returns."""

import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Optional, Union
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from typing_extensions import Unpack

from lightning_sparse.compressors import Compressor
from lightning_sparse.engine.replicas import sync_module_states
from lightning_sparse.engine.requirements import missing_capabilities, refuse
from lightning_sparse.engine.settings import Compression, Settings
from lightning_sparse.engine.step.reducer import SparseReducer, Wrapper, is_in_backward
from lightning_sparse.engine.step.topology import UnwrappedModule
from lightning_sparse.loop.arguments import pop_settings, with_settings_signature
from lightning_sparse.loop.changes import Watch
from lightning_sparse.loop.checks import check_bare, check_model, check_replicas, check_trainers, check_wrapped
from lightning_sparse.loop.levels import Node, agreed_ranks_of_node, own_node
from lightning_sparse.loop.optimizers import unwrapped
from lightning_sparse.loop.state import exists, save_state
from lightning_sparse.loop.training import Log, RuntimeOptions, Session, Training, load_folder
from lightning_sparse.removed import refuse_removed

_LOGGER = logging.getLogger(__name__)
_CLOSED = (
    "the handle is closed. To continue training, call sparsify_gradients on the model again, in a new"
    " DistributedDataParallel if the model was in one. To train without an exchange, train a copy of the model"
)


class GradientSparsifier(Session, AbstractContextManager["GradientSparsifier"]):
    """Handle of :func:`~lightning_sparse.sparsify_gradients`: exchanges the gradients of one model until :meth:`close`.

    At the end of a ``with`` statement the handle is closed. ``settings`` apply to this model only.

    Attributes:
        engine: the engine that exchanges gradients, or ``None`` on one process and after :meth:`close`.
        optimizers: the optimizers of the model.
    """

    def __init__(
        self,
        model: Module,
        optimizers: Sequence[Optimizer],
        settings: Settings,
        given: RuntimeOptions,
        node: Node,
        total_steps: Optional[int],
        log: Log,
    ) -> None:
        self.settings, self.optimizers, self._log = settings, optimizers, log
        self._called = model  # the module or wrapper that the user calls
        self._model: Wrapper
        _check_unattended(model)
        if isinstance(model, DistributedDataParallel):
            check_wrapped(model, dist.get_world_size())
            model.join_hook = _refuse_join  # type: ignore[method-assign]
            self._model = model
        else:
            self._model = model if isinstance(model, UnwrappedModule) else UnwrappedModule(model)
            check_bare(self._model.module)
        check_model(self.module, settings.local_steps)
        check_trainers(self.module, optimizers, settings)
        given = given._replace(local_world_size=agreed_ranks_of_node(settings, node, log))
        self._parts = _trained_parts(self.module)
        self._hooks: list[Any] = []
        self._is_closed = False
        if model is not self._model:
            sync_module_states(self.module)
        try:
            self._begin_training(self._model, optimizers, given)
            self._expect_steps(total_steps)
            if self.training is not None:
                self._register_hooks(self.training, given.scaler)
        except BaseException:  # a warning filter of the user may raise errors
            self._leave(has_failed=True)
            raise
        _EXCHANGED.update(self._parts)

    def _register_hooks(self, training: Training, scaler: Optional[GradScaler]) -> None:
        model, module, rounds = self._called, self.module, training.engine.rounds
        listen = Watch(torch.compiler.disable(partial(self._listen, training.engine.reducer)))
        self._hooks.append(model.register_forward_hook(listen))
        forward = Watch(torch.compiler.disable(partial(self._before_forward, training)))
        for called in {model} if rounds is None else {model, module}:  # the user may evaluate the inner module of DDP
            self._hooks.append(called.register_forward_pre_hook(forward, prepend=True))
        if rounds is not None:
            self._hooks.append(module.register_state_dict_pre_hook(Watch(self._check_shared)))
            if scaler is not None:
                training.steps.count_skipped(scaler)

    def _leave(self, has_failed: bool) -> None:
        _EXCHANGED.difference_update(self._parts)
        for hook in self._hooks:
            hook.remove()
        self._end_training(has_failed)

    def __exit__(self, kind: Any, error: Optional[BaseException], trace: Any) -> None:
        self.close(has_failed=error is not None)

    @property
    def module(self) -> Module:
        """The model without a wrapper."""
        return self._model.module

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context that disables the exchange of gradients, like DDP's ``no_sync()``.

        Use the context for forward and backward of all batches of a step except the last batch. The backward of the
        last batch exchanges the sum of the gradients.
        """
        no_sync: AbstractContextManager[None] = self._model.no_sync()
        return no_sync

    def shared_model(self) -> AbstractContextManager[None]:
        """Return a context that swaps in the shared model of all ranks, for an evaluation or a save.

        Nothing is sent. Without local steps the model is always shared.
        """
        return self.replicas.shared_model()

    def check_replicas(self) -> None:
        """Check between two steps that all ranks hold the same parameters. All ranks must call.

        Raises:
            ReplicaError: on all ranks, if any bit of a parameter differs.
        """
        if self.engine is not None:
            with self.shared_model():
                check_replicas(self.engine, "here")

    def synchronize(self) -> None:
        """End the round of local steps early, and continue from the shared model. All ranks must call this."""
        self.replicas.synchronize()

    def reset_shared_model(self) -> None:
        """Make the present model the shared model, for example after a load during training. All ranks must call this.

        Without this call, local steps treat a change of weights between two batches as a change by training.
        """
        self.replicas.reset_shared_model()

    def save_state(self, folder: Union[str, Path]) -> None:
        """Write each rank's compression state into a folder, between two optimizer steps. All ranks must call this.

        Save model and optimizers as usual, on one rank. Use a new folder for each save. One process writes nothing.
        """
        self._check_open()
        if self.training is not None:
            save_state(self.training.state(together=True), str(folder))

    def load_state(self, folder: Union[str, Path]) -> None:
        """Load a folder of :meth:`save_state`. All ranks must call. With local steps, load model and optimizers first.

        The same number of ranks resumes bitwise identically. If the number of ranks has changed, or with two levels the
        number of ranks per node, each rank resumes from the mean residual.

        Raises:
            CheckpointError: for files that are missing, damaged, of another format, or of another model.
            ValueError: for parts of a state that compressor or model cannot use, or on one process.
        """
        self._check_open()
        if (training := self.training) is None:
            if exists(str(folder)):
                raise ValueError(f"{folder} needs several processes: start more, or skip load_state")
            return
        if unused := load_folder(training, str(folder), str(folder)):
            raise ValueError(
                f"{folder} has unused parts ({'; '.join(unused)}): build the same model, optimizers and compressor, or"
                " skip load_state to start with empty residuals"
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(_CLOSED)

    def __getattr__(self, name: str) -> Any:
        refuse_removed(f"{type(self).__name__}.{name}", f"GradientSparsifier.{name}", AttributeError)
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def close(self, has_failed: bool = False) -> None:
        """End the exchange, and release the optimizers. Later training forwards raise an error. Safe to call twice.

        With local steps all ranks must call, because ``close`` ends the round. After an error on this rank, set
        ``has_failed``, so that the call does not wait for other ranks. To continue training, pass the model to
        :func:`~lightning_sparse.sparsify_gradients` or ``DistributedDataParallel``. The earlier DDP wrapper cannot be
        used again.
        """
        engine, self._is_closed = self.engine, True
        try:
            if engine is not None and not has_failed and engine.worker.error is None:
                self.synchronize()
        except BaseException:
            has_failed = True
            raise
        finally:
            if engine is not None:
                check = torch.compiler.disable(partial(_refuse_training, self._parts))
                self._called.register_forward_pre_hook(Watch(check))
            self._leave(has_failed)

    def _before_forward(self, training: Training, called: Module, inputs: Any) -> None:
        """Before a training forward, begin a batch. Before an evaluation, check that the model is the shared model."""
        is_training, has_grad = self.module.training, torch.is_grad_enabled()
        if has_grad and is_training and not is_in_backward():  # a forward inside backward recomputes activations
            training.begin_batch()
            if isinstance(self._model, UnwrappedModule) and self._called is not self._model:
                self._model.begin_forward()  # otherwise, the wrapper's forward() does this
        elif not (has_grad or is_training):  # evaluation needs the shared model
            self._check_shared()

    def _listen(self, reducer: SparseReducer, called: Module, inputs: Any, output: Any) -> None:
        """Register hooks on the outputs. The hooks run at the start of a backward, before any gradient is added."""

        def on_backward_start(gradient: Tensor) -> None:
            self._check_open()
            reducer.on_backward_start()

        is_training = self.module.training
        for each in tree_leaves(output):
            if isinstance(each, Tensor) and each.requires_grad and (is_training or reducer.allow_implicit_backward):
                each.register_hook(on_backward_start)
                # Until the first forward in training mode, a backward needs no hook: users may call submodules only.
                reducer.allow_implicit_backward &= not is_training

    def _check_shared(self, *event: Any) -> None:
        rounds = None if self.engine is None else self.engine.rounds
        if not (rounds is None or rounds.is_shared or rounds.shared.is_shown):
            raise RuntimeError(
                f"this model belongs to rank {dist.get_rank()} alone during a round of local steps: evaluate and save"
                " inside `with handle.shared_model():` (with Fabric: fabric.strategy.shared_model()), or call"
                " synchronize() on all ranks before"
            )


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
) -> GradientSparsifier:
    """Exchange only the largest part of each gradient of a model, in a custom training loop.

    Call the function once on all ranks, before the first backward. Parameters and buffers are broadcast from rank 0.
    Gradients are exchanged during backward. When backward ends, ``.grad`` holds the mean over ranks. On one process the
    function only checks the arguments.

    Args:
        model: a module without a wrapper; the training loop calls the module as before. Buffers are broadcast from rank
            0 before the first training forward of a step, as with DDP. The model may also be a
            ``DistributedDataParallel`` of all processes, which then reduces no gradient.
        optimizer: one or several optimizers of the model. If a library such as Accelerate wraps an optimizer, the inner
            optimizer is used.
        compressor: name of a compressor, or an object. Compressors with diverging replicas are not supported.
        density: fraction of elements sent; ``None`` for the default density.
        scaler: the gradient scaler, or ``None``. Residuals are stored unscaled.
        total_steps: optimizer steps of the whole training, which Adam's warm-up depends on; ``None`` if unknown.
            Required if ``warmup_steps`` is a fraction, as by default with ``"dgc"`` and ``"sdagc"``.
        timeout: maximum time that an exchange waits for other ranks; ``None`` for the timeout of the process group.
        **given: settings of :class:`~lightning_sparse.Compression`. ``levels`` identifies nodes by torchrun's node
            numbers, or by host names. With ``local_steps`` all ranks must make equally many steps, and call
            :meth:`~lightning_sparse.GradientSparsifier.close` at the end. Evaluate and save inside
            :meth:`~lightning_sparse.GradientSparsifier.shared_model`.

    Raises:
        ValueError: for a value out of range, an unknown name, or a setting that only the Trainer supports.
        TypeError: for an object of the wrong type, or an unknown argument.
        RuntimeError: if the model has a communication hook, or gradients of the model are already exchanged.
    """
    optimizers = [unwrapped(each) for each in ([optimizer] if isinstance(optimizer, Optimizer) else optimizer)]
    settings = pop_settings(sparsify_gradients, compressor, density, given)
    refuse(missing_capabilities("in a plain loop or Fabric", settings))
    wrapped = getattr(model, "_orig_mod", None)  # Accelerate compiles the DDP wrapper
    model = wrapped if isinstance(wrapped, DistributedDataParallel) else model
    options = RuntimeOptions(timeout, scaler)
    return GradientSparsifier(model, optimizers, settings, options, own_node(), total_steps, _log)


def _log(line: str) -> None:
    if dist.get_rank() == 0:
        _LOGGER.info("sparsify_gradients: %s", line)


def _refuse_join(**settings: Any) -> Any:
    raise RuntimeError(
        "torch's Join and ddp_model.join() are not supported, because they repeat DDP's collectives on ranks without a"
        " batch: give all ranks equally many batches (use DistributedSampler, or skip the excess batches)"
    )


_EXCHANGED: WeakSet[Module] = WeakSet()  # modules that directly hold trained parameters of open handles


def _refuse_training(parts: set[Module], called: Module, inputs: Any) -> None:
    """After ``close``, raise an error in a training forward, unless another handle or DDP wrapper trains the model."""
    has_other = not _EXCHANGED.isdisjoint(parts) or DistributedDataParallel._get_active_ddp_module() is not None
    if called.training and torch.is_grad_enabled() and not has_other:
        raise RuntimeError(_CLOSED)


def _trained_parts(module: Module) -> set[Module]:
    """Return the modules that directly hold trained parameters."""
    return {each for each in module.modules() if any(one.requires_grad for one in each.parameters(recurse=False))}


def _check_unattended(model: Any) -> None:
    if not isinstance(model, Module):
        raise TypeError(
            f"model={type(model).__name__} must be a torch.nn.Module, with or without DistributedDataParallel"
        )
    if not _EXCHANGED.isdisjoint(_trained_parts(model)):
        raise RuntimeError(
            f"model={type(model).__name__} has gradients that are already exchanged: give all optimizers in one call of"
            " sparsify_gradients. To begin again, call close() of the earlier handle or of fabric.strategy"
        )
