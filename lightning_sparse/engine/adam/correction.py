"""The user's settings for the correction of Adam, and the length of Adam's dense warm-up."""

from dataclasses import dataclass
from typing import NamedTuple, Optional

from lightning_sparse.compressors.base import checked_count
from lightning_sparse.removed import refusing

MIN_DENSE_STEPS, MAX_DENSE_STEPS = 10, 100
_FALL = 5  # number of steps with falling density / number of dense warm-up steps


@refusing
@dataclass(frozen=True)
class AdamCorrection:
    """Divide gradients by the root of Adam's second moment before selection, so that updates are sent, not gradients.

    With sparse gradients, Adam receives one large value in place of a hundred small gradients, and estimates a wrong
    second moment. With the correction, dense mean gradients update the second moment, which is equal on all ranks. A
    rank divides each gradient by the root of the second moment plus a part of this rank's squared gradient. The added
    part limits outliers. Ranks send the largest of these updates, and the residual stores all other updates.

    A dense warm-up estimates the second moment. In each later step, ranks average the previous step's gradients of a
    few parameters in 16 bits, during backward, to update the second moments of these parameters. The first moment and
    the residual would together delay updates too much, so the first moment is moved into the residual.

    1-bit Adam and 0/1 Adam (arXiv 2102.02888, 2202.06009) also have a common second moment: constant after a warm-up,
    or updated at growing intervals. Both optimizers send signs of the first moment, and divide after the exchange.

    Args:
        warmup_steps: number of dense steps with an unchanged optimizer, from a parameter's first step on; at least 2.
            ``None`` for a hundredth of the training, at least 10 and at most 100; 100 if the length is unknown.
        density_decay_steps: number of steps after the warm-up in which the density falls geometrically to the target.
            ``None`` for five times the warm-up, and at most a tenth of a training of known length.
        second_moment_interval: minimum number of steps between two updates of a parameter's second moment. The interval
            grows to a tenth of the steps so far. With the default of 10 and at least 5 million parameters, the updates
            take a twentieth of DDP's bytes per step on average. Smaller models update more parameters in a step.

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
            if (given := getattr(self, name)) is not None:
                count = checked_count(name, given, "optimizer steps", least)
                object.__setattr__(self, name, count)  # numpy integers become int

    def warm_up(self, total_steps: Optional[int] = None) -> "WarmUp":
        """Return the warm-up for a training of ``total_steps`` steps. ``None`` is an unknown length.

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
    """Lengths of the warm-up: number of dense steps, and number of later steps with falling density."""

    warmup_steps: int
    density_decay_steps: int
