import re

import torch

from tests.helpers.trainers import Small, expect, make_trainer, weights

BATCHES = 6  # batches per epoch
_EXPECTED_WARNINGS = (
    ".*your dataloader is not resumable.*",  # the batch number alone determines the rows
    ".*callbacks used to create the checkpoint need to be provided.*",
)


class Numbered(Small):
    """A model with batches determined by epoch, number and rank. The model stores its weights after each batch.

    The model may save after a batch, and multiplies the learning rate by a factor after every step.
    """

    def __init__(self, save_after=None, path="", learning_rate_factor=0.9):
        super().__init__()
        self.save_after = save_after
        self.path = path
        self.learning_rate_factor = learning_rate_factor
        self.history = {}

    def rows(self, batch_index):
        seed = 10_000 * self.global_rank + 100 * self.current_epoch + batch_index
        return torch.randn(4, 32, generator=torch.Generator().manual_seed(seed)).to(self.device, self.dtype)

    def training_step(self, batch, batch_index):
        rows = self.rows(batch_index)
        return (self.network(rows) - rows).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        seen = self.trainer.current_epoch * BATCHES + batch_idx + 1
        if seen == self.save_after:
            self.trainer.save_checkpoint(self.path)
        self.history[seen] = weights(self)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, self.learning_rate_factor)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Starting(Numbered):
    def on_train_start(self):
        engine = getattr(self.trainer.strategy, "engine", None)
        kept = {"memory": {}} if engine is None else engine.state_dict()
        memory = {kind: {name: each.clone() for name, each in of.items()} for kind, of in kept["memory"].items()}
        self.notes = {
            **kept,
            "memory": memory,
            "optimizers": momenta(self.trainer.optimizers[0].state.values()),
            "weights": weights(self),
        }

    def on_fit_end(self):
        if self.path and self.save_after is None:
            self.trainer.save_checkpoint(self.path)


def momenta(state):
    found = (each.get("momentum_buffer") for each in state)
    return [tensor.clone() for tensor in found if tensor is not None]


def fit_numbered(rank, strategy, model, ckpt_path=None, **arguments):
    trainer = make_trainer(rank, strategy, **{"max_epochs": 2, "limit_train_batches": BATCHES, **arguments})
    expect(*_EXPECTED_WARNINGS)
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer


def files_in(folder):
    return sorted(
        re.sub(r"[0-9a-f]{32}/0/", "", str(path.relative_to(folder))) for path in folder.rglob("*") if path.is_file()
    )
