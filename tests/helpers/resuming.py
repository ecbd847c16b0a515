import re
from collections.abc import Container
from typing import Any

import torch
from pytorch_lightning.plugins import MixedPrecision
from torch import nn

from lightning_sparse import LocalSteps
from tests.helpers.devices import DEVICE
from tests.helpers.trainers import Small, expect, make_trainer, weights

BATCHES = 6  # batches per epoch
RESUME_WARNINGS = (
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
    expect(*RESUME_WARNINGS)
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer


def files_in(folder):
    return sorted(
        re.sub(r"[0-9a-f]{32}/0/", "", str(path.relative_to(folder))) for path in folder.rglob("*") if path.is_file()
    )


ROUNDS: dict[str, dict[str, Any]] = {
    "diloco": {"compressor": "dense", "local_steps": LocalSteps(4, 0.7, 0.9, nesterov=True)},
    "sparse": {"density": 0.1, "wire": "2bit", "local_steps": LocalSteps(4, residual_decay=0.9)},
    "quantized": {"compressor": "dense", "wire": "4bit", "local_steps": LocalSteps(4, residual_decay=0.9)},
}


class Local(Numbered):
    def __init__(self, save_after=None, path=""):
        super().__init__(save_after, path)
        self.network = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))

    def validation_step(self, batch, batch_index):
        self.network(self.rows(batch_index))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Overflowing(Local):
    overflows_in: Container[int] = (1,)

    def training_step(self, batch, batch_index):
        loss = super().training_step(batch, batch_index)
        return loss * (float("inf") if self.global_rank == 1 and batch_index in self.overflows_in else 1.0)

    def on_train_end(self):
        self.notes = self.trainer.precision_plugin.scaler.get_scale()


def scaling():
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=8.0, growth_interval=3)
    return [MixedPrecision("16-mixed", DEVICE.type, scaler)]
