"""A small GPT that predicts the next character of a text, and the windows of text that it learns from."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import IterableDataset
from typing_extensions import override

TRAIN_SHARE = 0.9
_SEEDS_OF_AN_EPOCH = 1_000_000  # more than there are ranks and seeds of runs


class GPTSize(NamedTuple):
    """How large a GPT is; the default has 0.36 million parameters.

    Attributes:
        length: characters that it looks back on, and that a window holds.
        width: of its features.
        blocks: number of transformer blocks.
        heads: attention heads of each, of which ``width`` is a multiple.
    """

    length: int = 64
    width: int = 96
    blocks: int = 3
    heads: int = 4


class Block(nn.Module):
    """Causal attention, then two linear layers with a GELU between, each after a norm and beside a shortcut.

    Args:
        size: of the GPT that it is part of.
    """

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm, self.output_norm = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attention, self.mix = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.widen, self.narrow = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    @override
    def forward(self, features: Tensor) -> Tensor:
        """Map ``[batch, time, width]`` to the same shape."""
        projected = self.attention(self.attention_norm(features)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in projected)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        features = features + self.mix(seen.transpose(1, 2).flatten(2))
        output: Tensor = features + self.narrow(functional.gelu(self.widen(self.output_norm(features))))
        return output


class GPT(nn.Module):
    """Characters in, logits of the next character out.

    Args:
        characters: how many different ones there are.
        size: of the network.
    """

    def __init__(self, characters: int, size: GPTSize) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, size.width)
        self.places = nn.Embedding(size.length, size.width)
        self.blocks = nn.Sequential(*[Block(size) for _ in range(size.blocks)])
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, characters)

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        """Map character numbers ``[batch, time]`` to logits ``[batch, time, characters]``."""
        features = self.characters(inputs) + self.places.weight[: inputs.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(features)))
        return logits


def window_loss(network: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean cross entropy of every character but the first of windows ``[batch, length + 1]``, in nats."""
    logits = network(windows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


class Characters(NamedTuple):
    """A text as numbers of characters, int64 ``[length]`` each.

    Attributes:
        train: the first nine tenths.
        validation: the rest.
        different: how many different characters there are.
    """

    train: Tensor
    validation: Tensor
    different: int


def encoded(text: str) -> Characters:
    """Number the characters of a text.

    Example::

        >>> encoded("to be or not to be").different
        7
    """
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    encoded_text = torch.tensor([numbers[character] for character in text])
    border = int(TRAIN_SHARE * len(text))
    return Characters(encoded_text[:border], encoded_text[border:], len(numbers))


def random_windows(text: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Cut windows of ``length + 1`` characters at random places, ``[count, length + 1]``."""
    starts = torch.randint(0, len(text) - length - 1, (count,), generator=generator)
    return text[starts.unsqueeze(1) + torch.arange(length + 1)]


class RandomWindows(IterableDataset[Tensor]):
    """Batches of random windows, without an end.

    Args:
        text: numbers of characters.
        batch_size: windows of a batch.
        length: characters of a window, less one.
        seed: of the places, of its own on every rank.
        epoch_of: returns the epoch that begins; each has windows of its own.
    """

    def __init__(self, text: Tensor, batch_size: int, length: int, seed: int, epoch_of: Callable[[], int]) -> None:
        self._text = text
        self._batch_size = batch_size
        self._length = length
        self._seed = seed
        self._epoch_of = epoch_of

    @override
    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self._seed + _SEEDS_OF_AN_EPOCH * self._epoch_of())
        while True:
            yield random_windows(self._text, self._batch_size, self._length, generator)


def warmed_up_cosine(step: int, steps: int, warmup_steps: int = 100) -> float:
    """Return the learning rate of a step over the largest one: rising, then a cosine that ends at a tenth.

    Example::

        >>> [round(warmed_up_cosine(step, 1000), 2) for step in (0, 99, 550, 999)]
        [0.01, 0.98, 0.48, 0.1]
    """
    return min(1.0, (step + 1) / warmup_steps) * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / steps))))
