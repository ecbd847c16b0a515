"""Settings of error feedback that a compressor asks of the memory, so that the two need not know each other."""

import math
from dataclasses import dataclass
from typing import NamedTuple, Optional, Union

from torch import Tensor

from lightning_sparse.functional import AdamScalars

FROM_OPTIMIZER = "optimizer"


class ErrorFeedback(NamedTuple):
    """Settings of error feedback: how what is not sent is kept.

    Attributes:
        keeps_residual: whether what was not sent is kept for the next step. Only an unbiased or an exact method can
            afford to drop it.
        momentum: accumulated here, before selection, instead of in the optimizer after it (momentum correction of Deep
            Gradient Compression): a number, ``"optimizer"`` to take over the SGD optimizer's, ``None`` for none.
        nesterov: whether that momentum is Nesterov's; follows the optimizer where ``momentum`` does.
        masks_momentum: whether the momentum of an element that was sent starts again from zero (momentum factor
            masking).
        clip_norm: largest norm of the mean gradient; every rank clips its own gradient, before it is accumulated, to
            this divided by the square root of the number of ranks. ``None`` not to clip.
        follows_learning_rate: whether the residual is in units of the update, learning rate times gradient, so that a
            change of the learning rate does not change what was gathered under the old one.
        adam: how Adam's updates are made before selection, in place of momentum; ``None`` where they are not. Then
            ``clip_norm`` is that of the mean gradient, as measured, and not divided by anything.
        clip_value: largest magnitude of an element of this rank's gradient; only where ``adam`` is given.
        decay: factor of the residual before a gradient is added. Only where a residual is all that is kept.
    """

    keeps_residual: bool = True
    momentum: Union[float, str, None] = None
    nesterov: bool = False
    masks_momentum: bool = True
    clip_norm: Optional[float] = None
    follows_learning_rate: bool = False
    adam: Optional["AdamCorrection"] = None
    clip_value: Optional[float] = None
    decay: float = 1.0

    @property
    def has_moments(self) -> bool:
        """Whether momentum is accumulated, or Adam's updates are made, before selection: of gradients alone."""
        return self.momentum is not None or self.adam is not None

    def checked(self) -> "ErrorFeedback":
        """Pass through if in range.

        Raises:
            ValueError: for a momentum outside ``[0, 1)`` or an unknown word for it, or a ``clip_norm`` that is not
                positive.
        """
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


class Hyperparameters(NamedTuple):
    """The optimizer's settings for a parameter in this step.

    Attributes:
        momentum: that the memory has taken over from the parameter group.
        nesterov: whether that is Nesterov's.
        adam: Adam's state of it, where the memory makes Adam's updates before selection; else ``None``.
        continues_step: whether its gradient was exchanged before in this step: a backward is one of several.
    """

    learning_rate: float
    momentum: float = 0.0
    nesterov: bool = False
    adam: Optional["AdamMoments"] = None
    continues_step: bool = False


class AdamMoments(NamedTuple):
    """Adam's state of a parameter: the optimizer's own tensors, laid out as its gradient is.

    Attributes:
        step: number of the coming step, from 1.
        decay: weight decay that is added to the gradient, negative where the objective is maximized; 0 where it is
            decoupled.
        first: first moment, flat; zero while updates are made before selection.
        second: second moment, flat; of the mean gradient, the same on all ranks.
        largest: the largest second moment so far, with ``amsgrad``; else ``None``.
        parameter: flat.
        maximizes: whether the objective is maximized, and the first moment that of the negative gradient.
    """

    step: int
    beta1: float
    beta2: float
    eps: float
    decay: float
    first: Tensor
    second: Tensor
    largest: Optional[Tensor]
    parameter: Tensor
    maximizes: bool = False

    @property
    def preconditioner(self) -> Tensor:
        """The second moment that the gradient is divided by the root of."""
        return self.second if self.largest is None else self.largest

    def scalars(self, second_step: int) -> AdamScalars:
        """Return the numbers of the coming step, where the second moment is that of an earlier one."""
        return AdamScalars(self.beta2, 1 - self.beta2**second_step, self.eps)


@dataclass(frozen=True)
class AdamCorrection:
    """Divide by the root of Adam's second moment before selection: what is sent and kept are updates, not gradients.

    Adam that is fed with sparse gradients sees one spike where dense training sees a hundred small gradients, and its
    second moment learns the wrong thing. Here every rank divides its own gradient by the root of a second moment that
    is the same on all ranks; of these updates the largest are sent, and the rest is kept. The second moment is learned
    while everything is sent, in the first steps, and after that from a mean gradient that is exchanged now and then, as
    16-bit values.

    The first moment is dropped, and its contents move into the residual, which averages gradients as a momentum does:
    one on top of the other delays them further (measured: see ``examples/benchmarks/README.md``).

    A second moment that is shared, and learned at growing intervals, is 1-bit and 0/1 Adam's (arXiv 2102.02888,
    2202.06009), which keep the first moment, send all of it as signs, and divide after the exchange. Here selection
    comes after the division, so that updates compete and not gradients.

    Args:
        dense_steps: first steps of a parameter in which its whole gradient is sent and the optimizer acts as ever, at
            least 2; ``None`` for as many as the second moment takes to be known: from 10 to 100, and no more than a
            hundredth of a training whose length is known, if that is more than 10. It is known when its mean over a
            parameter's elements has changed by less than a factor of 1.65 since half as many steps, on average over
            elements.
        fall_steps: steps after them over which the density falls, geometrically, to its target; ``None`` for ten times
            as many as the dense steps, and no more than a tenth of a training whose length is known.
        refresh_steps: steps between two mean gradients that the second moment learns from, at least; the interval grows
            to a tenth of the steps made. Each of them takes half of what DDP sends in a step.

    Raises:
        ValueError: for a number out of range.

    Example::

        >>> AdamCorrection(dense_steps=100, fall_steps=200).refresh_steps
        10
    """

    dense_steps: Optional[int] = None
    fall_steps: Optional[int] = None
    refresh_steps: int = 10

    def __post_init__(self) -> None:
        """Check."""
        for name, least in (("dense_steps", 2), ("fall_steps", 0), ("refresh_steps", 1)):
            given = getattr(self, name)
            if given is not None and (not isinstance(given, int) or given < least):
                raise ValueError(f"{name}={given!r} must be a whole number of optimizer steps, at least {least}")

    def most_dense_steps(self, total_steps: Optional[int]) -> int:
        """Return how many steps are dense at most, of the whole training's (``None`` where they are not known)."""
        if self.dense_steps is not None:
            return self.dense_steps
        known = MOST_DENSE_STEPS if total_steps is None else total_steps // 100
        return max(LEAST_DENSE_STEPS, min(MOST_DENSE_STEPS, known))

    def warm_up(self, dense_steps: int, total_steps: Optional[int] = None) -> "WarmUp":
        """Return the warm-up of a training with so many dense steps.

        Example::

            >>> AdamCorrection().warm_up(10), AdamCorrection().warm_up(10, total_steps=500)
            (WarmUp(dense_steps=10, fall_steps=100), WarmUp(dense_steps=10, fall_steps=50))
        """
        if self.fall_steps is not None:
            return WarmUp(dense_steps, self.fall_steps)
        fall = _FALL * dense_steps
        return WarmUp(dense_steps, fall if total_steps is None else min(fall, total_steps // 10))


class WarmUp(NamedTuple):
    """Steps in which everything is sent, and steps after them over which the density falls, of a corrected Adam."""

    dense_steps: int
    fall_steps: int

    def settled(self, steps: int) -> float:
        """Return how much of the fall lies behind after so many steps, from 0 to 1.

        Example::

            >>> [WarmUp(10, 100).settled(steps) for steps in (0, 10, 60, 200)]
            [0.0, 0.0, 0.5, 1.0]
        """
        fallen = max(0, steps - self.dense_steps)
        is_over = steps >= self.dense_steps and fallen >= self.fall_steps
        return 1.0 if is_over else fallen / max(1, self.fall_steps)


def falling_density(target: float, settled: float) -> float:
    """Return the density where so much of the fall lies behind: from 1, geometrically, in stairs, to its target.

    Example::

        >>> [round(falling_density(0.01, settled), 3) for settled in (0.0, 0.5, 0.99, 1.0)]
        [1.0, 0.112, 0.012, 0.01]
    """
    if settled >= 1 or target >= 1:
        return target
    stairs = max(1, math.ceil(math.log(1 / target) / math.log(_STAIR)))
    return same_everywhere(target ** (int(settled * stairs) / stairs))


def same_everywhere(power: float) -> float:
    """Round off the last digits of a power, which machines with other libraries compute otherwise.

    Of a density they could make two ranks send different numbers of elements.
    """
    return float(f"{power:.12g}")


LEAST_DENSE_STEPS, MOST_DENSE_STEPS = 10, 100
_FALL = 10  # steps of the fall for each dense one
_STAIR = 1.25  # a density that falls a little in every step would be planned for in every step
