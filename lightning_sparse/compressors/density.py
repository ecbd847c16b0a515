"""Rules that set the density of each parameter during training. See :class:`AdaptiveDensity`."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from typing_extensions import override


class RuleContext(NamedTuple):
    """Inputs of density rules before a step, equal on all ranks.

    Attributes:
        step: number of completed optimizer steps.
        epoch: epoch, from 0.
        asked: density set by the user, by parameter name, without any warm-up.
        present: density of the previous step, by parameter name.
        ceiling: largest density that a rule can set.
    """

    step: int
    epoch: int
    asked: Mapping[str, float]
    present: Mapping[str, float]
    ceiling: float


class Measurement(NamedTuple):
    """Norms of a step by parameter name, as root mean squares over ranks, so equal on all ranks.

    Attributes:
        gradient_norms: norms of the local gradients, before the residual is added.
        residual_norms: norms of the residuals after the step.
        update_norms: norms of the local Adam updates, for parameters with Adam updates in the residual.
    """

    gradient_norms: Mapping[str, float]
    residual_norms: Mapping[str, float]
    update_norms: Mapping[str, float] = {}


class DensityRule(ABC):
    """Set minimum densities per parameter.

    Results must depend only on the arguments, because all ranks call the rule and must get equal densities.
    """

    @abstractmethod
    def minimum_densities(self, context: RuleContext) -> dict[str, float]:
        """Return minimum densities by parameter name. Parameters without an entry have the user's density."""

    def begin(self) -> None:
        """Reset all state at the start of a ``fit``."""
        return

    def observe(self, measurement: Measurement, context: RuleContext) -> None:
        """Process the norms of a completed step. ``context`` has the values from before the step."""
        return

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`."""
        return


_SLACK = 0.7  # the density falls if the error is below this fraction of the budget
_MAX_RAISE = 2.0  # largest factor by which one measurement raises a density
_MAX_LOWERING = 1.25  # largest factor by which one measurement lowers a density; small, as residuals grow slowly
_FALLING = 0.9  # an error below this fraction of the last error is falling, so the density is not raised further


class ErrorBudget(DensityRule):
    """Limit the compression error of every layer, ``norm(residual) / norm(gradient)``, to a budget.

    With Adam and AdamW, the residual holds updates. The error is then ``norm(residual) / norm(update of a step)``.

    Each measurement changes densities. If an error exceeds the budget and is not already falling, the layer's density
    is multiplied by ``error / budget``, at most by 2. If an error is below 0.7 of the budget, the density is divided by
    at most 1.25. An error settles in about ``1 / density`` steps. Zero or non-finite norms change nothing.

    Args:
        budget: largest error. ``CompressionMonitor`` logs the error, also without this rule: ``update_error`` with Adam
            and AdamW, ``residual_to_gradient`` with other optimizers.

    Raises:
        ValueError: if the budget is not positive.

    Example::

        >>> rule = ErrorBudget(budget=10.0)
        >>> context = RuleContext(step=0, epoch=0, asked={"weight": 0.01}, present={"weight": 0.01}, ceiling=1.0)
        >>> rule.observe(Measurement({"weight": 1.0}, {"weight": 15.0}), context)
        >>> rule.minimum_densities(context)
        {'weight': 0.015}
    """

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
            return max(own, context.present[name]) * min(error / self.budget, _MAX_RAISE)
        if error < _SLACK * self.budget:
            return own / (min(self.budget / error, _MAX_LOWERING) if error else _MAX_LOWERING)
        return own

    @override
    def minimum_densities(self, context: RuleContext) -> dict[str, float]:
        return {
            name: density for name, density in self._densities.items() if density > context.asked.get(name, math.inf)
        }

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"densities": dict(self._densities), "errors": dict(self._errors)}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._densities, self._errors = dict(state["densities"]), dict(state["errors"])
