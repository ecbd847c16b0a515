"""Show in the logger, and in the progress bar, what compression does."""

from collections import deque
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_sparse.callbacks.base import (
    StepObserver,
    engine_of,
    is_logged,
    log_scalars,
    parameter_tag,
    sparse_strategy,
)
from lightning_sparse.callbacks.statistics import Throughput, parameters_over_ranks, statistics_over_ranks
from lightning_sparse.callbacks.tensorboard import log_layout, log_log_density, log_text, plan_page
from lightning_sparse.engine import Engine
from lightning_sparse.engine.observe import StepFacts
from lightning_sparse.strategy.lightning import LightningModule, Trainer
from lightning_sparse.strategy.trainer import SparseDDPStrategy

_MOST_STEPS = 256  # over which means are taken


class CompressionMonitor(StepObserver):
    """Log what compression does as scalars ``sparse/<name>``, at the Trainer's ``log_every_n_steps``.

    All loggers get :meth:`~lightning_sparse.SparseDDPStrategy.compression_stats`, ``backward_seconds``,
    ``commit_seconds``, ``step_seconds`` and ``samples_per_second`` (validation left out), and
    ``residual_to_gradient`` (ratio of norms). They are means over ranks; ``exposed_seconds`` and ``exposed_share`` are
    those of the slowest rank, ``samples_per_second`` counts those of all ranks. With local steps and different, or
    unknown, numbers of batches, all are rank 0's own. Totals are since the start of ``fit``.
    Bytes and times are also means over the steps since the last logged one, the last 256 at most, because a method may
    send more in one step than in the next; norms are those of the logged step. Steps of plain DDP, such as AdamW's
    first ones, have no times of an exchange. TensorBoard also gets a page with the plan in force, and a layout for its
    tab "Custom Scalars", in which the density is a decimal logarithm.

    A logged step costs one more pass over gradients and residuals, a small all-gather, and on a GPU a wait for the
    step. Of other steps notes are taken on the host.

    Args:
        progress_bar: also show the compression ratio since the start and the exposed milliseconds in the progress bar.
        by_parameter: also log, as ``sparse_parameters/<name>/<parameter name>`` of the logged step, ``density``,
            ``gradient_norm``, ``residual_norm`` (root mean squares over ranks) and ``residual_to_gradient``, or
            ``update_error`` where updates of Adam wait.

    Raises:
        ValueError: at the start of ``fit``, if the Trainer has two monitors.
        TypeError: at the start, if its strategy is not a :class:`~lightning_sparse.SparseDDPStrategy`.

    Example::

        >>> monitor = CompressionMonitor(progress_bar=True)
    """

    def __init__(self, progress_bar: bool = False, by_parameter: bool = False) -> None:
        self.progress_bar = progress_bar
        self.by_parameter = by_parameter
        self._throughput = Throughput()
        self._plan: Any = None
        self._has_page = False
        self._steps = deque[StepFacts](maxlen=_MOST_STEPS)
        self._steps_seen = 0

    @property
    def works_on_shards(self) -> bool:  # type: ignore[override]  # of shards ranks have different ones
        """Whether all that is shown can be known where every rank holds a shard."""
        return not self.by_parameter

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._plan, self._has_page = None, False
        self._steps.clear()
        self._steps_seen = trainer.global_step
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
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._throughput.add_batch(batch)
        engine = sparse_strategy(trainer).engine
        last = None if engine is None else engine.recorder.last
        if last is not None and trainer.global_step > self._steps_seen:
            self._steps.append(last)
        self._steps_seen = trainer.global_step
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
        if last is None or (samples is None and not last.is_plain):
            return  # what exchanges was built anew since the step was asked for
        engine.memory.is_watched = engine.memory.is_watched and samples is not None
        stats = statistics_over_ranks(strategy, list(self._steps) or [last], samples, self._throughput.statistics(step))
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
            name = type(engine.compressor).__name__
            log_text(trainer, "sparse/plan", plan_page(name, plan, engine.recorder.last.marks), step)
