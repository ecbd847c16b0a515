"""Fabric's strategy: a :class:`GradientSparsifier` for each model that Fabric sets up with an optimizer."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Optional, Union

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import Unpack, override

from lightning_sparse.compressors import Compressor
from lightning_sparse.engine.requirements import missing_capabilities, refuse
from lightning_sparse.engine.step.topology import UnwrappedModule
from lightning_sparse.loop.arguments import DDPArguments, pop_settings, with_settings_signature
from lightning_sparse.loop.handle import GradientSparsifier
from lightning_sparse.loop.training import RuntimeOptions, Training
from lightning_sparse.strategy.checkpoint import KEY, Checkpointer, PathLike
from lightning_sparse.strategy.lightning import FabricDDPStrategy
from lightning_sparse.strategy.trainer import SparseBase


class SparseFabricStrategy(SparseBase, FabricDDPStrategy):
    """Fabric's data-parallel training that sends only the largest part of each gradient.

    All else is as in :class:`~lightning_fabric.strategies.DDPStrategy`. Each model with an optimizer has a separate
    exchange, like a model of :func:`~lightning_sparse.sparsify_gradients`. If a model is saved with an optimizer,
    ``fabric.save`` also writes the compression state of all ranks, and ``fabric.load`` restores this state.

    Args:
        compressor: like in :class:`~lightning_sparse.SparseDDPStrategy`, except ``a2sgd``.
        density: like in ``SparseDDPStrategy``.
        resume_compression: whether ``fabric.load`` restores the compression state.
        total_steps: optimizer steps of the whole training, which Adam's warm-up depends on; ``None`` if unknown.
            Required if ``warmup_steps`` is a fraction, as by default with ``"dgc"`` and ``"sdagc"``.
        **given: settings of :class:`~lightning_sparse.Compression`, and other arguments of ``DDPStrategy`` and
            ``DistributedDataParallel``.

    Attributes:
        settings: the validated settings; each model has a copy.

    Raises:
        ValueError: for an unknown name, a value out of range, or a setting that only the Trainer supports.
        TypeError: for an unknown argument.
    """

    _timeout: Optional[timedelta]

    @with_settings_signature()
    def __init__(
        self,
        compressor: Union[str, Compressor] = "lags",
        density: Optional[float] = None,
        *,
        resume_compression: bool = True,
        total_steps: Optional[int] = None,
        **given: Unpack[DDPArguments],
    ) -> None:
        bases = (FabricDDPStrategy, DistributedDataParallel)
        self.settings = pop_settings(SparseFabricStrategy, compressor, density, given, *bases)
        refuse(missing_capabilities("in a plain loop or Fabric", self.settings))
        self._total_steps = total_steps
        self._checkpointer = Checkpointer(self, resume_compression, self._log)
        self._handles: dict[Module, GradientSparsifier] = {}  # by wrapped model
        self._given = given
        super().__init__(**given)
        self._backward_sync_control = self  # type: ignore[assignment]

    @override
    def setup_module(self, module: Module) -> UnwrappedModule:  # type: ignore[override]
        model = self._bare_model(module)
        model.register_forward_pre_hook(torch.compiler.disable(_refuse_training))
        return model

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        raise ValueError(f"{type(optimizer).__name__} has no model: use fabric.setup(model, *optimizers)")

    @override
    def setup_module_and_optimizers(self, module: Module, optimizers: list[Optimizer], scheduler: Any = None) -> Any:
        model = self._bare_model(module)
        options = RuntimeOptions(self._timeout, getattr(self.precision, "scaler", None))
        parts = (copy.deepcopy(self.settings), options, self.node_rank, self._total_steps, self._log)
        self._handles[model] = GradientSparsifier(model, optimizers, *parts)
        return model, optimizers, scheduler

    def no_backward_sync(self, module: UnwrappedModule, enabled: bool) -> AbstractContextManager[None]:
        """If ``enabled`` is true, return a context that disables the exchange of a model's gradients."""
        return module.no_sync() if enabled else nullcontext()

    def handle(self, model: Optional[Module] = None) -> Optional[GradientSparsifier]:
        """Return the :class:`~lightning_sparse.GradientSparsifier` of a model, or ``None`` while no model is trained.

        Args:
            model: argument or result of ``fabric.setup``. Required if several models are trained.

        Raises:
            ValueError: if this strategy does not train the model, or if ``None`` is ambiguous for several models.
        """
        handles, given = self._handles.values(), (model, getattr(model, "module", None))
        found = [each for each in handles if model is None or each.module in given]
        if len(found) != 1 and handles:
            raise ValueError(
                f"model={type(model).__name__} matches {len(found)} of {len(handles)} trained models, not one: pass a"
                " model that fabric.setup received together with an optimizer"
            )
        return found[0] if found else None

    def compression_stats(self, model: Optional[Module] = None) -> dict[str, float]:
        """Return a model's exchange statistics on this rank, named as in :class:`~lightning_sparse.SparseDDPStrategy`.

        The dictionary is empty before the first step, and on one process. For ``model``, see :meth:`handle`.
        """
        handle = self.handle(model)
        return {} if handle is None else handle.compression_stats()

    @contextmanager
    def shared_model(self) -> Iterator[None]:
        """Swap in the shared weights of all trained models inside the context, as ``fabric.save`` does."""
        with ExitStack() as shared:
            for handle in self._handles.values():
                shared.enter_context(handle.shared_model())
            yield

    def synchronize(self) -> None:
        """End the current round of local steps of each model early. All ranks must call this."""
        for handle in self._handles.values():
            handle.synchronize()

    def close(self) -> None:
        """End the exchanges of all models, and drop the models. To continue training, set up the models again.

        With local steps, all ranks must call ``close``, because ``close`` ends the rounds. A second call is allowed.
        """
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()

    @override
    def teardown(self) -> None:
        self.close()
        super().teardown()

    @override
    def save_checkpoint(
        self,
        path: PathLike,
        state: dict[str, Any],
        storage_options: Optional[Any] = None,
        filter: Optional[dict[str, Callable[[str, Any], bool]]] = None,
    ) -> None:
        write = super().save_checkpoint
        with self.shared_model():
            trainings = self._trained_in(state).items()
            states = {key: each.state(together=True) for key, each in trainings if each is not None}
            self._checkpointer.save(states, state, path, lambda saved, to: write(to, saved, storage_options, filter))

    def _trained_in(self, state: Mapping[str, Any]) -> dict[str, Optional[Training]]:
        """Return the trainings of the models in ``state``, by key, except models without an optimizer in ``state``."""
        return {
            key: handle.training
            for key, model in state.items()
            if isinstance(model, Module) and (handle := self._handles.get(model)) is not None
            if any(each is optimizer for each in state.values() for optimizer in handle.optimizers)
        }

    @override
    def load_checkpoint(
        self, path: PathLike, state: Optional[Any] = None, strict: bool = True, weights_only: Optional[bool] = None
    ) -> dict[str, Any]:
        rest = super().load_checkpoint(path, state, strict, weights_only)
        trainings = self._trained_in(state) if isinstance(state, dict) else {}
        if trainings:
            self._checkpointer.note(rest, path)
            rest.pop(KEY, None)
            for key, training in trainings.items():
                self._checkpointer.restore(key, training)
        return rest


def _refuse_training(model: Any, inputs: Any) -> None:
    if model.training and torch.is_grad_enabled():
        raise RuntimeError(
            f"{type(model.module).__name__} is trained, but was set up without an optimizer: use"
            " fabric.setup(model, *optimizers). If the model is not trained, use model.eval() or torch.no_grad()"
        )
