"""Rules that say how much is sent of each parameter, as training goes on; see :class:`AdaptiveDensity`."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from typing_extensions import override

from lightning_sparse.compressors.base import checked_count


class RuleContext(NamedTuple):
    """Facts that rules may use before a step; equal on all ranks.

    Attributes:
        step: optimizer steps made so far.
        epoch: from 0.
        asked: by parameter name, the density that the user asked for, without any warm-up.
        present: by parameter name, the density of the step before.
        ceiling: the most that a rule can get.
    """

    step: int
    epoch: int
    asked: Mapping[str, float]
    present: Mapping[str, float]
    ceiling: float


class Measurement(NamedTuple):
    """Norms of a step by parameter name, as root mean squares over ranks; so equal on all of them.

    Attributes:
        gradient_norms: of the ranks' own gradients, before anything was added to them.
        residual_norms: of what they keep after the step.
        update_norms: of the ranks' own updates, of those parameters of which Adam's updates are kept, not gradients.
    """

    gradient_norms: Mapping[str, float]
    residual_norms: Mapping[str, float]
    update_norms: Mapping[str, float] = {}


class DensityRule(ABC):
    """Wish for densities, one parameter at a time.

    What it answers must follow from what it was given and nothing else: all ranks ask alike and must get the same.

    Attributes:
        measures: whether :meth:`observe` wants to be called.
        follows_steps: whether :meth:`minimum_densities` may answer something else after every step.
    """

    measures: ClassVar[bool] = False
    follows_steps: ClassVar[bool] = False

    @abstractmethod
    def minimum_densities(self, context: RuleContext) -> dict[str, float]:
        """Return the least density wished for, by parameter name; without those that may stay as the user asked."""

    @abstractmethod
    def reason(self, name: str) -> str:
        """Say in a few words why the last wish for a parameter is what it is."""

    def begin(self) -> None:
        """Forget everything: a ``fit`` begins."""
        return

    def observe(self, measurement: Measurement, context: RuleContext) -> None:
        """Look at a step that has been made; ``context`` was before it."""
        return

    def state_dict(self) -> dict[str, Any]:
        """Return what has been learned, as plain numbers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        return


class Warmup(DensityRule):
    """Let the density fall to what the user asked for step by step, exponentially as in Deep Gradient Compression.

    At step ``k`` of a warm-up of ``n``, a density of ``d`` is ``d ** ((k + 1) / (n + 1))`` (arXiv 1712.01887, which
    counts epochs). By epochs the strategy warms up itself: ``SparseDDPStrategy(warmup_epochs=4)``.

    Args:
        length: steps of the optimizer until the density is that of the user.

    Raises:
        ValueError: for a ``length`` below 1.

    Example::

        >>> context = RuleContext(step=1, epoch=0, asked={"weight": 0.001}, present={}, ceiling=1.0)
        >>> round(Warmup(length=4).minimum_densities(context)["weight"], 3)
        0.063
    """

    follows_steps: ClassVar[bool] = True

    def __init__(self, length: int) -> None:
        self.length = checked_count("length", length, "steps")
        self._step = 0

    @override
    def minimum_densities(self, context: RuleContext) -> dict[str, float]:
        self._step = context.step
        if self._step >= self.length:
            return {}
        exponent = (self._step + 1) / (self.length + 1)
        # A library's last digit must not make two ranks send different numbers of elements.
        return {name: round(asked**exponent, 9) for name, asked in context.asked.items()}

    @override
    def reason(self, name: str) -> str:
        return f"step {self._step + 1} of {self.length}"


_SLACK = 0.7  # of the budget, below which less may be sent
_MAX_RAISE = 2.0  # times, after one measurement
_MAX_LOWERING = 1.25  # times: the residual grows back slowly, and is seen late
_FALLING = 0.9  # times what was measured before: a raise is still at work


class ErrorBudget(DensityRule):
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
