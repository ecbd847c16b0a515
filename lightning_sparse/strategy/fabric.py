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
from lightning_sparse.engine.memory.residual import optimizer_parameters
from lightning_sparse.engine.requirements import missing_capabilities, refuse
from lightning_sparse.engine.step.topology import UnwrappedModule
from lightning_sparse.loop.arguments import DDPArguments, pop_settings, with_settings_signature
from lightning_sparse.loop.handle import GradientSparsifier
from lightning_sparse.loop.training import RuntimeOptions
from lightning_sparse.strategy.checkpoint import KEY, Checkpointer, PathLike
from lightning_sparse.strategy.lightning import FabricDDPStrategy
from lightning_sparse.strategy.trainer import SparseBase


class SparseFabricStrategy(SparseBase, FabricDDPStrategy):
    """Fabric's data-parallel training that sends only the largest part of each gradient.

    All else is as in :class:`~lightning_fabric.strategies.DDPStrategy`. Each model with an optimizer has a separate
    exchange, like a model of :func:`~lightning_sparse.sparsify_gradients`. If a model is saved with an optimizer,
    ``fabric.save`` also writes the compression state of all ranks, and ``fabric.load`` restores this state.

    Args:
        compressor: like in :class:`~lightning_sparse.SparseDDPStrategy`, except compressors with diverging replicas.
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
        settings = pop_settings(SparseFabricStrategy, compressor, density, given, *bases)
        self.settings = settings
        refuse(missing_capabilities("in a plain loop or Fabric", settings))
        self._total_steps = total_steps
        self._checkpointer = Checkpointer(self, resume_compression)
        self._optimizers: list[Optimizer] = []  # all optimizers that Fabric has set up
        self._waiting: dict[Module, Any] = {}  # forward pre-hook of each model that has no handle yet
        self._handles: dict[Module, GradientSparsifier] = {}
        self._are_closed = False  # whether the exchanges in _handles have ended
        self._given = given
        super().__init__(**given)
        self._backward_sync_control = self  # type: ignore[assignment]

    @override
    def setup_module(self, module: Module) -> UnwrappedModule:  # type: ignore[override]
        model = self._bare_model(module)

        def begin(*forward: Any) -> None:
            if model.training and torch.is_grad_enabled():
                self._start(model)

        self._waiting[model] = model.register_forward_pre_hook(torch.compiler.disable(begin), prepend=True)
        return model

    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        """If ``enabled`` is true, return a context that disables the exchange of a model's gradients."""
        assert isinstance(module, UnwrappedModule)
        return module.no_sync() if enabled else nullcontext()

    @override
    def get_module_state_dict(self, module: Module) -> dict[str, Any]:
        return super().get_module_state_dict(module.module if isinstance(module, UnwrappedModule) else module)

    @override
    def load_module_state_dict(self, module: Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        inside = module.module if isinstance(module, UnwrappedModule) else module
        super().load_module_state_dict(inside, state_dict, strict)

    def handle(self, model: Optional[Module] = None) -> Optional[GradientSparsifier]:
        """Return the :class:`~lightning_sparse.GradientSparsifier` of a model, or ``None`` before any training.

        Args:
            model: argument or result of ``fabric.setup``. Required if several models are trained.

        Raises:
            ValueError: if this strategy does not train the model, or if ``None`` is ambiguous for several models.
        """
        if model is None and len(self._handles) > 1:
            raise ValueError(f"model=None is ambiguous for {len(self._handles)} trained models: give the model")
        for handle in self._handles.values():
            if model is None or any(each is handle.module for each in (model, getattr(model, "module", None))):
                return handle
        if not self._handles:
            return None
        raise ValueError(
            f"model={type(model).__name__} is not trained by this strategy: give a model that fabric.setup"
            " received together with an optimizer"
        )

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
        """End the exchanges of all models. To continue training, set up the models again. A second call is allowed.

        With local steps, all ranks must call ``close``, because ``close`` ends the rounds. A process that exits without
        ``close`` ends no round.
        """
        for handle in self._handles.values():
            handle.close()
        self._are_closed = True
        self._checkpointer.close()

    @override
    def teardown(self) -> None:
        self.close()
        super().teardown()

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        parameters = set(optimizer_parameters(optimizer))
        if any(not parameters.isdisjoint(model.parameters()) for model in self._handles):
            raise RuntimeError(
                f"the model of {type(optimizer).__name__} has begun training without this optimizer: set up all"
                " optimizers of a model before the model's first forward, by fabric.setup or fabric.setup_optimizers"
            )
        self._optimizers.append(optimizer)
        return optimizer

    @override
    def setup_module_and_optimizers(self, module: Module, optimizers: list[Optimizer], *scheduler: Any) -> Any:
        done: Any = super().setup_module_and_optimizers(module, optimizers, *scheduler)
        self._start(done[0])
        return done

    def _start(self, model: Module) -> None:
        if not (optimizers := self._optimizers_of(model)):
            raise RuntimeError(
                f"{type(getattr(model, 'module', model)).__name__} is trained, but has no optimizer that was set up:"
                " use fabric.setup(model, optimizer), or fabric.setup_optimizers(optimizer) before the first forward."
                " If the model is not trained, use model.eval() or torch.no_grad()"
            )
        options = RuntimeOptions(self._timeout, getattr(self.precision, "scaler", None))
        parts = (copy.deepcopy(self.settings), options, self.node_rank, self._total_steps, self._log)
        handle = GradientSparsifier(model, optimizers, *parts)
        self._waiting.pop(model).remove()
        self._handles = {model: handle} if self._are_closed else {**self._handles, model: handle}
        self._are_closed = False

    def _optimizers_of(self, model: Module) -> list[Optimizer]:
        parameters = set(model.parameters())
        return [each for each in self._optimizers if not parameters.isdisjoint(optimizer_parameters(each))]

    @override
    def save_checkpoint(
        self,
        path: PathLike,
        state: dict[str, Any],
        storage_options: Optional[Any] = None,
        filter: Optional[dict[str, Callable[[str, Any], bool]]] = None,
    ) -> None:
        write = super().save_checkpoint

        def write_file(content: dict[str, Any], path: PathLike) -> None:
            write(path, content, storage_options, filter)

        handles = self._trained_in(state)
        with self.shared_model():
            trainings = {key: handle.training for key, handle in handles.items()}
            states = {key: each.state(together=True) for key, each in trainings.items() if each is not None}
            self._checkpointer.save(states, state, path, write_file)

    def _trained_in(self, state: Mapping[str, Any]) -> dict[str, GradientSparsifier]:
        """Return the handles of the models in ``state``, by key, except models without an optimizer in ``state``."""
        for model in state.values():
            if isinstance(model, Module) and model in self._waiting and self._optimizers_of(model):
                self._start(model)
        return {
            key: handle
            for key, model in state.items()
            if isinstance(model, Module)
            and (handle := self._handles.get(model)) is not None
            and any(each is optimizer for each in state.values() for optimizer in handle.optimizers)
        }

    @override
    def load_checkpoint(
        self, path: PathLike, state: Optional[Any] = None, strict: bool = True, weights_only: Optional[bool] = None
    ) -> dict[str, Any]:
        rest = super().load_checkpoint(path, state, strict, weights_only)
        handles = self._trained_in(state) if isinstance(state, dict) else {}
        if handles:
            self._checkpointer.note(rest, path)
            rest.pop(KEY, None)
            for key, handle in handles.items():
                self._checkpointer.restore(key, handle.training)
        return rest
