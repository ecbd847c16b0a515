"""Models for the planner, built by class path."""

from typing import Any

import torch
from pytorch_lightning import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

from tests.helpers.trainers import Rows


class Plain(LightningModule):
    """Two layers, whose gradients become ready last layer first, and a loss in a dictionary, as Lightning allows."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(32, width)
        self.last = nn.Linear(width, 32)

    def training_step(self, batch: Tensor, batch_index: int) -> Any:
        loss = (self.last(torch.relu(self.first(batch))) - batch).square().mean()
        self.log("loss", loss)  # which needs a Trainer
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.1)


class WithData(Plain):
    """Brings its batches along: two of them, fewer than are profiled, or none; may be frozen, or skip every batch."""

    def __init__(self, flaw: str = "") -> None:
        super().__init__()
        self.flaw = flaw
        self.requires_grad_(flaw != "frozen")

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader([] if self.flaw == "empty" else Rows(8), batch_size=4)

    def training_step(self, batch: Tensor, batch_index: int) -> Any:
        return None if self.flaw == "detached" else super().training_step(batch, batch_index)


class Scheduled(WithData):
    """Has a schedule of its learning rate, as long as training, or one that waits for a validation."""

    def __init__(self, schedule: str) -> None:
        super().__init__()
        self.schedule = schedule

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if self.schedule == "plateau":
            scheduler = {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_loss"}
        elif self.schedule == "one cycle":
            total = self.trainer.estimated_stepping_batches
            scheduler = {"scheduler": OneCycleLR(optimizer, 0.1, total), "interval": "step"}
        else:
            total = int(self.trainer.estimated_stepping_batches) // self.trainer.max_epochs
            scheduler = {"scheduler": CosineAnnealingLR(optimizer, total)}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Manual(WithData):
    """Optimises by hand, one optimizer for each layer, two backward passes a step; one parameter is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.unused = nn.Parameter(torch.ones(3))

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.first, self.last)]

    def training_step(self, batch: Tensor, batch_index: int) -> None:
        for layer, optimizer in zip((self.first, self.last), self.optimizers()):
            self.toggle_optimizer(optimizer)
            self.manual_backward((self.last(self.first(batch)) - batch).square().mean())
            optimizer.step()
            layer.zero_grad()
            self.untoggle_optimizer(optimizer)


class Data(LightningDataModule):
    """Batches from a data module."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Rows(64), batch_size=self.batch_size)
