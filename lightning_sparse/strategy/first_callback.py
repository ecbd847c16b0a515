"""A callback that sets the model to the shared model before users' callbacks for validation."""

from typing import Any

from typing_extensions import override

from lightning_sparse.strategy.lightning import (
    Callback,
    LightningModule,
    ModelPruning,
    StochasticWeightAveraging,
    Trainer,
)


class FirstCallback(Callback):
    """Call the strategy at the start of a validation and at the end of training, before users' callbacks."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._strategy.begin_validation(trainer.sanity_checking)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._strategy.replicas.synchronize()


def check_ranks_apart(trainer: Trainer) -> None:
    """Raise an error if ``val_check_interval`` is a time or a callback changes weights. Call this if models diverge."""
    # If the interval is a time, Lightning does not set the attribute to a number.
    if not isinstance(getattr(trainer, "val_check_interval", None), (int, float)):
        raise ValueError(
            "val_check_interval is a time, and clocks differ between ranks. A validation averages the replicas, so all"
            " ranks must validate after the same step. Set a number of batches or a fraction of an epoch, such as"
            " val_check_interval=0.5."
        )
    for each in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(each, (ModelPruning, StochasticWeightAveraging)):
            raise ValueError(
                f"{type(each).__name__} changes weights of each rank's local model, and local models differ"
                " between ranks. Exchange gradients in every step (strategy='sparse_lags')."
            )
