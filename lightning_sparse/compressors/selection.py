"""The record that travels between the nouns: which elements of a tensor, and their values."""

from typing import NamedTuple, Optional

from torch import Tensor


class SelectionSize(NamedTuple):
    """Size of a selection, known before there is a gradient: it says how many bytes sending takes.

    Attributes:
        numel: number of elements of the tensor selected from.
        selected: how many of them are, padding included: by each rank, or by all ranks together where they send at the
            union of their choices.
        is_whole: whether every element is sent, without indices.
    """

    numel: int
    selected: int
    is_whole: bool = False


class Selection(NamedTuple):
    """Some elements of a flat tensor.

    Attributes:
        values: floating point, ``[count]``, or ``[ranks, count]`` where several ranks selected.
        indices: int64 of the same shape, distinct and ascending in each row; ``None`` stands for every element, in
            order; ``values`` may then have any shape, and end in padding.
        numel: number of elements of the tensor selected from.
        filled: bool ``[count]``: which are sent, ``None`` for all; others stay here, a zero in their place.
    """

    values: Tensor
    indices: Optional[Tensor]
    numel: int
    filled: Optional[Tensor] = None
