"""The callback that lets rules set the density of each parameter as training goes on."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from typing_extensions import override

from lightning_sparse.callbacks.base import (
    StepObserver,
    engine_of,
    log_line,
    log_scalars,
    mean_over_ranks,
    parameter_tag,
    shares_of,
    sparse_strategy,
    step_of,
)
from lightning_sparse.callbacks.compression_monitor import CompressionMonitor
from lightning_sparse.callbacks.tensorboard import log_text, table
from lightning_sparse.compressors.base import checked_count, checked_density
from lightning_sparse.compressors.density import Measurement, Rule, RuleContext
from lightning_sparse.engine import Engine
from lightning_sparse.strategy.lightning import LightningModule, Trainer
from lightning_sparse.strategy.trainer import SparseDDPStrategy

_KEY = "lightning_sparse_rules"
_CHANGE = 1.25  # times: a density that falls a little in every step is not worth a line in every step
_NEWS = 2.0  # times: a rule that steers a density changes it a little after every measurement


class AdaptiveDensity(StepObserver):
    """Let rules decide how much is sent of each parameter.

    A parameter gets the largest density that a rule asks for, within ``max_density``, and never less than the user
    asked for; the strategy's own warm-up and plan can give it more. Rules decide between two steps of the optimizer,
    alike on all ranks: measurements are averaged over ranks first. Checkpoints hold what rules have learned.

    When a density has changed by a quarter, all loggers get ``sparse_parameters/density/<parameter name>`` (unless a
    :class:`CompressionMonitor` logs it). When another rule decides, or has doubled or halved a density, rank 0 says
    which and why, and TensorBoard gets a table; a warm-up is told when it begins and ends.

    Args:
        rules: such as :class:`~lightning_sparse.callbacks.Warmup`, :class:`~lightning_sparse.callbacks.ErrorBudget`.
        max_density: the most that a rule gets of a parameter, or a plan that sends more where that costs no time.
        every_n_steps: optimizer steps between two measurements. One costs a pass over gradients and residuals, a small
            all-gather, and on a GPU a wait for the step.

    Raises:
        ValueError: without a rule, or for an argument out of range; at the start of ``fit``, if the compressor sends no
            density of each parameter, the schedule decides itself (``"auto"``), or another callback sets densities.
        TypeError: for something else than a rule; at the start, without a :class:`~lightning_sparse.SparseDDPStrategy`.

    Example::

        >>> from lightning_sparse.callbacks import ErrorBudget, Warmup
        >>> adaptive = AdaptiveDensity([Warmup(100), ErrorBudget(budget=20.0)], max_density=0.25)
    """

    def __init__(self, rules: Sequence[Rule], max_density: float = 1.0, every_n_steps: int = 10) -> None:
        self.rules = _checked_rules(rules)
        self.max_density = checked_density("max_density", max_density)
        self.every_n_steps = checked_count("every_n_steps", every_n_steps, "steps")
        self._forget()

    def _forget(self) -> None:
        self._asked: dict[str, float] = {}
        self._decided_at: Optional[tuple[int, int]] = None
        self._has_measured = False
        self._logged: dict[str, float] = {}
        self._told: dict[str, float] = {}
        self._told_of: set[str] = set()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        alike = [type(each).__name__ for each in trainer.callbacks if isinstance(each, AdaptiveDensity)]  # type: ignore[attr-defined]
        if len(alike) > 1:
            raise ValueError(f"{' and '.join(alike)} would both set densities: give one AdaptiveDensity all the rules")
        if stage == "fit":
            self._forget()
            for rule in self.rules:
                rule.begin()

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._look(trainer, pl_module)  # a callback ahead of this one may save before its turn comes
        checkpoint[_KEY] = [{"rule": type(rule).__name__, "state": rule.state_dict()} for rule in self.rules]

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get(_KEY, [])
        if [each["rule"] for each in saved] == [type(rule).__name__ for rule in self.rules]:
            for rule, each in zip(self.rules, saved):
                rule.load_state_dict(each["state"])
        elif saved:
            names = ", ".join(each["rule"] for each in saved)
            log_line(self, f"the checkpoint was written with the rules {names}; these ones start with nothing learned.")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        engine = sparse_strategy(trainer).engine
        self._asked = {} if engine is None else engine.target_densities()

    @override
    def looks_at(self, trainer: Trainer, step: int) -> bool:
        return any(rule.measures for rule in self.rules) and super().looks_at(trainer, step)

    @override
    def before_step(self, trainer: Trainer, engine: Engine) -> None:
        engine.recorder.ask_for_samples(counts=False)
        engine.memory.is_watched = engine.memory.is_watched or engine.memory.corrects_adam

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        step, epoch = step_of(trainer), trainer.current_epoch
        if not self._asked or (step, epoch) == self._decided_at:
            return
        is_other_epoch = self._decided_at is None or self._decided_at[1] != epoch
        # What is frozen now may be unfrozen again, and rules have not forgotten it.
        self._asked = {**self._asked, **engine_of(sparse_strategy(trainer)).target_densities()}
        context = self._context(trainer)
        if is_other_epoch or self._has_measured or any(rule.follows_steps for rule in self.rules):
            self._decide(trainer, context)
        elif step % self.every_n_steps == 0:  # a plan may have changed
            self._report(trainer, {}, context.present, step)
        self._decided_at, self._has_measured = (step, epoch), False

    @override
    def after_step(self, trainer: Trainer, pl_module: LightningModule, strategy: SparseDDPStrategy, step: int) -> None:
        engine = engine_of(strategy)
        samples, engine.memory.is_watched = engine.recorder.last_samples, False
        if samples is None:
            return  # the step was left to plain DDP: nothing waits
        facts = samples.facts()
        names = [name for name in self._asked if name in facts]
        norms = [(each.gradient_norm, each.residual_norm, each.added_norm) for each in map(facts.__getitem__, names)]
        shares = shares_of(strategy)
        squares = mean_over_ranks(strategy, [shares * norm**2 for each in norms for norm in each])
        gradients, residuals, added = (dict(zip(names, map(math.sqrt, squares[kind::3]))) for kind in range(3))
        updates = {name: norm for name, norm in added.items() if name in samples.update_norms}
        measurement = Measurement(gradients, residuals, updates)
        for rule in self.rules:
            if rule.measures:
                rule.observe(measurement, self._context(trainer))
        self._has_measured = True

    def _context(self, trainer: Trainer) -> RuleContext:
        present = engine_of(sparse_strategy(trainer)).present_densities()
        return RuleContext(step_of(trainer), trainer.current_epoch, self._asked, present, self.max_density)

    def _decide(self, trainer: Trainer, context: RuleContext) -> None:
        """Take the largest minimum for each parameter."""
        minima: dict[str, float] = {}
        winners: dict[str, Rule] = {}
        for rule in self.rules:
            for name, density in rule.minimum_densities(context).items():
                bounded = min(density, self.max_density)
                if bounded > max(minima.get(name, 0.0), self._asked[name]):
                    minima[name], winners[name] = bounded, rule
        densities = engine_of(sparse_strategy(trainer)).densities
        densities.ceiling = self.max_density
        densities.ruled = minima
        present = engine_of(sparse_strategy(trainer)).present_densities()
        # Of a warm-up of the strategy, or of its plan, more may be sent.
        deciding = {name: winners[name] for name in present if minima.get(name, 0.0) >= present[name]}
        self._report(trainer, deciding, present, context.step)

    def _report(self, trainer: Trainer, winners: Mapping[str, Rule], present: Mapping[str, float], step: int) -> None:
        logged = {**self._asked, **self._logged}
        if not any(_is_other(logged[name], density) for name, density in present.items()):
            return
        self._logged = dict(present)
        if not any(isinstance(each, CompressionMonitor) and each.by_parameter for each in trainer.callbacks):  # type: ignore[attr-defined]
            log_scalars(trainer, {parameter_tag("density", name): value for name, value in present.items()}, step)
        reasons = {name: self._reason(name, density, winners) for name, density in present.items()}
        raised = [name for name, density in present.items() if _is_other(self._asked[name], density)]
        deciders = {_decider(reasons[name]) for name in raised}
        told = {**self._asked, **self._told}
        steered = [name for name, rule in winners.items() if not rule.follows_steps]
        if deciders == self._told_of and all(_NEWS > present[name] / told[name] > 1 / _NEWS for name in steered):
            return
        self._told, self._told_of = dict(present), deciders
        log_line(self, f"step {step}: {_summary(present, reasons)}")
        rows = [[name, f"{density:.4g}", reasons[name]] for name, density in present.items()]
        log_text(trainer, "sparse/densities", table(["parameter", "density", "why"], rows), step)

    def _reason(self, name: str, density: float, winners: Mapping[str, Rule]) -> str:
        if name in winners:
            return f"{type(winners[name]).__name__}: {winners[name].reason(name)}"
        return "as asked for" if density <= self._asked[name] else "the strategy's warm-up or plan"


def _checked_rules(rules: Sequence[Rule]) -> list[Rule]:
    example = "rules=[Warmup(100), ErrorBudget(budget=10.0)], of lightning_sparse.callbacks"
    if isinstance(rules, Rule) or not all(isinstance(rule, Rule) for rule in rules):
        raise TypeError(f"rules={rules!r} must be a list of rules, such as {example}")
    if not rules:
        raise ValueError(f"rules=[] leaves nothing to decide: give at least one, such as {example}")
    return list(rules)


def _summary(densities: Mapping[str, float], reasons: Mapping[str, str]) -> str:
    """Say in one line how many parameters have which densities because of whom."""
    by_rule: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_rule.setdefault(_decider(reason), []).append(name)
    parts = []
    for rule, names in by_rule.items():
        most = max(names, key=densities.__getitem__)
        lowest, highest = min(densities[name] for name in names), densities[most]
        extent = f"{highest:.2g}" if lowest == highest else f"{lowest:.2g} to {highest:.2g}"
        is_one = len({reasons[name] for name in names}) == 1
        why = reasons[most] if is_one else f"{rule}, {most}: {reasons[most].partition(': ')[2]}"
        parts.append(f"{len(names)} parameter{'s' if len(names) > 1 else ''} at {extent} ({why})")
    return "; ".join(parts)


def _is_other(before: float, after: float) -> bool:
    return not 1 / _CHANGE < after / before < _CHANGE


def _decider(reason: str) -> str:
    return reason.partition(":")[0]
