"""The first callback, where replicas may be apart or in shards: others see, and validate, the model of all ranks."""

from contextlib import ExitStack

from typing_extensions import override

from lightning_sparse.engine.step.topology import reshard
from lightning_sparse.loop.loop import Training
from lightning_sparse.strategy.lightning import Callback, LightningModule, ModelPruning, Trainer


class FirstCallback(Callback):
    """End a round of local steps where a validation begins, and where training ends, before any other callback."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._shown = ExitStack()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._training.end_round(bool(trainer.fast_dev_run))  # type: ignore[attr-defined]
        self._shown.enter_context(self._training.replicas.shared_model())

    def end_validation(self, module: LightningModule) -> None:
        """Go on with this rank's model, once all others have seen the end of a validation."""
        reshard(module)
        self._shown.close()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._training.replicas.synchronize()


def check_ranks_apart(trainer: Trainer) -> None:
    """Refuse what each rank would decide by its own clock, or by its own model, where ranks step apart."""
    seconds = getattr(trainer, "_val_check_time_interval", None)
    if seconds is not None:
        raise ValueError(
            f"val_check_interval is a time ({seconds} s), which each rank has from its own clock, and ranks that step"
            " apart would validate after different steps: give a number of batches or a fraction of an epoch, such as"
            " val_check_interval=0.5"
        )
    if any(isinstance(each, ModelPruning) for each in trainer.callbacks):  # type: ignore[attr-defined]
        raise ValueError(
            "ModelPruning removes what is small in each rank's own model, and ranks that step apart have different"
            " ones: exchange in every step, such as with strategy='sparse_lags', or prune when training has ended"
        )
