"""Momentum before compression instead of after it, whatever is compressed with."""

from typing import Optional, Union

from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_sparse.callbacks.base import (
    StepObserver,
    engine_of,
    is_logged,
    log_scalars,
    memory_statistics,
    reduce_over_ranks,
    sparse_strategy,
)
from lightning_sparse.compressors.base import FROM_OPTIMIZER, ErrorFeedback
from lightning_sparse.engine import Engine
from lightning_sparse.strategy.lightning import LightningModule, Trainer
from lightning_sparse.strategy.trainer import SparseDDPStrategy


class MomentumCorrection(StepObserver):
    """Accumulate SGD's momentum before compression, as Deep Gradient Compression does (arXiv 1712.01887).

    With momentum in the optimizer, an element that was sent late meets a momentum that has forgotten it. Here every
    rank accumulates the momentum of its own gradient, and selects from velocities: with any compressor that keeps
    residuals, as :class:`~lightning_sparse.compressors.DGC` does by itself. Changes of learning rate and momentum, by
    the optimizer or a schedule (warm restarts, one cycle), are followed.

    At the Trainer's ``log_every_n_steps`` loggers get, as means over ranks, ``sparse/momentum_norm`` (accumulated by a
    rank), ``sparse/masked_fraction`` (of all elements, those whose momentum was set to zero) and
    ``sparse/local_clip_factor`` (by which a rank's gradient was multiplied), where it is masked and clipped.

    With AdamW and Adam the optimizer's own correction is in its place, see
    :class:`~lightning_sparse.AdamCorrection`; ``clip_norm`` is then that of the mean gradient, as measured.

    Args:
        momentum: ``"optimizer"`` takes it, and whether it is Nesterov's, over from the groups of the SGD optimizer,
            whose steps are made without; a number is for an optimizer without momentum.
        nesterov: whether a ``momentum`` given as a number is Nesterov's.
        masks_momentum: whether the momentum of an element that was sent starts again from zero, as published; see
            :class:`~lightning_sparse.compressors.DGC`.
        clip_norm: largest norm of the mean gradient; every rank clips its own, before it is accumulated, at this
            divided by the square root of the number of ranks. The whole gradient has to be known first, so the exchange
            no longer overlaps with backward. ``None`` not to clip.

    Raises:
        ValueError: for a momentum outside ``[0, 1)``, or a ``clip_norm`` that is not positive; at the start of ``fit``,
            for an optimizer other than SGD or with dampening, for a compressor that corrects momentum itself, keeps
            nothing or cannot mask, and for ``schedule="auto"``.
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
            raise ValueError("momentum=None leaves nothing to correct: give 'optimizer' or a number, or no callback")
        self._correction = ErrorFeedback(
            momentum=momentum, nesterov=nesterov, masks_momentum=masks_momentum, clip_norm=clip_norm
        ).checked()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            sparse_strategy(trainer).correct_momentum(self._correction)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        correction = self._correction
        acts = correction.momentum != FROM_OPTIMIZER or correction.clip_norm is not None
        if acts and sparse_strategy(trainer).engine is None:
            rank_zero_warn(
                f"MomentumCorrection(momentum={correction.momentum!r}, clip_norm={correction.clip_norm}) has no effect"
                " on one process, where nothing is exchanged: to compare, give the momentum to the optimizer and"
                " gradient_clip_val to the Trainer"
            )

    @override
    def looks_at(self, trainer: Trainer, step: int) -> bool:
        return bool(trainer.loggers) and is_logged(trainer, step)

    @override
    def before_step(self, trainer: Trainer, engine: Engine) -> None:
        engine.memory.is_watched = True

    @override
    def after_step(self, trainer: Trainer, pl_module: LightningModule, strategy: SparseDDPStrategy, step: int) -> None:
        means = reduce_over_ranks(strategy, memory_statistics(engine_of(strategy)))
        log_scalars(trainer, {f"sparse/{name}": value for name, value in means.items()}, step)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy, SparseDDPStrategy):
            trainer.strategy.correct_momentum(None)
