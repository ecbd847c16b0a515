"""Dense: everything is sent, as DDP does; the baseline that the others are compared with. And QSGD: in 4 bits each.

Alistarh, Grubic, Li, Tomioka and Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
NeurIPS 2017 (arXiv 1610.02132).
"""

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


class QSGD(Dense):
    """Send every element as one of 15 multiples of its block's largest magnitude: :class:`Dense` with ``wire="4bit"``.

    Differs from the paper in this:

    * Elements are rounded to the nearest level, and what that drops waits in the residual. The paper rounds at random,
      right on average, and keeps nothing; with a residual no randomness is needed, and the error is smaller.
    * A block of 64 elements is scaled by its largest magnitude, as in the paper's experiments (with larger buckets);
      its theorems have the Euclidean norm.
    * Codes have a fixed width, since ranks have to know a message's size beforehand; the paper's are variable (Elias).
    * Each rank averages a share of the elements, and sends the means in 4 bits, too: what a rank receives does not grow
      with their number. In the paper every rank receives every other's gradient.

    With ``wire="2bit"`` an element is zero or plus or minus the mean magnitude of its block's larger elements; other
    wires change nothing.
    """

    wire: ClassVar[Optional[str]] = "4bit"
