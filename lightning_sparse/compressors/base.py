"""What a compressor is: the answer to WHAT is sent."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Optional

from torch import Tensor

from lightning_sparse.selection import Selection


class Compressor(ABC):
    """Choose what is sent of every accumulated gradient.

    A compressor is pure: it calls no collective, changes no tensor that it is given and keeps no state that depends on
    how parameters are grouped. A selection must contain every non-finite element's presence, that is: if the
    accumulated gradient holds a NaN or an infinity, at least one of them is selected, because that is how all ranks
    learn of it.

    Attributes:
        default_density: fraction of elements sent when the user names none; ``None`` for a method without a density.
        wire_format: name of the way its selections travel, see :mod:`lightning_sparse.wire`.
        is_lossless: whether everything is sent, so that only the rounding of the wire can leave a residual.
    """

    default_density: ClassVar[Optional[float]]
    wire_format: ClassVar[str]
    is_lossless: ClassVar[bool] = False

    def select(self, names: Sequence[str], accumulated: Sequence[Tensor], counts: Sequence[int]) -> list[Selection]:
        """Choose what is sent of each tensor of a group.

        Args:
            names: parameter names.
            accumulated: for each, the flat tensor of gradient plus residual; must not be changed.
            counts: for each, the number of elements that the density asks for.

        Returns:
            one selection for each tensor.
        """
        return [self.select_one(*each) for each in zip(names, accumulated, counts)]

    @abstractmethod
    def select_one(self, name: str, accumulated: Tensor, count: int) -> Selection:
        """Choose what is sent of one tensor; see :meth:`select`."""


def element_count(numel: int, density: float) -> int:
    """Return how many of ``numel`` elements a density sends: at least one.

    Example::

        >>> element_count(10_000, 0.001), element_count(3, 0.001)
        (10, 1)
    """
    return max(1, round(density * numel))
