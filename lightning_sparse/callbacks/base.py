"""The base class of this package's callbacks, and reductions over ranks."""

import math
from collections.abc import Hashable, Mapping
from statistics import fmean
from typing import Any, Optional, TypeVar

from typing_extensions import override

from lightning_sparse.engine import Engine
from lightning_sparse.engine.collectives import all_gather_object
from lightning_sparse.engine.observe import ParameterFacts, ParameterSamples
from lightning_sparse.strategy.lightning import HINT, Callback, LightningModule, Trainer
from lightning_sparse.strategy.sharded import SparseModelParallelStrategy
from lightning_sparse.strategy.trainer import SparseStrategy


class StepObserver(Callback):
    """Observe some optimizer steps of a sparse strategy. :meth:`observes` is called before a step's first batch."""

    every_n_steps: Optional[int] = None  # steps between observations; ``None`` for the Trainer's ``log_every_n_steps``
    works_on_shards = False  # whether sharded models are supported
    _is_observed = False
    _steps_before = 0

    def observes(self, trainer: Trainer, step: int) -> bool:
        """Return whether to observe a step. All ranks must return the same value."""
        every: int = trainer.log_every_n_steps if self.every_n_steps is None else self.every_n_steps  # type: ignore[attr-defined]
        return every > 0 and (step + 1) % every == 0

    def before_step(self, trainer: Trainer, engine: Engine) -> None:
        """Request the engine's measurements of the next step."""

    def after_step(self, trainer: Trainer, engine: Engine, step: int) -> None:
        """Process the measurements of the observed step. All ranks call this method."""
        raise NotImplementedError

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        name = type(self).__name__
        if not isinstance(trainer, Trainer):
            raise TypeError(f"this {name} is {HINT}")
        if not isinstance(trainer.strategy, SparseStrategy):
            self._refuse(
                f"{name} needs a SparseDDPStrategy, got {type(trainer.strategy).__name__}: choose one, such as"
                " Trainer(strategy='sparse_topk'), or remove the callback"
            )
        elif isinstance(trainer.strategy, SparseModelParallelStrategy) and not self.works_on_shards:
            raise TypeError(
                f"{name} needs whole parameters, but each rank holds only shards of parameters: remove the callback, or"
                " use CompressionMonitor() without by_parameter"
            )
        alike = [type(each).__name__ for each in trainer.callbacks if isinstance(each, type(self))]  # type: ignore[attr-defined]
        if len(alike) > 1:
            raise ValueError(f"callbacks has {' and '.join(alike)}, which overwrite each other: remove duplicates")
        self._is_observed = False

    def _refuse(self, message: str) -> None:
        raise TypeError(message)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # With gradient accumulation, a single request covers all batches of a step.
        if not self._is_observed:
            self._steps_before = trainer.global_step
            self._is_observed = self.observes(trainer, step_of(trainer))
            engine = engine_of(trainer)
            if self._is_observed and engine is not None:
                engine.worker.drain()  # otherwise the worker thread might apply the request to the previous step
                self.before_step(trainer, engine)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._finish_step(trainer)

    def _finish_step(self, trainer: Trainer) -> None:
        if self._is_observed and trainer.global_step > self._steps_before:
            self._is_observed = False
            engine = engine_of(trainer)
            if engine is not None:
                engine.worker.drain()
                if engine.rounds is None:  # with local steps, sampling lasts until the round's exchange
                    engine.recorder.samples = None
                    engine.memory.is_watched = False
                self.after_step(trainer, engine, step_of(trainer))


def request_samples(engine: Engine) -> None:
    """Measure norms and numbers of sent elements of all parameters in the observed step."""
    engine.recorder.samples = ParameterSamples()
    engine.memory.is_watched = True


def engine_of(trainer: Trainer) -> Optional[Engine]:
    """Return the engine, or ``None`` on a single process and without a sparse strategy."""
    return getattr(trainer.strategy, "engine", None)


def step_of(trainer: Trainer) -> int:
    """Return the number of the current step, from 0, as in Lightning's loggers."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def parameter_tag(statistic: str, parameter: str) -> str:
    """Return a logger's tag for a parameter's statistic. The prefix separates hundreds of tags from all other tags."""
    return f"sparse_parameters/{statistic}/{parameter}"


def log_scalars(trainer: Trainer, scalars: dict[str, float], step: int) -> None:
    """Log scalars to all loggers of the Trainer."""
    for logger in trainer.loggers:
        logger.log_metrics(scalars, step=step)


_Key = TypeVar("_Key", bound=Hashable)
_MAXIMA = {"exposed_seconds", "exposed_share"}  # reduced by the maximum, because all ranks wait for the slowest rank


def over_ranks(engine: Engine, mine: Mapping[_Key, float]) -> dict[_Key, float]:
    """Return the mean (for ``_MAXIMA``: the maximum) of each value over ranks. With local steps, return ``mine``."""
    rows = all_gather_object(list(mine.values())) if engine.rounds is None else [list(mine.values())]
    return {name: (max if name in _MAXIMA else fmean)(column) for name, column in zip(mine, zip(*rows))}


def facts_over_ranks(engine: Engine, samples: ParameterSamples) -> dict[str, ParameterFacts]:
    """Return sizes and norms of each parameter. Norms are root mean squares over ranks (``levels=2``: over nodes)."""
    facts, shares = samples.facts(), engine.pipeline.levels.local_world_size if engine.rounds is None else 1
    rows = {
        (name, place): fact if place < 2 else shares * fact**2
        for name in sorted(facts)
        for place, fact in enumerate(facts[name])
    }
    means = over_ranks(engine, rows)
    return {
        name: ParameterFacts(each.numel, means[name, 1], *(math.sqrt(means[name, place]) for place in (2, 3, 4)))
        for name, each in facts.items()
    }
