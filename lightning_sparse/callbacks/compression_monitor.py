"""Show in the logger, and in the progress bar, what compression does."""

from collections import deque
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_sparse._lightning import LightningModule, TensorBoardLogger, Trainer
from lightning_sparse.callbacks.base import StepObserver, engine_of, log_scalars, parameter_tag, sparse_strategy
from lightning_sparse.callbacks.reporting.gathering import sum_over_ranks
from lightning_sparse.callbacks.reporting.history import History
from lightning_sparse.callbacks.reporting.pictures import draw_density, draw_time, figure_class
from lightning_sparse.callbacks.reporting.plan_page import plan_page
from lightning_sparse.callbacks.reporting.statistics import over_ranks, parameters_over_ranks, step_statistics
from lightning_sparse.callbacks.reporting.tensorboard import (
    log_layout,
    log_logarithms,
    log_magnitudes,
    log_picture,
    log_text,
    shows_pictures,
)
from lightning_sparse.callbacks.reporting.throughput import Throughput
from lightning_sparse.engine import Engine
from lightning_sparse.engine.observe import ParameterSamples, StepVolume
from lightning_sparse.strategy.trainer import SparseDDPStrategy

_MOST_STEPS = 256  # over which means are taken


class CompressionMonitor(StepObserver):
    """Log what compression does as scalars ``sparse/<name>``, at the Trainer's ``log_every_n_steps``.

    All loggers get :meth:`~lightning_sparse.SparseDDPStrategy.compression_stats`, ``backward_seconds``,
    ``commit_seconds``, ``step_seconds`` and ``samples_per_second`` (validation left out), and
    ``residual_to_gradient`` (norm of what waits over that of the gradient). They are means over ranks;
    ``exposed_seconds`` and ``exposed_share`` are those of the slowest rank, ``samples_per_second`` counts those of all
    ranks. Totals are since the start of ``fit``. What is sent and what it takes are also means over the steps since the
    last logged one, the last 256 at most, because a method may send more in one step than in the next; norms, and
    ``union_density`` where it takes a sort, are those of the logged step. TensorBoard also gets a page with the plan in
    force, and a layout for its tab "Custom Scalars", in which densities are decimal logarithms.

    A logged step costs one more pass over gradients and residuals, a small all-gather, and on a GPU a wait for the
    step. Of other steps notes are taken on the host.

    Args:
        progress_bar: also show the compression ratio since the start and the exposed milliseconds in the progress bar.
        by_parameter: also log, as ``sparse_parameters/<name>/<parameter name>``, ``density``, ``union_density``,
            ``gradient_norm``, ``residual_norm`` (root mean squares over ranks) and ``residual_to_gradient``, or
            ``update_error`` where updates of Adam wait, of the logged step.
        histograms: also show, in TensorBoard, the magnitudes of what is sent and kept, over their decimal logarithm
            and added up over ranks: ``sparse/log10_sent_magnitude``, ``sparse/log10_kept_magnitude``; with
            ``by_parameter`` of each parameter, too, as ``sparse_parameters/<name>/<parameter name>``. Zeros are left
            out. With Adam and AdamW they are gradients while everything is sent, and updates from then on.
        pictures: also show, at the end of each epoch, the density of every parameter over time and where the time of
            a step goes; in TensorBoard, and in loggers with a method ``log_image``.

    Raises:
        ValueError: if there are to be pictures and matplotlib is not installed; at the start of ``fit``, if the
            Trainer has two monitors.
        TypeError: at the start of ``fit``, if the Trainer's strategy is not a
            :class:`~lightning_sparse.SparseDDPStrategy`.

    Example::

        >>> monitor = CompressionMonitor(progress_bar=True)
    """

    def __init__(
        self,
        progress_bar: bool = False,
        by_parameter: bool = False,
        histograms: bool = False,
        pictures: bool = False,
    ) -> None:
        self.progress_bar = progress_bar
        self.by_parameter = by_parameter
        self.histograms = histograms
        self._figure_class = figure_class(self) if pictures else None
        self._history = History()
        self._throughput = Throughput()
        self._plan: Any = None
        self._has_page = False
        self._steps = deque[StepVolume](maxlen=_MOST_STEPS)
        self._steps_seen = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._history, self._plan, self._has_page = History(), None, False
        self._steps.clear()
        self._steps_seen = trainer.global_step
        self._throughput = Throughput()
        self._throughput.restart(trainer.fit_loop.epoch_loop._batches_that_stepped - 1)
        if not trainer.loggers and not self.progress_bar:
            rank_zero_warn("CompressionMonitor has nowhere to log: give the Trainer a logger, or remove the callback")
        if getattr(trainer, "fast_dev_run", False) or not trainer.loggers:
            return
        if self._figure_class is not None and not any(map(shows_pictures, trainer.loggers)):
            _warn_of_loggers(trainer, "pictures=True")
        if self.histograms and not any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
            _warn_of_loggers(trainer, "histograms=True")

    @override
    def looks_at(self, trainer: Trainer, step: int) -> bool:
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set where mypy does not look
        return every > 0 and (step + 1) % every == 0

    @override
    def before_step(self, trainer: Trainer, engine: Engine) -> None:
        engine.recorder.ask_for_samples(counts=self._counts, histograms=self.histograms)
        if engine.corrects_adam:
            engine.memory.is_watched = True

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._throughput.add_batch(batch)
        strategy = sparse_strategy(trainer)
        last = None if strategy.engine is None or strategy.is_plain else strategy.engine.recorder.last
        if last is not None and trainer.global_step > self._steps_seen:
            self._steps.append(last.volume())
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
        if samples is None or last is None:
            return  # what exchanges was built anew since the step was asked for
        steps = self._steps or [last.volume()]  # there are none of steps that were left to plain DDP
        mine = {**step_statistics(strategy, list(steps), samples), **self._throughput.statistics(step)}
        self._steps.clear()
        stats = over_ranks(strategy, mine)
        scalars = {f"sparse/{name}": value for name, value in stats.items()}
        by_parameter = parameters_over_ranks(strategy, samples) if self._counts else {}
        if self.by_parameter:
            for name, facts in by_parameter.items():
                scalars |= {parameter_tag(statistic, name): value for statistic, value in facts.items()}
        log_scalars(trainer, scalars, step)
        log_logarithms(trainer, stats, step)
        if self.histograms:
            self._log_magnitudes(trainer, strategy, samples, step)
        if self._figure_class is not None:
            self._history.add(step, stats, {name: facts["density"] for name, facts in by_parameter.items()})
        if self.progress_bar:
            shown = {"compression": stats["total_compression_ratio"], "exposed_ms": 1e3 * stats["exposed_seconds"]}
            pl_module.log_dict(shown, prog_bar=True, logger=False)
        self._log_plan(trainer, engine, list(stats), step)
        self._throughput.restart(step)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._figure_class is None or not self._history.steps:
            return
        # Rank 0 draws for longer than many a step takes. The others wait for it here, and not in the exchange of the
        # next step, so that all leave it out of their times.
        self._throughput.pause()
        if trainer.is_global_zero:
            self._draw(trainer)
        trainer.strategy.barrier()
        self._throughput.resume()

    def _draw(self, trainer: Trainer) -> None:
        history, last = self._history, self._history.steps[-1]
        assert self._figure_class is not None
        if history.densities:  # there are none where every gradient is sparse_coo
            figure = self._figure_class(layout="constrained")
            draw_density(figure, history.steps, history.densities)
            log_picture(trainer, "sparse/density_by_parameter", figure, last)
        figure = self._figure_class(layout="constrained")
        draw_time(figure, history.steps, history.statistics)
        log_picture(trainer, "sparse/time_of_a_step", figure, last)

    @property
    def _counts(self) -> bool:
        return self.by_parameter or self._figure_class is not None

    def _log_magnitudes(
        self, trainer: Trainer, strategy: SparseDDPStrategy, samples: ParameterSamples, step: int
    ) -> None:
        for kind, of_rank in (("sent", samples.sent_magnitudes), ("kept", samples.kept_magnitudes)):
            names, counts = samples.stacked(of_rank)
            if not names:
                continue  # nothing is kept by a method without a residual
            counts = sum_over_ranks(strategy, counts if self.by_parameter else counts.sum(dim=0, keepdim=True))
            log_magnitudes(trainer, f"sparse/log10_{kind}_magnitude", counts.sum(dim=0).tolist(), step)
            if self.by_parameter:
                for name, row in zip(names, counts.tolist()):
                    log_magnitudes(trainer, parameter_tag(f"log10_{kind}_magnitude", name), row, step)

    def _log_plan(self, trainer: Trainer, engine: Engine, shown: list[str], step: int) -> None:
        plan = engine.plan
        if self._has_page and plan is self._plan:
            return
        if not self._has_page:
            log_layout(trainer, shown)
        self._plan, self._has_page = plan, True
        if engine.last_marks is not None:
            name = type(engine.compressor).__name__
            log_text(trainer, "sparse/plan", plan_page(name, plan, engine.last_marks), step)


def _warn_of_loggers(trainer: Trainer, argument: str) -> None:
    names = ", ".join(type(logger).__name__ for logger in trainer.loggers)
    rank_zero_warn(
        f"CompressionMonitor({argument}) has no effect, because {names} cannot show them: give the Trainer a"
        f" TensorBoardLogger, or leave {argument} out"
    )
