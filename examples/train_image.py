"""Train a small convolutional network to recognise images, on several processes that send sparse gradients.

By default the images are scikit-learn's digits, which need no download; ``--data-dir`` trains on Fashion-MNIST. The
progress bar shows how many times less has been sent (``sparse/total_compression_ratio``), the log the rest.

One process, then two, then two with ordinary DDP::

    python examples/train_image.py --devices 1
    python examples/train_image.py --density 0.01
    python examples/train_image.py --strategy ddp

Two nodes with two processes each; the first command on a host that the other reaches as ``first``::

    MASTER_ADDR=first MASTER_PORT=29500 NODE_RANK=0 python examples/train_image.py --nodes 2 --devices 2
    MASTER_ADDR=first MASTER_PORT=29500 NODE_RANK=1 python examples/train_image.py --nodes 2 --devices 2

The same under SLURM::

    srun --nodes=2 --ntasks-per-node=2 python examples/train_image.py --nodes 2 --devices 2

Fashion-MNIST, with the four files of https://github.com/zalandoresearch/fashion-mnist in a directory::

    python examples/train_image.py --data-dir fashion --epochs 5 --batch-size 64
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

import torch
from command_line import build_trainer, example_parser
from image_data import digits, fashion_mnist
from pytorch_lightning import LightningModule, seed_everything
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

_CLASSES = 10


class ImageClassifier(LightningModule):
    """Two convolutions and two linear layers, for images ``[batch, 1, height, width]`` of 8 pixels or more.

    Args:
        learning_rate: of the optimizer.
        optimizer: builds it from parameters and learning rate; without one it is SGD with momentum 0.9.
    """

    def __init__(self, learning_rate: float, optimizer: Optional[Callable[[Any, float], Optimizer]] = None) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(4),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 128),
            nn.ReLU(),
            nn.Linear(128, _CLASSES),
        )
        self.accuracy = MulticlassAccuracy(_CLASSES, average="micro")
        self.learning_rate = learning_rate
        self.optimizer = optimizer

    @override
    def configure_model(self) -> None:
        if self.device_mesh is not None and not isinstance(self.network, FSDPModule):  # where a strategy shards
            fully_shard(self.network, mesh=self.device_mesh["data_parallel"])

    @override
    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        loss = functional.cross_entropy(self.network(images), labels)
        self.log("train_loss", loss)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        self.accuracy(self.network(images), labels)
        self.log("accuracy", self.accuracy, on_epoch=True, prog_bar=True)

    @override
    def test_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.validation_step(batch)

    @override
    def predict_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.network(batch[0]).argmax(dim=1)  # type: ignore[no-any-return]

    @override
    def configure_optimizers(self) -> Optimizer:
        if self.optimizer is not None:
            return self.optimizer(self.parameters(), self.learning_rate)
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=0.9)


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Train as the command line, or other arguments in its place, say."""
    parser = example_parser(__doc__ or "", epochs=10, batch_size=16, learning_rate=0.01)
    parser.add_argument("--data-dir", type=Path, help="directory of Fashion-MNIST; without it, digits")
    options = parser.parse_args(arguments)

    seed_everything(options.seed, workers=True)
    split = digits() if options.data_dir is None else fashion_mnist(options.data_dir)
    trainer = build_trainer(parser, options, "image", metric="accuracy")
    trainer.fit(
        ImageClassifier(options.lr),
        DataLoader(split.train, options.batch_size, shuffle=True),
        DataLoader(split.test, options.batch_size),
    )


if __name__ == "__main__":
    main()
