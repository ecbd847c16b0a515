"""Small models, one for each thing that people build their own way."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from tests.trainers import Rows, Small


class Plain(Small):
    """The small model with 8 batches for two ranks, a learning rate that can be searched for, and predictions."""

    learning_rate = 0.1

    @override
    def configure_optimizers(self) -> Any:
        """Return SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=0.9)

    @override
    def train_dataloader(self) -> Any:
        """Return 8 batches for two ranks."""
        return DataLoader(Rows(64), batch_size=4)

    @override
    def predict_dataloader(self) -> DataLoader[Tensor]:
        """Return two batches for two ranks."""
        return self.val_dataloader()

    @override
    def predict_step(self, batch: Tensor) -> Tensor:
        """Reconstruct the batch."""
        return self.network(batch)
