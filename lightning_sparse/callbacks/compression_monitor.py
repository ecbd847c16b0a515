"""Statistics of compression over all ranks, in loggers and in the progress bar."""

import math
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_sparse.callbacks.base import (
    StepObserver,
    facts_over_ranks,
    log_scalars,
    over_ranks,
    parameter_tag,
    request_samples,
)
from lightning_sparse.callbacks.tensorboard import log_layout
from lightning_sparse.engine import Engine
from lightning_sparse.engine.observe import ParameterSamples, StepRecord, compressed, mean_of, mean_stats
from lightning_sparse.strategy.lightning import LightningModule, Trainer


class CompressionMonitor(StepObserver):
    """Log statistics of compression as scalars ``sparse/<name>``, at the Trainer's ``log_every_n_steps``.

    The page on monitoring lists the scalars. Most scalars are means over ranks and over the steps since the last log.
    With local steps, rank 0's values are logged. In a step with a log, the monitor reads gradients and residuals, runs
    a small all-gather, and waits for the GPU. With another strategy, such as ``"ddp"``, the monitor only warns.

    Args:
        progress_bar: also show the total compression ratio and the exposed milliseconds in the progress bar.
        by_parameter: also log scalars ``sparse_parameters/<name>/<parameter name>`` of the logged step.

    Raises:
        ValueError: at the start of ``fit``, if the Trainer has two monitors.
        TypeError: at the start, with ``by_parameter`` for a sharded model.

    Example::

        >>> monitor = CompressionMonitor(progress_bar=True)
    """

    def __init__(self, progress_bar: bool = False, by_parameter: bool = False) -> None:
        self.progress_bar = progress_bar
        self.by_parameter = by_parameter
        self.works_on_shards = not by_parameter  # statistics of a parameter need the whole parameter
        self._began = 0.0

    @override
    def _refuse(self, message: str) -> None:
        rank_zero_warn(f"nothing is logged: {message}")  # no error, because a run with "ddp" may use the same callbacks

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._has_layout = False  # whether the charts are defined
        self._totals: dict[str, float] = {}  # the engine's totals at the last logged step
        self._began = perf_counter()

    @override
    def before_step(self, trainer: Trainer, engine: Engine) -> None:
        request_samples(engine)

    @override
    def on_validation_start(self, *given: Any) -> None:
        self._paused = perf_counter()

    @override
    def on_validation_end(self, *given: Any) -> None:
        self._began += perf_counter() - self._paused

    @override
    def after_step(self, trainer: Trainer, engine: Engine, step: int) -> None:
        records = [each for each in engine.recorder.records if not each.is_logged]
        samples = engine.recorder.last_samples
        if not records or (samples is None and not records[-1].is_dense):
            return  # no samples exist while a round of local steps continues, or after the engine was rebuilt
        stats = over_ranks(engine, self._statistics(engine, records))
        stats = {name: value for name, value in stats.items() if not math.isnan(value)}
        scalars = {f"sparse/{name}": value for name, value in stats.items()}
        if self.by_parameter and samples is not None:
            scalars |= _of_parameters(engine, samples)
        log_scalars(trainer, scalars, step)
        if samples is not None and not self._has_layout:
            self._has_layout = True
            log_layout(trainer, stats)
        if self.progress_bar:
            shown = {"compression": stats["total_compression_ratio"]}
            if "exposed_seconds" in stats:
                shown["exposed_ms"] = 1e3 * stats["exposed_seconds"]
            trainer.lightning_module.log_dict(shown, prog_bar=True, logger=False)

    def _statistics(self, engine: Engine, records: Sequence[StepRecord]) -> dict[str, float]:
        stats, before, samples = engine.compression_stats(), self._totals, engine.recorder.last_samples
        self._totals, seconds = stats, perf_counter() - self._began
        steps = stats["total_steps"] - before.get("total_steps", 0.0)
        stats = {**stats, **mean_stats(records, engine.recorder.has_levels)}
        for kind in {"wire_bytes", "dense_bytes", "inter_node_bytes"} & stats.keys():
            stats[kind] = (stats[f"total_{kind}"] - before.get(f"total_{kind}", 0.0)) / steps
        stats["log10_density"] = math.log10(stats["density"]) if stats["density"] > 0 else math.nan
        ours = compressed(records)
        if engine.rounds is None:  # with local steps, backward is not timed
            stats["backward_seconds"] = mean_of(ours, lambda each: each.seconds("backward"))
        stats["commit_seconds"] = mean_of(ours, lambda each: each.seconds("commit"))
        stats["step_seconds"] = seconds / steps
        self._began += seconds
        for record in records:
            record.is_logged = True
        if samples is None:
            return stats
        # With the Adam correction, residuals hold updates, so the norm of an update replaces the norm of a gradient.
        facts, name = samples.facts(), "residual_to_gradient"
        if samples.update_norms:
            facts, name = {each: facts[each] for each in samples.update_norms}, "update_error"
        moving = [fact[3:] for fact in facts.values() if fact.added_norm > 0]  # frozen parameters add nothing
        residual, added = (math.hypot(*column) for column in zip(*[(0, 0), *moving]))
        return {**stats, name: _ratio(residual, added)}


def _of_parameters(engine: Engine, samples: ParameterSamples) -> dict[str, float]:
    found = dict[str, float]()
    for name, each in facts_over_ranks(engine, samples).items():
        error = "update_error" if name in samples.update_norms else "residual_to_gradient"
        found[parameter_tag("density", name)] = each.sent / each.numel
        found[parameter_tag("gradient_norm", name)] = each.gradient_norm
        found[parameter_tag("residual_norm", name)] = each.residual_norm
        found[parameter_tag(error, name)] = _ratio(each.residual_norm, each.added_norm)
    return found


def _ratio(norm: float, other: float) -> float:
    return norm / other if other > 0 else math.nan
