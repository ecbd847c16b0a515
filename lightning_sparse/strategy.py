"""The Trainer's door: a DDP strategy whose gradients are exchanged by the engine."""

from typing import Any, Optional, Union

import torch
import torch.distributed as dist
from lightning_fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_warn
from pytorch_lightning import Trainer
from pytorch_lightning.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sparse.adam import is_correctable
from lightning_sparse.checkpoints import ResumableDDPStrategy
from lightning_sparse.compressors import Compressor
from lightning_sparse.engine import Engine
from lightning_sparse.feedback import AdamCorrection, Clipping
from lightning_sparse.observe import StepMarks
from lightning_sparse.optimizers import (
    TAKES_MOMENTUM,
    OptimizerView,
    check_correctable,
    handled,
    is_adaptive,
    takes_adam,
    warning_for,
)
from lightning_sparse.planning import Plan
from lightning_sparse.registry import System, announce_systems
from lightning_sparse.schedule import Schedule
from lightning_sparse.settings import AUTO, Settings
from lightning_sparse.steering import Steerable

_REFUSED_ARGUMENTS = {
    "ddp_comm_hook": "the strategy registers a hook of its own; for another hook use DDPStrategy",
    "ddp_comm_state": "it belongs to a hook, and the strategy registers a hook of its own; use DDPStrategy for another",
    "ddp_comm_wrapper": "it wraps a hook; to send 16-bit values use wire='float16' or wire='bfloat16'",
    "model_averaging_period": "it belongs to torch's post-localSGD hook; use DDPStrategy for that",
    "bucket_cap_mb": "the schedule decides what travels together; use schedule=FixedSize(min_elements=...)",
    "bucket_cap_mb_list": "the schedule decides what travels together; use schedule=FixedSize(min_elements=...)",
    "process_group": "gradients are exchanged between all processes of the Trainer",
}


class SparseDDPStrategy(Steerable, ResumableDDPStrategy):
    """Data-parallel training that sends only the part of each gradient that matters most, and keeps the rest for later.

    Everything else is :class:`~pytorch_lightning.strategies.DDPStrategy`. Gradients are exchanged on a thread (on CUDA
    also a stream) and a process group of their own, group after group while backward goes on. What was not sent stays
    in a residual for each parameter (error feedback) and is added to its next gradient. A second ``fit`` starts with
    empty residuals, as it starts with a fresh optimizer, unless it is given a checkpoint: those hold all that is kept,
    see :mod:`lightning_sparse.checkpoints`. Parameters may be frozen and unfrozen between two steps.

    Args:
        compressor: what is sent: a name from :func:`~lightning_sparse.available_compressors`, or an object.
        density: fraction of elements sent, ``0 < density <= 1`` (0.001 = 0.1 %). Lower sends less and delays more.
            ``None`` for the compressor's own default.
        schedule: when and with whom gradients travel: ``"layerwise"``, ``"merged"``, ``"single"``, ``"greedy"``, or an
            object. It never changes the numbers; but ``"auto"`` does, which may send more than the density asks for.
        wire: type of the values that travel: ``"float32"``, ``"bfloat16"``, ``"float16"``. What rounding drops stays in
            the residual.
        warmup_epochs: epochs over which the density falls, geometrically, to its target: early gradients change too
            fast to wait. ``None`` for the compressor's own default.
        resume_compression: whether ``fit(ckpt_path=...)`` takes up what the ranks had kept; ``False`` lets residuals
            start empty.
        optimizer_correction: how an adaptive optimizer is kept from learning from sparse gradients how large gradients
            are: ``"auto"`` makes the updates of ``torch.optim.Adam`` and ``AdamW`` before selection, with a warm-up of
            its own, and warns of other adaptive optimizers; an :class:`~lightning_sparse.AdamCorrection` does the same
            with your numbers, and refuses other optimizers; ``None`` leaves all optimizers alone.
        **ddp_kwargs: arguments of ``DDPStrategy`` and ``DistributedDataParallel``. ``gradient_as_bucket_view`` is
            ``True`` unless given: it saves a copy of every gradient, and as much memory as the residuals take.

    Raises:
        ValueError: for an unknown name, a density out of range or for a method without one, or an argument of
            ``DDPStrategy`` that would be ignored.

    Example::

        >>> SparseDDPStrategy(compressor="topk", density=0.01).compression_stats()
        {}
    """

    def __init__(
        self,
        compressor: Union[str, Compressor] = "topk",
        density: Optional[float] = None,
        schedule: Union[str, Schedule] = "merged",
        wire: str = "float32",
        warmup_epochs: Optional[int] = None,
        resume_compression: bool = True,
        optimizer_correction: Union[str, AdamCorrection, None] = AUTO,
        **ddp_kwargs: Any,
    ) -> None:
        for name, cure in _REFUSED_ARGUMENTS.items():
            if ddp_kwargs.get(name) is not None:
                raise ValueError(f"{name}={ddp_kwargs[name]!r} cannot be given to {type(self).__name__}: {cure}")
        settings = Settings(compressor, density, schedule, wire, warmup_epochs, optimizer_correction)
        self._optimizer_view: Optional[OptimizerView] = None
        self._final_stats: dict[str, float] = {}
        self._samples_deltas = False
        # Under a name of its own: a command line that can follow the keywords to DDP passes DDP's defaults for ours.
        given = {"gradient_as_bucket_view": True, **ddp_kwargs}
        super().__init__(settings, resume_compression, **given)

    def compression_stats(self) -> dict[str, float]:
        """Return what the last step's exchange did on this rank, as plain floats; empty before the first step.

        After training they stay what they were at its end. On a GPU, asking waits for that step's exchange.

        Returns:
            ``density`` (fraction of elements that this rank sent), ``union_density`` (that any rank sent),
            ``wire_bytes`` (all bytes handed to collectives: values, indices, counts, flags, padding), ``dense_bytes``
            (what fp32 would have been), ``compression_ratio`` (the quotient; 1 where nothing travels),
            ``total_wire_bytes`` (those of all steps of this ``fit``), ``select_seconds`` (residual, selection and
            encoding), ``exchange_seconds`` (in collectives),
            ``exposed_seconds`` (from the end of backward until the gradients could be used); of a step that was left to
            plain DDP the seconds are not known (NaN); with a method that lets
            replicas drift apart also ``replica_divergence`` (see :class:`~lightning_sparse.compressors.A2SGD`).
        """
        if self._engine is None:
            return dict(self._final_stats)
        return self._engine.plain_stats() if self.is_plain else self._engine.compression_stats()

    def sample_layer_deltas(self) -> None:
        """Ask for :meth:`layer_deltas` of the next step. It costs a dense all-reduce; all ranks must ask."""
        self._samples_deltas = True

    def layer_deltas(self) -> dict[str, Tensor]:
        """Return, by parameter name, ``delta`` of LAGS' assumption in the last step; empty if it was not asked for.

        See :class:`~lightning_sparse.metrics.LayerDelta`, which averages them over steps.
        """
        return self._engine.layer_deltas() if self._engine is not None else {}

    def exchange_plan(self) -> Optional[Plan]:
        """Return what the schedule follows on this rank; ``None`` if it follows no plan, or none yet."""
        return None if self._engine is None else self._engine.plan

    def last_step(self) -> Optional[StepMarks]:
        """Return when the stages of the last step happened on this rank; ``None`` before the first."""
        return None if self._engine is None else self._engine.last_marks

    @override
    def _setup_model(self, model: Module) -> DistributedDataParallel:
        _check_parameters(model)
        if self._optimizer_view is not None:
            self._optimizer_view.know(dict(model.named_parameters()))
        return super()._setup_model(model)

    @override
    def _register_ddp_hooks(self) -> None:
        # Lightning registers hooks on CUDA only, and ignores them elsewhere without a word.
        assert isinstance(self.model, DistributedDataParallel)
        self._final_state = None
        # What is done with gradients depends on the optimizers, which Lightning sets up next.

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        assert isinstance(self.model, DistributedDataParallel)
        # One process that takes up what several kept goes on as they did, so that the model gets what it is owed.
        if dist.get_world_size(self.model.process_group) == 1 and not self._has_loaded_state():
            self._say("one process, so there is nothing to exchange or compress.")
            return
        corrects = self._correct_adam(trainer)
        self._engine = Engine(self.model, self._settings, self._timeout, self._say)
        self._begin_switching(self._settings.schedule)
        assert self.lightning_module is not None
        parameters = dict(self.lightning_module.named_parameters())
        target_of, memory = self._engine.target_density, self._engine.memory
        view = OptimizerView(parameters, self.optimizers, self._settings.feedback, target_of, memory)
        self._optimizer_view = view
        if view.takes_momentum:
            self._say(TAKES_MOMENTUM)
        if corrects:
            self._say(takes_adam(self._settings.feedback))
            self._clip_gradients = self.precision_plugin.clip_gradients
            self.precision_plugin.clip_gradients = self._clip  # type: ignore[method-assign]  # given back in teardown
        if self._settings.is_sparse:
            for optimizer in filter(is_adaptive, self.optimizers):
                if not (corrects and is_correctable(optimizer)):
                    rank_zero_warn(warning_for(optimizer))

    def _correct_adam(self, trainer: Trainer) -> bool:
        """Decide whether Adam's updates are made before selection; return whether so."""
        settings = self._settings
        if isinstance(settings.optimizer_correction, AdamCorrection):
            check_correctable(self.optimizers)
        are_correctable = list(map(is_correctable, self.optimizers))
        corrects = all(are_correctable) if settings.takes_momentum else any(are_correctable)
        if not (corrects and self.optimizers and settings.can_correct_adam):
            settings.leave_optimizers()
            return False
        value = trainer.gradient_clip_val
        clip = Clipping() if value is None else _clipping(value, trainer.gradient_clip_algorithm)
        settings.correct_adam(clip, _total_steps(trainer))
        return True

    def _clip(self, optimizer: Optimizer, clip_val: Any = 0.0, *algorithm: Any, **named_algorithm: Any) -> None:
        """Clip as Lightning does what is not corrected, and have the rest clipped before its compression."""
        assert self._engine is not None
        assert self._optimizer_view is not None
        self._engine.clip(_clipping(clip_val, *algorithm, **named_algorithm))
        with self._optimizer_view.without_corrected():
            if all(parameter.grad is None for parameter in handled(optimizer)):
                return  # torch clips no list without a member
            self._clip_gradients(optimizer, clip_val, *algorithm, **named_algorithm)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = super().optimizer_state(optimizer)
        if self._optimizer_view is None:
            return state
        return self._optimizer_view.complete(getattr(optimizer, "_optimizer", optimizer), state)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        if self._engine is not None:
            assert self._optimizer_view is not None
            assert self.lightning_module is not None
            epoch = self.lightning_module.current_epoch
            coming = self._optimizer_view.coming_step(self.is_plain)
            self._engine.begin_backward(
                self._loss_scale(), coming.hyperparameters, epoch, self._samples_deltas, coming.whole, coming.steps
            )

    def _loss_scale(self) -> Optional[Tensor]:
        scaler = getattr(self.precision_plugin, "scaler", None)
        # Scaling a one gives the scale without asking the device for its value.
        return None if scaler is None else scaler.scale(torch.ones((), device=self.root_device))

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._engine is not None:
            self._engine.raise_error()

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, *args, **kwargs)
        self._samples_deltas = False
        if self._engine is not None:
            self._engine.end_step()
        return output

    @override
    def on_validation_start(self) -> None:
        self._synchronize_replicas()
        super().on_validation_start()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._synchronize_replicas()
        return super().lightning_module_state_dict()

    @override
    def on_train_end(self) -> None:
        self._synchronize_replicas()
        super().on_train_end()

    def _synchronize_replicas(self) -> None:
        if self._engine is not None:
            self._engine.synchronize_replicas()

    @override
    def teardown(self) -> None:
        if self._engine is not None:
            self._final_stats = self.compression_stats()
            self._end_switching()
            self._close_engine()
            if self._optimizer_view is not None:
                self._optimizer_view.close()
                self._optimizer_view = None
            if self._settings.feedback.adam is not None:
                del self.precision_plugin.clip_gradients
        super().teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        def register(system: System) -> None:
            variants, compressor = system.variants(), system.arguments["compressor"]
            taken = [name for name in variants if name in strategy_registry]
            if taken:
                raise ValueError(f"strategy {taken[0]!r} exists already: choose another name than {compressor!r}")
            for name, arguments in variants.items():
                strategy_registry.register(name, cls, description=system.description, **arguments)

        announce_systems(register)


def _total_steps(trainer: Trainer) -> Optional[int]:
    """Return the optimizer steps of the whole training, as Lightning estimates them; ``None`` where it cannot."""
    if trainer.max_steps > 0:
        return trainer.max_steps
    try:
        total = trainer.estimated_stepping_batches
    except MisconfigurationException:  # batches are accumulated by a schedule
        return None
    return None if total == float("inf") else int(total)


def _clipping(value: float, gradient_clip_algorithm: Union[str, None] = GradClipAlgorithmType.NORM) -> Clipping:
    if not value:
        return Clipping()
    return Clipping(value=value) if gradient_clip_algorithm == GradClipAlgorithmType.VALUE else Clipping(norm=value)


def _check_parameters(model: Module) -> None:
    refused = [
        f"{name} ({parameter.dtype})"
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not parameter.is_floating_point()
    ]
    if refused:
        raise TypeError(
            f"parameters that are not real floating point cannot be compressed: {', '.join(refused)}. Keep the real and"
            " imaginary parts of a complex parameter as a real one (torch.view_as_real), or freeze it."
        )
