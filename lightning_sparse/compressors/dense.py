"""Dense sends every element, as DDP does, and is a baseline for other methods. QSGD sends every element in 4 bits.

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
    """Send every element. With a 16-bit wire, rounding errors go to the residual.

    Contributions are added rank by rank, so that the result does not depend on the buckets. In DDP's ring all-reduce,
    the order of addition depends on the buckets.
    """

    default_density: ClassVar[Optional[float]] = None
    wire_format: ClassVar[str] = "reduce"
    is_lossless: ClassVar[bool] = True

    @override
    def select(self, names: Sequence[str], accumulated: Sequence[Tensor], counts: Sequence[int]) -> list[Selection]:
        return [Selection(tensor, None, tensor.numel()) for tensor in accumulated]


class QSGD(Dense):
    """Send every element as one of 15 levels, scaled by a block's largest magnitude (``wire="4bit"``).

    Differences from the paper:

    * Elements are rounded to the nearest level, and the residual stores the error. The paper rounds at random and
      has no residual. With a residual no randomness is necessary, and the error is smaller.
    * A block of 64 elements is scaled by the largest magnitude, as in the paper's experiments. The paper's blocks are
      larger, and called buckets. The theorems use the Euclidean norm.
    * Codes have a fixed width, because ranks need the message size in advance. The paper uses Elias codes.
    * Each rank averages a share of the elements, and sends the means in 4 bits too. The received bytes do not grow
      with the number of ranks. In the paper every rank receives all gradients.

    With ``wire="2bit"`` an element is zero, or plus or minus the mean magnitude of the larger elements of the block.
    Other values of ``wire`` have no effect.
    """

    wire: ClassVar[Optional[str]] = "4bit"
