"""Show in the logger, and in the progress bar, what compression does: statistics that are made one for all ranks."""

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_sparse.callbacks.base import (
    StepObserver,
    engine_of,
    engine_or_none,
    is_logged,
    log_scalars,
    mean_over_ranks,
    memory_statistics,
    parameter_tag,
    reduce_over_ranks,
    shares_of,
)
from lightning_sparse.callbacks.tensorboard import log_layout, log_log_density, log_text, plan_page
from lightning_sparse.engine import Engine
from lightning_sparse.engine.observe import (
    ParameterSamples,
    Step,
    compressed,
    compression_ratio,
    mean_of,
    mean_stats,
)
from lightning_sparse.strategy.lightning import LightningModule, Trainer
from lightning_sparse.strategy.trainer import SparseDDPStrategy

_STAGES = ("select", "exchange", "exposed", "backward", "commit")
_MOST_STEPS = 256  # over which means are taken


class CompressionMonitor(StepObserver):
    """Log what compression does as scalars ``sparse/<name>``, at the Trainer's ``log_every_n_steps``.

    All loggers get :meth:`~lightning_sparse.SparseDDPStrategy.compression_stats`, ``backward_seconds``,
    ``commit_seconds``, ``step_seconds`` and ``samples_per_second`` (validation left out), and
    ``residual_to_gradient`` (ratio of norms). They are means over ranks; ``exposed_seconds`` and ``exposed_share`` are
    those of the slowest rank, ``samples_per_second`` counts those of all ranks. With local steps all are rank 0's own.
    Totals are since the start of ``fit``.
    Bytes, times and the density are also means over the optimizer steps since the last logged one, at most 256, as a
    method may send more in one step than in the next; a step of several backwards has the exchanges of all. Norms are
    those of the logged step. Steps of plain DDP, such as AdamW's first ones, have no times of an exchange. TensorBoard
    also gets a page with the plan in force, and a layout for its tab "Custom Scalars", in which the density is a
    decimal logarithm.

    A logged step costs one more pass over gradients and residuals, a small all-gather, and on a GPU a wait for the
    step. Of other steps notes are taken on the host. With a strategy that compresses nothing, such as ``"ddp"``, it
    warns once, and logs nothing.

    Args:
        progress_bar: also show the compression ratio since the start and the exposed milliseconds in the progress bar.
        by_parameter: also log, as ``sparse_parameters/<name>/<parameter name>`` of the logged step, ``density``,
            ``gradient_norm``, ``residual_norm`` (root mean squares over ranks) and ``residual_to_gradient``, or
            ``update_error`` where updates of Adam wait.

    Raises:
        ValueError: at the start of ``fit``, if the Trainer has two monitors.
        TypeError: at the start, with ``by_parameter`` where ranks hold shards.

    Example::

        >>> monitor = CompressionMonitor(progress_bar=True)
    """

    def __init__(self, progress_bar: bool = False, by_parameter: bool = False) -> None:
        self.progress_bar = progress_bar
        self.by_parameter = by_parameter
        self._throughput = Throughput()
        self._plan: Any = None
        self._has_page = False
        self._steps = deque[Step](maxlen=_MOST_STEPS)
        self._last_step: Step = ()

    @property
    def works_on_shards(self) -> bool:  # type: ignore[override]  # of shards ranks have different ones
        """Whether all that is shown can be known where every rank holds a shard."""
        return not self.by_parameter

    @override
    def _refuse(self, message: str) -> None:
        # Whoever compares strategies has one list of callbacks.
        rank_zero_warn(f"nothing of it is logged: {message}")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._plan, self._has_page = None, False
        self._steps.clear()
        self._last_step = ()
        self._throughput = Throughput(trainer.fit_loop.epoch_loop._batches_that_stepped - 1)
        if not trainer.loggers and not self.progress_bar:
            rank_zero_warn("CompressionMonitor has nowhere to log: give the Trainer a logger, or remove the callback")

    @override
    def looks_at(self, trainer: Trainer, step: int) -> bool:
        return is_logged(trainer, step)

    @override
    def before_step(self, trainer: Trainer, engine: Engine) -> None:
        engine.recorder.ask_for_samples(counts=self.by_parameter)
        if engine.memory.corrects_adam:
            engine.memory.is_watched = True

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        # Its gradients have been exchanged; a batch may have several steps.
        engine = engine_or_none(trainer)
        if engine is not None and engine.recorder.last_step is not self._last_step:
            self._last_step = engine.recorder.last_step
            self._steps.append(self._last_step)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._throughput.add_batch(batch)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._throughput.pause()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._throughput.resume()

    @override
    def after_step(self, trainer: Trainer, pl_module: LightningModule, strategy: SparseDDPStrategy, step: int) -> None:
        engine = engine_of(strategy)
        samples, last = engine.recorder.last_samples, engine.recorder.last
        if last is None or (samples is None and not last.is_dense):
            return  # what exchanges was built anew since the step was asked for
        engine.memory.is_watched = engine.memory.is_watched and samples is not None
        stats = statistics_over_ranks(
            strategy, list(self._steps) or [engine.recorder.last_step], samples, self._throughput.statistics(step)
        )
        self._steps.clear()
        scalars = {f"sparse/{name}": value for name, value in stats.items()}
        if self.by_parameter and samples is not None:
            for name, facts in parameters_over_ranks(strategy, samples).items():
                scalars |= {parameter_tag(statistic, name): value for statistic, value in facts.items()}
        log_scalars(trainer, scalars, step)
        log_log_density(trainer, stats["density"], step)
        if samples is not None:
            self._log_plan(trainer, engine, list(stats), step)
        if self.progress_bar:
            shown = {"compression": stats["total_compression_ratio"]}
            if "exposed_seconds" in stats:
                shown["exposed_ms"] = 1e3 * stats["exposed_seconds"]
            pl_module.log_dict(shown, prog_bar=True, logger=False)
        self._throughput.restart(step)

    def _log_plan(self, trainer: Trainer, engine: Engine, shown: list[str], step: int) -> None:
        plan = engine.planner.plan
        if self._has_page and plan is self._plan:
            return
        if not self._has_page:
            log_layout(trainer, shown)
        self._plan, self._has_page = plan, True
        if engine.recorder.last is not None:
            name = type(engine.pipeline.compressor).__name__
            log_text(trainer, "sparse/plan", plan_page(name, plan, engine.recorder.last), step)


def statistics_over_ranks(
    strategy: SparseDDPStrategy,
    steps: Sequence[Step],
    samples: Optional[ParameterSamples],
    throughput: Mapping[str, float],
) -> dict[str, float]:
    """Return what the last steps did, as far as known; ``samples`` are of the last, ``None`` if plain DDP made it."""
    engine, stats = engine_of(strategy), strategy.compression_stats()
    ours = compressed(steps)
    if engine.rounds is None:  # the statistics of a round of local steps are means already, and it sees no backward
        stats |= mean_stats(steps, engine.recorder.has_levels)
        stats["backward_seconds"] = mean_of(ours, lambda each: each.backward_seconds)
    stats["commit_seconds"] = mean_of(ours, lambda each: each.seconds("commit"))
    if samples is not None:
        stats |= memory_statistics(engine) if engine.memory.corrects_adam else {}
        if "update_error" in stats:  # which the memory knows of the last exchange alone
            stats["update_error"] = samples.update_error()
        stats["gradient_square"], stats["residual_square"] = (norm**2 for norm in samples.norms())
    stats = reduce_over_ranks(strategy, {**stats, **throughput})
    for total in ("", "total_"):
        stats[f"{total}compression_ratio"] = compression_ratio(
            stats[f"{total}dense_bytes"], stats[f"{total}wire_bytes"]
        )
    if samples is not None:
        squares = stats.pop("residual_square"), stats.pop("gradient_square")
        if "update_error" not in stats:  # updates that wait are not to be compared with gradients
            stats["residual_to_gradient"] = _norm_ratio(*squares)
    stats["samples_per_second"] = stats.pop("step_samples") / stats["step_seconds"]
    unknown = {"samples_per_second", "exposed_share", *(f"{stage}_seconds" for stage in _STAGES)}
    return {name: value for name, value in stats.items() if name not in unknown or not math.isnan(value)}


def parameters_over_ranks(strategy: SparseDDPStrategy, samples: ParameterSamples) -> dict[str, dict[str, float]]:
    """Reduce what a step did to each parameter over ranks, by parameter name in the order of the model."""
    assert strategy.lightning_module is not None
    facts, shares = samples.facts(), shares_of(strategy)
    names = [name for name, _ in strategy.lightning_module.named_parameters() if name in facts]
    mine = [
        number
        for fact in map(facts.__getitem__, names)
        for number in (fact.sent, *(shares * norm**2 for norm in fact[2:]))
    ]
    means = iter(mean_over_ranks(strategy, mine))
    return {
        name: {
            "density": sent / facts[name].numel,
            "gradient_norm": math.sqrt(gradient_square),
            "residual_norm": math.sqrt(residual_square),
            "update_error" if name in samples.update_norms else "residual_to_gradient": _norm_ratio(
                residual_square, added_square
            ),
        }
        for name, sent, gradient_square, residual_square, added_square in zip(names, *[means] * 4)
    }


def _norm_ratio(square: float, other_square: float) -> float:
    """Return the quotient of two norms; NaN, which loggers show as such, where it is not defined."""
    return math.sqrt(square / other_square) if other_square > 0 else math.nan


class Throughput:
    """Count steps, samples and the time that they took, without looking at a device."""

    def __init__(self, step: int = -1) -> None:
        self._paused: Optional[float] = None
        self.restart(step)

    def restart(self, step: int) -> None:
        """Count from here on, after a step."""
        self._last_step, self._samples, self._began = step, 0.0, time.perf_counter()

    def add_batch(self, batch: Any) -> None:
        """Count a batch."""
        self._samples += batch_size(batch)

    def pause(self) -> None:
        """Stop the time."""
        self._paused = time.perf_counter()

    def resume(self) -> None:
        """Let the time go on."""
        if self._paused is not None:
            self._began += time.perf_counter() - self._paused
            self._paused = None

    def statistics(self, step: int) -> dict[str, float]:
        """Return ``step_seconds`` and ``step_samples`` (NaN where unknown): means of the steps up to this one."""
        steps = max(1, step - self._last_step)
        return {"step_seconds": (time.perf_counter() - self._began) / steps, "step_samples": self._samples / steps}


def batch_size(batch: Any) -> float:
    """Return the length of the first dimension that all tensors of a batch share; NaN if they share none."""
    sizes = {leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0}
    return sizes.pop() if len(sizes) == 1 else math.nan
