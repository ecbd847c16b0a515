"""Small images with labels: scikit-learn's digits, or the files of Fashion-MNIST."""

import gzip
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

DIGITS_FOR_TEST = 448  # a quarter, and a multiple of most numbers of ranks

_UNSIGNED_BYTES = 0x08


class ImageSplit(NamedTuple):
    """Datasets of ``(image [1, height, width], label)``, images scaled to mean 0 and deviation 1 of the training part.

    Attributes:
        train: what the model learns from.
        test: what it is judged by.
    """

    train: TensorDataset
    test: TensorDataset


class Images(LightningDataModule):
    """Digits, or Fashion-MNIST, in batches; what is for testing is also for validation and prediction.

    Args:
        batch_size: images of a batch, in each process.
        directory: of the files of Fashion-MNIST; ``None`` for scikit-learn's digits, which need no download.
    """

    def __init__(self, batch_size: int = 16, directory: Optional[str] = None) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.directory = directory

    @override
    def setup(self, stage: str) -> None:
        self.split = digits() if self.directory is None else fashion_mnist(Path(self.directory))

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.split.train, batch_size=self.batch_size, shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.split.test, batch_size=self.batch_size)

    @override
    def test_dataloader(self) -> DataLoader[Any]:
        return self.val_dataloader()

    @override
    def predict_dataloader(self) -> DataLoader[Any]:
        return self.val_dataloader()


def digits() -> ImageSplit:
    """Load 1797 handwritten digits of 8 x 8 pixels; they come with scikit-learn. The split is always the same.

    Example::

        >>> len(digits().test)
        448
    """
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    bunch = load_digits()
    images, labels = torch.from_numpy(bunch.images), torch.from_numpy(bunch.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:DIGITS_FOR_TEST], order[DIGITS_FOR_TEST:]
    return _split(images[train], labels[train], images[test], labels[test])


def fashion_mnist(directory: Path) -> ImageSplit:
    """Load 70000 pictures of clothes, 28 x 28 pixels, from the four files of Fashion-MNIST (or MNIST).

    Args:
        directory: holds ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``, ``t10k-images-idx3-ubyte`` and
            ``t10k-labels-idx1-ubyte``, each as it is or with ``.gz``.

    Raises:
        FileNotFoundError: if one of them is missing.
        ValueError: if one is not what its name says, or images and labels differ in number.
    """
    return _split(*_labelled_images(directory, "train"), *_labelled_images(directory, "t10k"))


def read_idx(path: Path) -> Tensor:
    """Read an array of unsigned bytes in idx format, gzipped or not.

    Args:
        path: the file; where it does not exist, the same name with ``.gz`` is read.

    Raises:
        FileNotFoundError: if neither exists.
        ValueError: if it is not such a file, or is cut short.
    """
    content = _content(path)
    if len(content) < 4 or content[:3] != bytes([0, 0, _UNSIGNED_BYTES]):
        raise ValueError(
            f"{path} is not an idx file of unsigned bytes: it starts with {content[:4].hex(' ') or 'nothing'}, expected"
            f" 00 00 08 and the number of dimensions. Was it downloaded as a web page, or compressed twice?"
        )
    dimensions = content[3]
    start = 4 + 4 * dimensions
    shape = struct.unpack(f">{dimensions}I", content[4:start].ljust(4 * dimensions, b"\0"))
    if len(content) != start + math.prod(shape):
        raise ValueError(
            f"{path} holds {len(content)} bytes, but its header promises shape {shape} in {start + math.prod(shape)}:"
            " download it again"
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[start:].view(shape)


def _content(path: Path) -> bytes:
    zipped = path.with_name(path.name + ".gz")
    if path.is_file():
        return path.read_bytes()
    if zipped.is_file():
        return gzip.decompress(zipped.read_bytes())
    raise FileNotFoundError(
        f"neither {path.name} nor {zipped.name} is in {path.parent}: --data-dir must hold the four files of"
        " Fashion-MNIST, see https://github.com/zalandoresearch/fashion-mnist"
    )


def _labelled_images(directory: Path, part: str) -> tuple[Tensor, Tensor]:
    images = read_idx(directory / f"{part}-images-idx3-ubyte")
    labels = read_idx(directory / f"{part}-labels-idx1-ubyte")
    if images.dim() != 3 or labels.dim() != 1 or len(images) != len(labels):
        raise ValueError(
            f"the {part} files in {directory} do not belong together: images of shape {tuple(images.shape)}, labels of"
            f" shape {tuple(labels.shape)}; expected [n, height, width] and [n]"
        )
    return images, labels


def _split(train_images: Tensor, train_labels: Tensor, test_images: Tensor, test_labels: Tensor) -> ImageSplit:
    deviation, mean = torch.std_mean(train_images.float())

    def dataset(images: Tensor, labels: Tensor) -> TensorDataset:
        return TensorDataset((images.float().unsqueeze(1) - mean) / deviation, labels.long())

    return ImageSplit(dataset(train_images, train_labels), dataset(test_images, test_labels))
