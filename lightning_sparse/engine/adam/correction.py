"""The user's settings of the correction of Adam, and the length of its warm-up."""

from dataclasses import dataclass
from typing import NamedTuple, Optional

from lightning_sparse.compressors.base import is_whole
from lightning_sparse.removed import refusing

MIN_DENSE_STEPS, MAX_DENSE_STEPS = 10, 100
_FALL = 5  # density decay steps per warm-up step


@refusing
@dataclass(frozen=True)
class AdamCorrection:
    """Divide gradients by the root of Adam's second moment before selection, so that updates are sent, not gradients.

    With sparse gradients, Adam sees one spike in place of a hundred small gradients, and its second moment becomes
    wrong. Here every rank divides its own gradient by the root of a second moment that is equal on all ranks. The
    largest updates are sent, and the others stay in the residual. The second moment is learned in a dense warm-up, and
    later from mean gradients in 16 bits. Parameters take turns, and send the gradients of the previous step during
    backward.

    The first moment is moved into the residual and stays zero. The residual averages gradients as momentum does, and
    both together would delay gradients further.

    1-bit and 0/1 Adam (arXiv 2102.02888, 2202.06009) also share a second moment learned at growing intervals. They use
    the first moment, send all of it as signs, and divide after the exchange.

    Args:
        warmup_steps: first steps of a parameter, at least 2, with dense gradients and the optimizer's own step.
            ``None`` for a hundredth of the training, at least 10 and at most 100; 100 if the length is unknown.
        density_decay_steps: steps after the warm-up over which the density falls geometrically to its target. ``None``
            for five times the warm-up, and at most a tenth of a training of known length.
        second_moment_interval: minimum number of steps between two mean gradients for a parameter's second moment. The
            interval grows to a tenth of the steps made. With 10 and 5 million parameters or more, a step sends at most
            a twentieth of DDP's bytes for them. Smaller models take fewer turns.

    Raises:
        ValueError: for a number out of range.

    Example::

        >>> AdamCorrection(warmup_steps=100, density_decay_steps=200).second_moment_interval
        10
    """

    warmup_steps: Optional[int] = None
    density_decay_steps: Optional[int] = None
    second_moment_interval: int = 10

    def __post_init__(self) -> None:
        for name, least in (("warmup_steps", 2), ("density_decay_steps", 0), ("second_moment_interval", 1)):
            given = getattr(self, name)
            if given is None:
                continue
            if not is_whole(given, least):
                raise ValueError(f"{name}={given!r} must be a whole number of optimizer steps, at least {least}")
            object.__setattr__(self, name, int(given))  # numpy integers become int

    def warm_up(self, total_steps: Optional[int] = None) -> "WarmUp":
        """Return the warm-up of a training of ``total_steps`` steps, or of unknown length with ``None``.

        Example::

            >>> AdamCorrection().warm_up(), AdamCorrection().warm_up(total_steps=400)
            (WarmUp(warmup_steps=100, density_decay_steps=500), WarmUp(warmup_steps=10, density_decay_steps=40))
        """
        hundredth = MAX_DENSE_STEPS if total_steps is None else total_steps // 100
        dense = self.warmup_steps or min(MAX_DENSE_STEPS, max(MIN_DENSE_STEPS, hundredth))
        fall = self.density_decay_steps
        if fall is None:
            fall = _FALL * dense if total_steps is None else min(_FALL * dense, total_steps // 10)
        return WarmUp(dense, fall)


class WarmUp(NamedTuple):
    """Number of dense steps, and of steps after them over which the density falls."""

    warmup_steps: int
    density_decay_steps: int
