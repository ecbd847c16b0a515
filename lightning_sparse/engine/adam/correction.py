"""What the user chooses of the correction of Adam, and how long it sends more than later."""

from dataclasses import dataclass
from typing import NamedTuple, Optional

from lightning_sparse.compressors.base import is_whole
from lightning_sparse.removed import refusing

MIN_DENSE_STEPS, MAX_DENSE_STEPS = 10, 100
_FALL = 5  # steps of the fall for each dense one


@refusing
@dataclass(frozen=True)
class AdamCorrection:
    """Divide by the root of Adam's second moment before selection: what is sent and kept are updates, not gradients.

    Adam that is fed with sparse gradients sees one spike where dense training sees a hundred small gradients, and its
    second moment learns the wrong thing. Here every rank divides its own gradient by the root of a second moment that
    is the same on all ranks; of these updates the largest are sent, and the rest is kept. The second moment is learned
    while everything is sent, in the first steps, and after that from mean gradients in 16 bits, of parameters in
    turns; they are those of the step before, so that they travel during backward.

    The first moment is dropped, and its contents move into the residual, which averages gradients as a momentum does:
    one on top of the other delays them further (measured: see ``examples/benchmarks/README.md``).

    1-bit and 0/1 Adam (arXiv 2102.02888, 2202.06009) share a second moment learned at growing intervals, too, but keep
    the first moment, send all of it as signs, and divide after the exchange. Here updates compete, not gradients.

    Args:
        warmup_steps: first steps of a parameter, at least 2. They send its whole gradient, and the optimizer steps as
            without compression. ``None`` for a hundredth of the training, at least 10 and at most 100; 100 if the
            training's length is unknown.
        density_decay_steps: steps after them over which the density falls, geometrically, to its target; ``None`` for
            five times the dense steps, and at most a tenth of a training of known length.
        second_moment_interval: least steps between two mean gradients that a parameter's second moment learns from;
            the interval grows to a tenth of the steps made. Parameters take turns, so that of a model of 5 million or
            more a step sends a tenth of half of what DDP sends, or less; smaller ones take fewer turns.

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
        """Check."""
        for name, least in (("warmup_steps", 2), ("density_decay_steps", 0), ("second_moment_interval", 1)):
            given = getattr(self, name)
            if given is None:
                continue
            if not is_whole(given, least):
                raise ValueError(f"{name}={given!r} must be a whole number of optimizer steps, at least {least}")
            object.__setattr__(self, name, int(given))  # of numpy's, too

    def warm_up(self, total_steps: Optional[int] = None) -> "WarmUp":
        """Return the warm-up of a training of so many steps; ``None`` if their number is unknown.

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
    """Steps in which everything is sent, and steps after them over which the density falls, of a corrected Adam."""

    warmup_steps: int
    density_decay_steps: int
