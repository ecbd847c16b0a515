"""What a compressor is: the answer to WHAT is sent."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Optional

from torch import Tensor

from lightning_sparse.selection import Selection


class Compressor(ABC):
    """Choose what is sent of every accumulated gradient.

    A compressor is pure: it calls no collective, changes no tensor that it is given and keeps no state that depends on
    how parameters are grouped. If an accumulated gradient holds a NaN or an infinity, at least one of them
    must be selected, because that is how all ranks learn of it.

    Attributes:
        default_density: fraction of elements sent when the user names none; ``None`` for a method without a density.
        wire_format: name of the way its selections travel, see :mod:`lightning_sparse.wire`.
        is_lossless: whether everything is sent, so that only the rounding of the wire can leave a residual.
    """

    default_density: ClassVar[Optional[float]]
    wire_format: ClassVar[str]
    is_lossless: ClassVar[bool] = False

    @abstractmethod
    def select(self, names: Sequence[str], accumulated: Sequence[Tensor], counts: Sequence[int]) -> list[Selection]:
        """Choose what is sent of each tensor of a group.

        Args:
            names: parameter names.
            accumulated: for each, the flat tensor of gradient plus residual; must not be changed.
            counts: for each, the number of elements that the density asks for.

        Returns:
            one selection for each tensor.
        """


def element_count(numel: int, density: float) -> int:
    """Return how many of ``numel`` elements a density sends: at least one.

    Example::

        >>> element_count(10_000, 0.001), element_count(3, 0.001)
        (10, 1)
    """
    return max(1, round(density * numel))
