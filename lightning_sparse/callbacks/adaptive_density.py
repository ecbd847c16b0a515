"""The callback that sets the density of each parameter by rules."""

from collections.abc import Sequence
from typing import Any

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
from lightning_sparse.compressors.density import DensityRule, Measurement, RuleContext
from lightning_sparse.engine import Engine
from lightning_sparse.strategy.lightning import LightningModule, Trainer

_KEY = "lightning_sparse_rules"


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
        ValueError: for an argument out of range. At the start of ``fit``, for a compressor
            without densities per parameter, for ``schedule="auto"``, or for a second ``AdaptiveDensity``.
        TypeError: without a rule, or for an object that is not a rule.

    Example::

        >>> from lightning_sparse.callbacks import ErrorBudget
        >>> adaptive = AdaptiveDensity([ErrorBudget(budget=20.0)], max_density=0.25)
    """

    every_n_steps: int

    def __init__(self, rules: Sequence[DensityRule], max_density: float = 1.0, every_n_steps: int = 10) -> None:
        example = "rules=[ErrorBudget(budget=10.0)], of lightning_sparse.callbacks"
        if not isinstance(rules, Sequence) or not rules or not all(isinstance(rule, DensityRule) for rule in rules):
            raise TypeError(f"rules={rules!r} must be a list of at least one rule, such as {example}")
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
        densities = engine.densities
        asked, present = ({name: of(name) for name in engine.numels} for of in (densities.target, densities.of))
        return RuleContext(step_of(trainer), trainer.current_epoch, asked, present, self.max_density)
