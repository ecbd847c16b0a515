"""The callback that accumulates SGD's momentum before compression, instead of in the optimizer."""

from typing import Any, Optional, Union

from typing_extensions import override

from lightning_sparse.callbacks.base import StepObserver
from lightning_sparse.compressors.base import FROM_OPTIMIZER, ErrorFeedback
from lightning_sparse.engine.adam.steps import is_correctable
from lightning_sparse.strategy.lightning import LightningModule, Trainer
from lightning_sparse.strategy.trainer import SparseDDPStrategy


class MomentumCorrection(StepObserver):
    """Accumulate SGD's momentum before compression, with the arguments of :class:`~lightning_sparse.compressors.DGC`.

    Raises:
        ValueError: for an argument out of range. At the start of ``fit``, for an optimizer other than SGD, or for an
            incompatible compressor or schedule.
        TypeError: at the start, if the Trainer's strategy is not a :class:`~lightning_sparse.SparseDDPStrategy`.

    Example::

        >>> correction = MomentumCorrection(clip_norm=0.25)
    """

    every_n_steps = 0  # observes no step

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
            _correct(trainer, self._correction)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if any(map(is_correctable, trainer.optimizers)):
            raise ValueError("MomentumCorrection is for torch.optim.SGD: replace Adam by SGD, or remove the callback")

    @override
    def teardown(self, trainer: Trainer, *given: Any, **named: Any) -> None:
        _correct(trainer, None)

    on_exception = teardown


def _correct(trainer: Trainer, correction: Optional[ErrorFeedback]) -> None:
    if isinstance(strategy := trainer.strategy, SparseDDPStrategy):
        strategy.settings = strategy.settings.correcting_momentum(correction)
