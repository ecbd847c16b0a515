"""A training whose samples are numbers, and which writes down in which step each rank has seen which."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import nn
from torch.utils.data import DataLoader


class Counting(LightningModule):
    """Take ``seconds`` for a step while no file ``fast`` is there, and write to a file of each rank and each start."""

    def __init__(self, samples: int, folder: str, seconds: float = 0.1):
        super().__init__()
        self.samples, self.folder, self.seconds = samples, Path(folder), seconds
        self.layer = nn.Linear(1, 4)

    def on_train_start(self):
        start = self.trainer.strategy.broadcast(time.time())
        path = self.folder / f"{start}-of-{self.trainer.world_size}-from-{self.trainer.global_step}.{self.global_rank}"
        self._file = path.open("w", buffering=1)

    def training_step(self, batch, batch_index):
        if not (self.folder / "fast").exists():
            time.sleep(self.seconds)
        return self.layer(batch.float()[:, None] / self.samples).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self._file.write(json.dumps([self.trainer.global_step, self.trainer.current_epoch, batch.tolist()]) + "\n")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self):
        numbers: Any = range(self.samples)
        return DataLoader(numbers, batch_size=2, shuffle=True, num_workers=1, persistent_workers=True)
