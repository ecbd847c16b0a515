"""The Trainer's DDP strategy, and a base class with Lightning's hooks from the start to the end of a fit."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Optional, Union

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import Unpack, override

from lightning_sparse.compressors import Compressor
from lightning_sparse.engine.replicas import sync_module_states
from lightning_sparse.engine.requirements import FEATURES, missing_capabilities, refuse
from lightning_sparse.engine.settings import Settings
from lightning_sparse.engine.step.topology import UnwrappedModule, reshard
from lightning_sparse.engine.store import post_error
from lightning_sparse.loop.arguments import DDPArguments, pop_settings, with_settings_signature
from lightning_sparse.loop.checks import check_bare, check_model
from lightning_sparse.loop.levels import agreed_ranks_of_node
from lightning_sparse.loop.summary import describe
from lightning_sparse.loop.training import RuntimeOptions, Session
from lightning_sparse.strategy.checkpoint import Checkpointer, PathLike
from lightning_sparse.strategy.lightning import (
    HINT,
    Callback,
    DDPStrategy,
    LambdaCallback,
    LightningModule,
    ParallelStrategy,
    Trainer,
    total_steps_of,
)
from lightning_sparse.strategy.stop import GracefulStop

_MODEL = "model"  # name of the only model in a checkpoint


class SparseBase:
    """Common base of the strategies of the Trainer and of Fabric."""

    settings: Settings  # validated settings of the user
    _checkpointer: Checkpointer
    _given: Mapping[str, Any]  # arguments of DDPStrategy and DistributedDataParallel

    def __repr__(self) -> str:
        # If the Trainer is from the other Lightning package, the Trainer's error message contains this text.
        return f"<{type(self).__name__} {HINT}: {describe(self.settings)}>"

    def _bare_model(self, module: Module) -> UnwrappedModule:
        """Broadcast the model from rank 0, and return a replacement for the DDP wrapper."""
        if self._given.get("init_sync", True):
            sync_module_states(module)
        flags = [self._given.get(name) for name in ("broadcast_buffers", "forward_sync_buffers")]
        return UnwrappedModule(module, broadcast_buffers=False not in flags)

    def _log(self, line: str) -> None:
        rank_zero_info(f"{type(self).__name__}: {line}")


class SparseStrategy(SparseBase, Session, ParallelStrategy):
    """Common base of the Trainer's strategies."""

    _bare: UnwrappedModule  # replacement for the DDP wrapper
    _timeout: Optional[timedelta]
    _node_ranks = 1  # number of ranks that average gradients first: per node (two levels), or per replica (FSDP)
    _has_failed = False
    _shown: ExitStack  # swaps in the shared model during a validation

    def _set_up(self, settings: Settings, resumes: bool) -> None:
        self.settings = settings
        self._checkpointer = Checkpointer(self, resumes, self._log)
        # Lightning calls a strategy's own hooks of these events after users' callbacks.
        self._first = LambdaCallback(on_validation_start=self._begin_validation, on_train_end=self._synchronize)
        self._stop = GracefulStop()

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        if self.engine is None:  # During a fit, the next training step handles new optimizers.
            self._has_failed = False
            self._shown = ExitStack()
            post_error(None)
            callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
            users = [each for each in callbacks if each not in (self._first, self._stop)]
            callbacks[:] = [self._first, *users, self._stop]
            self._start(trainer)

    def _start(self, trainer: Trainer) -> None:
        interval = getattr(trainer, "val_check_interval", None)  # no number if the interval is a time
        if self.settings.replicas_diverge and not isinstance(interval, (int, float)):
            raise ValueError(
                "val_check_interval is a time, and clocks differ between ranks. A validation averages the replicas, so"
                " all ranks must validate after the same step. Set a number of batches or a fraction of an epoch, such"
                " as val_check_interval=0.5."
            )
        callbacks = {kind.__name__ for each in trainer.callbacks for kind in type(each).__mro__}  # type: ignore[attr-defined]
        for feature in filter(callbacks.__contains__, FEATURES):
            refuse(missing_capabilities(feature, self.settings))
        given = RuntimeOptions(self._timeout, getattr(self.precision_plugin, "scaler", None), self._node_ranks)
        # A single process compresses only if a compressed training resumes, because residuals would be lost otherwise.
        self._begin_training(self._bare, self.optimizers, given, self._checkpointer.has_loaded_save)
        if self.training is not None:
            self.training.set_inside(False)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self.engine is not None:
            # total_steps_of() loads the data, which on_fit_start may create. So this hook runs after on_fit_start.
            self._expect_steps(total_steps_of(self._module.trainer))

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if (training := self.training) is None:
            return super().training_step(*args, **kwargs)
        training.begin_batch(self.optimizers)
        self._bare.begin_forward()
        if not self._module.automatic_optimization:
            self._bare.require_forward_param_sync = False  # only the first step broadcasts buffers, as with ddp
            training.set_inside(True)
        try:
            return super().training_step(*args, **kwargs)
        finally:
            training.set_inside(False)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Disable the exchange of gradients inside the context. Lightning's version requires a DDP wrapper."""
        with self._bare.no_sync():
            yield

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        if (training := self.training) is not None:
            training.begin()
            if closure_loss.grad_fn is not None:  # called in each backward, if LightningModule.backward runs several
                closure_loss.register_hook(training.engine.reducer.on_backward_start)
        super().pre_backward(closure_loss)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if (training := self.training) is not None:
            training.end_backward()
            if not self._module.automatic_optimization:
                training.engine.reducer.on_backward_start()  # prepares for a backward without manual_backward()

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if (training := self.training) is None:
            return super().optimizer_step(optimizer, *args, **kwargs)
        if self._module.automatic_optimization:
            # training_step runs inside optimizer_step, which is too late to register hooks on a new optimizer.
            training.restart_if_changed(self.optimizers)
        with training.steps.step_of(optimizer):
            return super().optimizer_step(optimizer, *args, **kwargs)

    def _begin_validation(self, trainer: Trainer, module: LightningModule) -> None:
        if (engine := self.engine) is None:
            return
        if engine.rounds is not None and not trainer.sanity_checking:
            engine.rounds.synchronize()
        self._bare.begin_forward()  # broadcasts buffers, as DDP does in the first forward
        self._shown.enter_context(engine.replicas.shared_model())

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self.training is not None:  # users' callbacks have handled the end of the validation
            reshard(self._module)
            self._shown.close()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        with self.replicas.shared_model():
            state = super().lightning_module_state_dict()
            if self.settings.local_steps is None:
                return state
            return {name: each.clone() if isinstance(each, Tensor) else each for name, each in state.items()}

    def _synchronize(self, trainer: Trainer, module: LightningModule) -> None:
        self.replicas.synchronize()

    @override
    def on_train_end(self) -> None:
        self.replicas.reset_shared_model()  # callbacks may have changed the weights, on each rank separately
        super().on_train_end()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._has_failed = True
        post_error(exception)
        super().on_exception(exception)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: PathLike, storage_options: Optional[Any] = None
    ) -> None:
        # A weights-only checkpoint has no optimizer states, and gets no compression state.
        is_whole = "optimizer_states" in checkpoint
        state = self.training.state(together=True) if is_whole and self.training is not None else self.final_state
        states = {_MODEL: state} if is_whole and state is not None else {}
        write_file = partial(super().save_checkpoint, storage_options=storage_options)
        self._checkpointer.save(states, checkpoint, filepath, write_file)

    def _restore(self) -> None:
        self._checkpointer.restore(_MODEL, self.training)
        self._checkpointer.loaded = None

    @override
    def load_checkpoint(self, checkpoint_path: PathLike, weights_only: Optional[bool] = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._checkpointer.note(checkpoint, checkpoint_path)
        return checkpoint

    @override
    def remove_checkpoint(self, filepath: PathLike) -> None:
        super().remove_checkpoint(filepath)
        self._checkpointer.remove(filepath)

    @override
    def teardown(self) -> None:
        rounds = None if self.engine is None else self.engine.rounds
        if rounds is not None and not (rounds.is_shared or self._has_failed):
            rounds.synchronize()  # If a resumed fit has no steps left, Lightning does not call on_train_end.
        self._end_training(self._has_failed, keeps_state=True)
        super().teardown()
        self._checkpointer.loaded = None


class SparseDDPStrategy(SparseStrategy, DDPStrategy):
    """Data-parallel training that sends each gradient's largest elements, and adds the rest to later gradients.

    All else is as in :class:`~pytorch_lightning.strategies.DDPStrategy`. A separate thread exchanges gradients during
    backward, bucket by bucket, in a separate process group (on CUDA, in a separate stream). Unsent elements stay in a
    residual per parameter (error feedback), which is added to the next gradient. A ``fit`` without a checkpoint starts
    with empty residuals. Layers may be added, replaced and unfrozen between two batches, on all ranks alike.

    Args:
        compressor: name from :func:`~lightning_sparse.available_compressors`, or an object.
        density: fraction of elements sent, ``0 < density <= 1`` (0.001 = 0.1 %); ``None`` for the default density.
        resume_compression: whether ``fit(ckpt_path=...)`` restores residuals; ``False`` starts with empty residuals.
        **given: settings of :class:`~lightning_sparse.Compression`, and other arguments of ``DDPStrategy`` and
            ``DistributedDataParallel``.

    Attributes:
        settings: the validated settings.

    Raises:
        ValueError: for an unknown name, a density out of range, a density for a compressor without one, or an argument
            of ``DDPStrategy`` that would have no effect.
        TypeError: for an unknown argument.

    Example::

        >>> SparseDDPStrategy(compressor="topk", density=0.01).compression_stats()
        {}
    """

    @with_settings_signature()
    def __init__(
        self,
        compressor: Union[str, Compressor] = "lags",
        density: Optional[float] = None,
        *,
        resume_compression: bool = True,
        **given: Unpack[DDPArguments],
    ) -> None:
        bases = (DDPStrategy, DistributedDataParallel)
        self._set_up(pop_settings(SparseDDPStrategy, compressor, density, given, *bases), resume_compression)
        self._given = given
        super().__init__(**given)

    @override
    def configure_ddp(self) -> None:
        # Lightning's method is not called, because that method would wrap the model in DDP.
        self._node_ranks = agreed_ranks_of_node(self.settings, self.node_rank, self._log)
        assert self.model is not None
        check_bare(self.model)
        check_model(self.model, self.settings.local_steps)
        self._bare = self._bare_model(self.model)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self._restore()
