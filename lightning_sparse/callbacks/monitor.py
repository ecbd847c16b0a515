"""Show in the logger, and in the progress bar, what compression does."""

from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_sparse.strategy import SparseDDPStrategy


class CompressionMonitor(Callback):
    """Log the compression statistics of rank 0 as scalars ``sparse/<name>``.

    They are written to every logger of the Trainer at its ``log_every_n_steps``; the other steps are left alone.

    Args:
        progress_bar: also show the compression ratio and the exposed seconds in the progress bar.

    Raises:
        TypeError: at the start of ``fit``, if the Trainer's strategy is not a
            :class:`~lightning_sparse.SparseDDPStrategy`.

    Example::

        >>> monitor = CompressionMonitor(progress_bar=True)
    """

    def __init__(self, progress_bar: bool = False) -> None:
        self.progress_bar = progress_bar

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, SparseDDPStrategy):
            raise TypeError(
                f"CompressionMonitor needs a SparseDDPStrategy, got {type(trainer.strategy).__name__}: choose one, such"
                " as Trainer(strategy='sparse_topk'), or remove the callback"
            )

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer._logger_connector.should_update_logs:
            return
        assert isinstance(trainer.strategy, SparseDDPStrategy)
        stats = trainer.strategy.compression_stats()
        tagged = {f"sparse/{name}": value for name, value in stats.items()}
        for logger in trainer.loggers:
            logger.log_metrics(tagged, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
        if self.progress_bar and stats:
            shown = {"compression": stats["compression_ratio"], "exposed_ms": 1e3 * stats["exposed_seconds"]}
            pl_module.log_dict(shown, prog_bar=True, logger=False)
