"""A text as windows of word numbers, cut as in the Penn Treebank recipe, and shared out between ranks.

The text is laid out in columns, as many as all ranks' batches together, which are read side by side from top to bottom,
``bptt`` words at a time: a model that keeps its hidden state from one window to the next reads on where it stopped.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from pydoc_data import topics
from typing import NamedTuple, Optional

import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader
from typing_extensions import override

UNKNOWN = "<unk>"
NOT_A_TARGET = -100  # what torch's losses and torchmetrics leave out
TRAIN_SHARE = 0.9

_RUN_OF_MARKS = re.compile(r"([^\w\s])\1+")
_WORD = re.compile(r"\w+(?:'\w+)*|[^\w\s]")


class Window(NamedTuple):
    """What a rank reads at once; ``int64`` tensors of shape ``[columns, time]``.

    Attributes:
        inputs: word numbers.
        targets: for each the number of the word after it.
    """

    inputs: Tensor
    targets: Tensor


class Vocabulary:
    """The most frequent words of a text, each with a number; every other word is number 0, ``<unk>``.

    Args:
        words: the text to count in.
        size: numbers to give at most, ``<unk>`` included.

    Example::

        >>> Vocabulary(["a", "rose", "is", "a", "rose"], size=3).encode(["rose", "thorn", "a"])
        tensor([2, 0, 1])
    """

    def __init__(self, words: Iterable[str], size: int) -> None:
        frequent = [word for word, _ in Counter(words).most_common(size - 1)]
        self._numbers = {word: number for number, word in enumerate([UNKNOWN, *frequent])}

    def __len__(self) -> int:
        return len(self._numbers)

    def encode(self, words: Iterable[str]) -> Tensor:
        """Return the words' numbers, ``int64``."""
        return torch.tensor([self._numbers.get(word, 0) for word in words], dtype=torch.int64)


def windows(columns: Window, bptt: int) -> list[Window]:
    """Cut columns of text into windows of ``bptt`` words; the last may be shorter."""
    return list(map(Window, columns.inputs.split(bptt, dim=1), columns.targets.split(bptt, dim=1)))


class TextDataModule(LightningDataModule):
    """The windows of each rank. Give the Trainer ``use_distributed_sampler=False``, which would take windows out.

    Args:
        text: all of it; the first nine tenths are for training, the rest for validation.
        vocabulary_size: different words at most, ``<unk>`` included.
        columns: columns that one rank reads at once.
        bptt: words in a window.
    """

    def __init__(self, text: str, vocabulary_size: int, columns: int, bptt: int) -> None:
        super().__init__()
        words = tokenize(text)
        border = int(TRAIN_SHARE * len(words))
        self.vocabulary = Vocabulary(words[:border], vocabulary_size)
        self._train = self.vocabulary.encode(words[:border])
        self._validation = self.vocabulary.encode(words[border:])
        self._columns = columns
        self._bptt = bptt

    @override
    def train_dataloader(self) -> DataLoader[Window]:
        return self._loader(self._train, is_complete=False)

    @override
    def val_dataloader(self) -> DataLoader[Window]:
        return self._loader(self._validation, is_complete=True)

    def _loader(self, tokens: Tensor, is_complete: bool) -> DataLoader[Window]:
        assert self.trainer is not None
        rank, ranks = self.trainer.global_rank, self.trainer.world_size
        columns = cut_columns(tokens, self._columns * ranks, is_complete)
        pieces = windows(rank_share(columns, rank, ranks), self._bptt)
        return DataLoader(pieces, batch_size=None)  # type: ignore[arg-type]  # a list serves as well


def tokenize(text: str) -> list[str]:
    """Cut a text into lower-case words and punctuation marks; a run of the same mark, such as an underline, is one.

    Example::

        >>> tokenize("Don't panic!!!")
        ["don't", 'panic', '!']
    """
    return _WORD.findall(_RUN_OF_MARKS.sub(r"\1", text.lower()))


def cut_columns(tokens: Tensor, count: int, is_complete: bool) -> Window:
    """Lay a text out in columns of equal length, each going on where the one before it ends.

    Args:
        tokens: the text's word numbers, ``[words]``.
        count: number of columns.
        is_complete: whether every word counts: the last column is filled up with targets ``NOT_A_TARGET``. Otherwise
            the words that do not fill a row are dropped.

    Returns:
        the whole text as one window.

    Raises:
        ValueError: if there is not a word for every column.
    """
    pairs = len(tokens) - 1
    if pairs < count:
        raise ValueError(
            f"a text part of {len(tokens)} words cannot fill {count} columns (batch size times ranks): use a longer"
            " --text or a smaller --batch-size"
        )
    inputs, targets = tokens[:-1], tokens[1:]
    if is_complete:
        missing = -pairs % count
        inputs = functional.pad(inputs, (0, missing))
        targets = functional.pad(targets, (0, missing), value=NOT_A_TARGET)
    used = len(inputs) // count * count
    return Window(inputs[:used].view(count, -1), targets[:used].view(count, -1))


def rank_share(columns: Window, rank: int, ranks: int) -> Window:
    """Return the columns of one rank; their number must be a multiple of ``ranks``."""
    return Window(columns.inputs.chunk(ranks)[rank], columns.targets.chunk(ranks)[rank])


def load_text(path: Optional[Path]) -> str:
    """Read a UTF-8 text file, or without one Python's own help pages: 65000 words of English about Python.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not UTF-8.
    """
    if path is None:
        return "\n".join(_strings({name: value for name, value in vars(topics).items() if not name.startswith("_")}))
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}): convert it, for instance with iconv") from error


def _strings(value: object) -> Iterator[str]:
    """Find the texts, however deep: the layout of the help pages is Python's own affair."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings(list(value.values()))
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)
