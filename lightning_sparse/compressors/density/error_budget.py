"""As much as it takes to keep what waits small."""

import math
from typing import Any, ClassVar

from typing_extensions import override

from lightning_sparse.compressors.density.rule import Measurement, Rule, RuleContext

_SLACK = 0.7  # of the budget, below which less may be sent
_MOST_RAISED = 2.0  # times, after one measurement
_MOST_LOWERED = 1.25  # times: what waits grows back slowly, and is seen late
_FALLING = 0.9  # times what was measured before: a raise is still at work


class ErrorBudget(Rule):
    """Keep the compression error of every layer, ``norm(residual) / norm(gradient)``, within a budget.

    With Adam and AdamW updates wait, not gradients: the error is the norm of those waiting over that of one step's.

    A closed loop: after each measurement the density of a layer above the budget is raised, by as much as its error
    exceeds it but at most twice, unless the error is falling already; below 0.7 of the budget it is lowered, more
    slowly. An error settles in some ``1 / density`` steps. A layer with a zero or non-finite gradient stays as it is.

    Args:
        budget: largest ratio. ``CompressionMonitor`` shows what it is without a rule: as ``update_error`` with Adam and
            AdamW, as ``residual_to_gradient`` with others.

    Raises:
        ValueError: if the budget is not positive.

    Example::

        >>> rule = ErrorBudget(budget=10.0)
        >>> context = RuleContext(step=0, epoch=0, asked={"weight": 0.01}, present={"weight": 0.01}, ceiling=1.0)
        >>> rule.observe(Measurement({"weight": 1.0}, {"weight": 15.0}), context)
        >>> rule.minimum_densities(context)
        {'weight': 0.015}
    """

    measures: ClassVar[bool] = True

    def __init__(self, budget: float) -> None:
        if not 0 < budget < math.inf:
            raise ValueError(f"budget={budget} must be a positive ratio of norms, such as 10")
        self.budget = budget
        self.begin()

    @override
    def begin(self) -> None:
        self._densities: dict[str, float] = {}
        self._errors: dict[str, float] = {}

    @override
    def observe(self, measurement: Measurement, context: RuleContext) -> None:
        for name, gradient_norm in measurement.gradient_norms.items():
            residual_norm = measurement.residual_norms[name]
            added_norm = measurement.update_norms.get(name, gradient_norm)
            is_known = added_norm > 0 and math.isfinite(added_norm) and math.isfinite(residual_norm)
            if is_known and name in context.asked:
                error = residual_norm / added_norm
                density = self._adjusted(name, error, context)
                self._densities[name] = min(max(density, context.asked[name]), context.ceiling)
                self._errors[name] = error

    def _adjusted(self, name: str, error: float, context: RuleContext) -> float:
        own = self._densities.get(name, context.asked[name])
        if error > self.budget:
            if error < _FALLING * self._errors.get(name, 0.0):
                return own
            return max(own, context.present[name]) * min(error / self.budget, _MOST_RAISED)
        if error < _SLACK * self.budget:
            return own / (min(self.budget / error, _MOST_LOWERED) if error else _MOST_LOWERED)
        return own

    @override
    def minimum_densities(self, context: RuleContext) -> dict[str, float]:
        return {
            name: density for name, density in self._densities.items() if density > context.asked.get(name, math.inf)
        }

    @override
    def reason(self, name: str) -> str:
        error = self._errors.get(name, 0.0)
        place = "above" if error > self.budget else "within"
        end = ", so its density falls" if error < _SLACK * self.budget else ""
        return f"its error of {error:.3g} is {place} the budget of {self.budget:g}{end}"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"densities": dict(self._densities), "errors": dict(self._errors)}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._densities, self._errors = dict(state["densities"]), dict(state["errors"])
