"""The record that travels between the nouns: which elements of a tensor, and their values."""

from typing import NamedTuple, Optional

from torch import Tensor


class Quantization(NamedTuple):
    """Meaning of a selection's integer codes: ``code * scale of its bucket``.

    Attributes:
        scales: fp32 ``[buckets]``; a bucket is ``bucket_size`` elements in a row, the last one may be shorter.
        bucket_size: elements that share a scale.
        levels: codes lie in ``[-levels, levels]``.
    """

    scales: Tensor
    bucket_size: int
    levels: int


class SelectionSize(NamedTuple):
    """Size of a selection, known before there is a gradient: it says how many bytes sending takes.

    Attributes:
        numel: number of elements of the tensor selected from.
        selected: how many of them are: by each rank where every rank's own are sent, by all ranks together where
            they send at the union of their choices. Places that may stay empty are counted.
        bucket_size: elements that share a scale where integer codes travel; 0 where none do.
        levels: of those codes, for each sign.
        is_whole: whether every element is sent, without indices.
    """

    numel: int
    selected: int
    bucket_size: int = 0
    levels: int = 0
    is_whole: bool = False


class Selection(NamedTuple):
    """Some elements of a flat tensor.

    Attributes:
        values: floating point, ``[count]``, or ``[ranks, count]`` where several ranks selected.
        indices: int64 of the same shape, distinct and ascending in each row; ``None`` stands for every element, in
            order; ``values`` may then have any shape, and end in padding.
        numel: number of elements of the tensor selected from.
        filled: bool ``[count]``: which of these elements are sent. A message of fixed size carries a zero in the place
            of the others, and they stay here. ``None`` where all are sent.
        quantization: what ``values`` stand for where they are integer codes (int8 ``[numel]``); else ``None``.
    """

    values: Tensor
    indices: Optional[Tensor]
    numel: int
    filled: Optional[Tensor] = None
    quantization: Optional[Quantization] = None
