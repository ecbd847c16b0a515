"""Dense: everything is sent, as DDP does; the baseline that the others are compared with."""

from collections.abc import Sequence
from typing import ClassVar, Optional

from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.base import Compressor
from lightning_sparse.compressors.selection import Selection


class Dense(Compressor):
    """Send every element. With a 16-bit wire, what rounding drops is kept in the residual.

    Differs from plain DDP in the order of the sum: contributions are added rank by rank, so that the result does not
    depend on how parameters are grouped, where a ring all-reduce's does.
    """

    default_density: ClassVar[Optional[float]] = None
    wire_format: ClassVar[str] = "reduce"
    is_lossless: ClassVar[bool] = True

    @override
    def select(self, names: Sequence[str], accumulated: Sequence[Tensor], counts: Sequence[int]) -> list[Selection]:
        return [Selection(tensor, None, tensor.numel()) for tensor in accumulated]
