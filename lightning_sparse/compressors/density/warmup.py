"""Much in the beginning, when gradients change too fast to wait."""

from collections.abc import Sequence
from typing import Optional

from typing_extensions import override

from lightning_sparse.compressors.density.rule import Moment, Rule
from lightning_sparse.registry import one_of

UNITS = ("epoch", "step")


class Warmup(Rule):
    """Let the density fall to what the user asked for, exponentially as in Deep Gradient Compression, or by a list.

    At place ``k`` of a warm-up of ``n`` epochs, or steps, a density of ``d`` is ``d ** ((k + 1) / (n + 1))``: with
    0.001 and four epochs the published 0.25, 0.063, 0.016, 0.004 (arXiv 1712.01887).

    Args:
        length: epochs, or steps, until the density is that of the user.
        unit: ``"epoch"`` or ``"step"`` (of the optimizer).
        densities: to pass through instead, each for an equal share of ``length``.

    Raises:
        ValueError: for a ``length`` below 1, an unknown ``unit``, or densities out of range or too many.

    Example::

        >>> moment = Moment(step=0, epoch=1, asked={"weight": 0.001}, present={}, ceiling=1.0)
        >>> round(Warmup(length=4).wishes(moment)["weight"], 3)
        0.063
    """

    def __init__(self, length: int = 4, unit: str = "epoch", densities: Optional[Sequence[float]] = None) -> None:
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise ValueError(
                f"length={length!r} must be a whole number of {unit}s, at least 1; without one, leave it out"
            )
        self.length = length
        self.unit = one_of("unit", unit, UNITS)
        self.follows_steps = unit == "step"
        self.densities = None if densities is None else _checked(list(densities), length, unit)
        self._place = 0

    @override
    def wishes(self, moment: Moment) -> dict[str, float]:
        self._place = moment.step if self.follows_steps else moment.epoch
        if self._place >= self.length:
            return {}
        if self.densities is not None:
            return dict.fromkeys(moment.asked, self.densities[self._place * len(self.densities) // self.length])
        exponent = (self._place + 1) / (self.length + 1)
        # A library's last digit must not make two ranks send different numbers of elements.
        return {name: round(asked**exponent, 9) for name, asked in moment.asked.items()}

    @override
    def reason(self, name: str) -> str:
        return f"{self.unit} {self._place + 1} of {self.length}"


def _checked(densities: list[float], length: int, unit: str) -> list[float]:
    if not densities or not all(0 < density <= 1 for density in densities):
        raise ValueError(f"densities={densities} must be fractions with 0 < density <= 1, such as [0.25, 0.06, 0.01]")
    if len(densities) > length:
        raise ValueError(
            f"densities={densities} has more entries than the warm-up has {unit}s: raise length={length} to at least"
            f" {len(densities)}, or leave some out"
        )
    return densities
