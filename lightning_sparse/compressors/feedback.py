"""Settings of error feedback that a compressor asks of the memory, so that the two need not know each other."""

from typing import NamedTuple, Optional, Union

FROM_OPTIMIZER = "optimizer"


class ErrorFeedback(NamedTuple):
    """Settings of error feedback: how what is not sent is kept.

    Attributes:
        keeps_residual: whether what was not sent is kept; only an unbiased or an exact method can afford to drop it.
        momentum: accumulated before selection, instead of in the optimizer after it (momentum correction of Deep
            Gradient Compression): a number, ``"optimizer"`` to take over the SGD optimizer's, ``None`` for none.
        nesterov: whether that momentum is Nesterov's; follows the optimizer where ``momentum`` does.
        masks_momentum: whether a sent element's momentum starts again from zero (momentum factor masking).
        clip_norm: largest norm of the mean gradient; every rank clips its own, before it is accumulated, to this over
            the square root of the number of ranks. ``None`` not to clip.
        follows_learning_rate: whether the residual is in units of the update, learning rate times gradient, so that
            another rate does not change what was gathered under the old one.
        decay: factor of the residual before a gradient is added. Only where a residual is all that is kept.
    """

    keeps_residual: bool = True
    momentum: Union[float, str, None] = None
    nesterov: bool = False
    masks_momentum: bool = True
    clip_norm: Optional[float] = None
    follows_learning_rate: bool = False
    decay: float = 1.0

    def checked(self) -> "ErrorFeedback":
        """Pass through; raise ``ValueError`` for a momentum outside ``[0, 1)`` or a ``clip_norm`` not above 0."""
        is_number = isinstance(self.momentum, (int, float)) and 0 <= self.momentum < 1
        if not is_number and self.momentum not in (None, FROM_OPTIMIZER):
            raise ValueError(
                f"momentum={self.momentum!r} must be 'optimizer' (taken over from the SGD optimizer), a number with"
                " 0 <= momentum < 1, or None (left to the optimizer)"
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm={self.clip_norm} must be a positive norm, or None not to clip")
        return self


class Clipping(NamedTuple):
    """Largest norm of the mean gradient and largest magnitude of an element; ``None`` where they are not clipped."""

    norm: Optional[float] = None
    value: Optional[float] = None


NOT_CLIPPED = Clipping()


def same_everywhere(power: float) -> float:
    """Round off a power's last digits, which differ by library: two ranks would send different numbers of elements."""
    return float(f"{power:.12g}")
