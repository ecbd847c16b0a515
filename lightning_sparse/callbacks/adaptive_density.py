"""The callback that sets the density of each parameter by rules, and the rules."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from typing_extensions import override

from lightning_sparse.callbacks.base import (
    StepObserver,
    engine_of,
    facts_over_ranks,
    log_scalars,
    parameter_tag,
    request_samples,
    step_of,
)
from lightning_sparse.compressors.base import checked_count, checked_density
from lightning_sparse.engine import Engine
from lightning_sparse.strategy.lightning import LightningModule, Trainer

_KEY = "lightning_sparse_rules"
_SLACK = 0.7  # the density falls if the error is below this fraction of the budget
_MAX_RAISE = 2.0  # largest factor by which one measurement raises a density
_MAX_LOWERING = 1.25  # largest factor by which one measurement lowers a density; small, as residuals grow slowly
_FALLING = 0.9  # an error below this fraction of the last error is falling, so the density is not raised further


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


class AdaptiveDensity(StepObserver):
    """Set the density of each parameter by rules.

    A parameter gets the largest of the rules' densities and the user's density. The strategy's warm-up and
    ``LAGS(adaptive_density=True)`` may raise this density. Checkpoints store the state of the rules. Every
    ``every_n_steps`` steps, all densities are logged as ``sparse_parameters/density/<parameter name>``.

    Args:
        rules: a list of :class:`~lightning_sparse.callbacks.ErrorBudget` or your own
            :class:`~lightning_sparse.callbacks.DensityRule`.
        max_density: largest density that a rule or ``LAGS(adaptive_density=True)`` sets.
        every_n_steps: optimizer steps between two measurements. A measurement reads all gradients and residuals.

    Raises:
        ValueError: without a rule, or for an argument out of range. At the start of ``fit``, for a compressor
            without densities per parameter, for ``schedule="auto"``, or for a second ``AdaptiveDensity``.
        TypeError: for an object that is not a rule.

    Example::

        >>> from lightning_sparse.callbacks import ErrorBudget
        >>> adaptive = AdaptiveDensity([ErrorBudget(budget=20.0)], max_density=0.25)
    """

    every_n_steps: int

    def __init__(self, rules: Sequence[DensityRule], max_density: float = 1.0, every_n_steps: int = 10) -> None:
        example = "rules=[ErrorBudget(budget=10.0)], of lightning_sparse.callbacks"
        if isinstance(rules, DensityRule) or not all(isinstance(rule, DensityRule) for rule in rules):
            raise TypeError(f"rules={rules!r} must be a list of rules, such as {example}")
        if not rules:
            raise ValueError(f"rules=[] sets no density: give a rule, such as {example}")
        self.rules = list(rules)
        self.max_density = checked_density("max_density", max_density)
        self.every_n_steps = checked_count("every_n_steps", every_n_steps, "steps")

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            for rule in self.rules:
                rule.begin()

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._finish_step(trainer)  # an earlier callback may save before this callback has processed the step
        checkpoint[_KEY] = [{"rule": type(rule).__name__, "state": rule.state_dict()} for rule in self.rules]

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get(_KEY, [])
        if [each["rule"] for each in saved] == [type(rule).__name__ for rule in self.rules]:
            for rule, each in zip(self.rules, saved):
                rule.load_state_dict(each["state"])

    @override
    def before_step(self, trainer: Trainer, engine: Engine) -> None:
        request_samples(engine)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if (engine := engine_of(trainer)) is not None:
            context, minima = self._context(trainer, engine), dict[str, float]()
            for rule in self.rules:
                for name, density in rule.minimum_densities(context).items():
                    minima[name] = max(minima.get(name, 0.0), density)
            engine.densities.ceiling, engine.densities.ruled = self.max_density, minima

    @override
    def after_step(self, trainer: Trainer, engine: Engine, step: int) -> None:
        context = self._context(trainer, engine)
        log_scalars(trainer, {parameter_tag("density", name): each for name, each in context.present.items()}, step)
        if (samples := engine.recorder.last_samples) is None:
            return  # plain DDP exchanged the step, without measurements
        facts = facts_over_ranks(engine, samples)
        gradients = {name: each.gradient_norm for name, each in facts.items()}
        residuals = {name: each.residual_norm for name, each in facts.items()}
        updates = {name: each.added_norm for name, each in facts.items() if name in samples.update_norms}
        measured = Measurement(gradients, residuals, updates)
        for rule in self.rules:
            rule.observe(measured, context)

    def _context(self, trainer: Trainer, engine: Engine) -> RuleContext:
        asked, present = engine.target_densities(), engine.present_densities()
        return RuleContext(step_of(trainer), trainer.current_epoch, asked, present, self.max_density)
