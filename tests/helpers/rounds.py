from collections.abc import Container
from typing import Any

import torch
from pytorch_lightning.plugins import MixedPrecision
from torch import nn

from lightning_sparse import LocalSteps
from tests.helpers.devices import DEVICE
from tests.helpers.resuming import Numbered

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
