"""More while the gradient changes fast.

Agarwal, Wang, Lee, Venkataraman and Papailiopoulos, "Accordion: Adaptive Gradient Communication via Critical Learning
Regime Identification", MLSys 2021 (arXiv 2010.16248).
"""

import math
from typing import Any, ClassVar, Optional

from typing_extensions import override

from lightning_sparse.compressors.base import checked_density
from lightning_sparse.compressors.density.rule import Measurement, Rule, RuleContext


class CriticalRegime(Rule):
    """Send more of a layer while its gradient's norm changes fast from one epoch to a later one, as Accordion does.

    A layer is critical if ``|before - now| / before >= threshold``, and until there are two norms to compare. Differs
    from the paper in this: the norm is the root mean square over ranks and measured steps, where the paper takes that
    of the sum of an epoch's gradients; and a fall of the learning rate is not critical by itself, because many
    schedules let it fall all the time.

    Args:
        density: of a layer in a critical regime.
        threshold: least relative change that is critical; 0.5 in the paper.
        every_n_epochs: epochs between the norms that are compared; the paper takes 10.

    Raises:
        ValueError: for an argument out of range.
    """

    measures: ClassVar[bool] = True

    def __init__(self, density: float = 0.1, threshold: float = 0.5, every_n_epochs: int = 1) -> None:
        if not threshold > 0:
            raise ValueError(f"threshold={threshold} must be a positive relative change; 0.5 is a change by half")
        if not isinstance(every_n_epochs, int) or isinstance(every_n_epochs, bool) or every_n_epochs < 1:
            raise ValueError(f"every_n_epochs={every_n_epochs!r} must be a whole number of epochs, at least 1")
        self.density = checked_density("density", density)
        self.threshold = threshold
        self.every_n_epochs = every_n_epochs
        self.begin()

    @override
    def begin(self) -> None:
        self._window: Optional[int] = None
        self._squares: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._norms: dict[str, float] = {}
        self._changes: dict[str, float] = {}

    @override
    def observe(self, measurement: Measurement, context: RuleContext) -> None:
        for name, norm in measurement.gradient_norms.items():
            if math.isfinite(norm):
                self._squares[name] = self._squares.get(name, 0.0) + norm**2
                self._counts[name] = self._counts.get(name, 0) + 1

    @override
    def minimum_densities(self, context: RuleContext) -> dict[str, float]:
        window = context.epoch // self.every_n_epochs
        if self._window is not None and window != self._window:
            self._compare()
        self._window = window
        # Nothing known of a change is critical, too.
        return {name: self.density for name in context.asked if self._changes.get(name, math.inf) >= self.threshold}

    def _compare(self) -> None:
        for name, square in self._squares.items():
            now, before = math.sqrt(square / self._counts[name]), self._norms.get(name)
            if before is not None:
                difference = abs(before - now)
                self._changes[name] = difference / before if before else (math.inf if difference else 0.0)
            self._norms[name] = now
        self._squares, self._counts = {}, {}

    @override
    def reason(self, name: str) -> str:
        if name not in self._changes:
            return "how fast its gradient changes is not known yet"
        return f"its gradient's norm changed by {100 * self._changes[name]:.0f} %"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "window": self._window,
            "squares": dict(self._squares),
            "counts": dict(self._counts),
            "norms": dict(self._norms),
            "changes": dict(self._changes),
        }

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._window = state["window"]
        self._squares, self._counts = dict(state["squares"]), dict(state["counts"])
        self._norms, self._changes = dict(state["norms"]), dict(state["changes"])
