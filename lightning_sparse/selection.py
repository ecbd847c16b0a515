"""The record that travels between the nouns: which elements of a tensor, and their values."""

from typing import NamedTuple, Optional

from torch import Tensor


class Selection(NamedTuple):
    """Some elements of a flat tensor.

    Attributes:
        values: floating point, ``[count]``, or ``[ranks, count]`` where several ranks selected.
        indices: int64 of the same shape, distinct and ascending in each row; ``None`` stands for every element, in
            order; ``values`` may then have any shape, and end in padding.
        numel: number of elements of the tensor selected from.
    """

    values: Tensor
    indices: Optional[Tensor]
    numel: int
