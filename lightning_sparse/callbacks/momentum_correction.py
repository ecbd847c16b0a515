"""The callback that accumulates SGD's momentum before compression, instead of in the optimizer."""

from typing import Any, Optional, Union

from typing_extensions import override

from lightning_sparse.callbacks.base import StepObserver, log_scalars, over_ranks
from lightning_sparse.compressors.base import FROM_OPTIMIZER, ErrorFeedback
from lightning_sparse.engine import Engine
from lightning_sparse.engine.adam.steps import is_correctable
from lightning_sparse.strategy.lightning import LightningModule, Trainer
from lightning_sparse.strategy.trainer import SparseDDPStrategy


class MomentumCorrection(StepObserver):
    """Accumulate SGD's momentum before compression, with the arguments of :class:`~lightning_sparse.compressors.DGC`.

    At the Trainer's ``log_every_n_steps``, loggers get ``sparse/momentum_norm``, and with ``clip_norm`` also
    ``sparse/local_clip_factor``.

    Raises:
        ValueError: for an argument out of range. At the start of ``fit``, for an optimizer other than SGD, or for an
            incompatible compressor or schedule.
        TypeError: at the start, if the Trainer's strategy is not a :class:`~lightning_sparse.SparseDDPStrategy`.

    Example::

        >>> correction = MomentumCorrection(clip_norm=0.25)
    """

    def __init__(
        self,
        momentum: Union[float, str] = FROM_OPTIMIZER,
        nesterov: bool = False,
        masks_momentum: bool = False,
        clip_norm: Optional[float] = None,
    ) -> None:
        if momentum is None:
            raise ValueError("momentum=None has no effect: give 'optimizer' or a number, or remove the callback")
        self._correction = ErrorFeedback(True, momentum, nesterov, masks_momentum, clip_norm).checked()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            trainer.strategy.correct_momentum(self._correction)  # type: ignore[attr-defined]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if any(map(is_correctable, trainer.optimizers)):
            raise ValueError("MomentumCorrection is for torch.optim.SGD: replace Adam by SGD, or remove the callback")

    @override
    def after_step(self, trainer: Trainer, engine: Engine, step: int) -> None:
        means = over_ranks(engine, {name: float(each) for name, each in engine.memory.statistics().items()})
        log_scalars(trainer, {f"sparse/{name}": value for name, value in means.items()}, step)

    @override
    def teardown(self, trainer: Trainer, *given: Any, **named: Any) -> None:
        if isinstance(trainer.strategy, SparseDDPStrategy):
            trainer.strategy.correct_momentum(None)

    on_exception = teardown
