"""The base of this package's callbacks: which strategy they look at, at which steps, what they refuse and gather."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, Optional, cast

from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_sparse.engine import Engine
from lightning_sparse.engine.collectives import gather_together
from lightning_sparse.engine.refusals import FEATURES, lacking, refuse
from lightning_sparse.strategy.lightning import CURE, Callback, LightningModule, Trainer
from lightning_sparse.strategy.trainer import SparseDDPStrategy


class StepObserver(Callback):
    """Look at some steps of a sparse strategy of several processes; each is known before its first batch."""

    every_n_steps = 1
    works_on_shards = False  # of a model that no rank holds whole
    _looks = False
    _steps_before = 0

    def looks_at(self, trainer: Trainer, step: int) -> bool:
        """Decide, on every rank alike, whether to look at a step."""
        return (step + 1) % self.every_n_steps == 0

    def before_step(self, trainer: Trainer, engine: Engine) -> None:
        """Ask for what is to be seen of the step."""

    def after_step(self, trainer: Trainer, pl_module: LightningModule, strategy: SparseDDPStrategy, step: int) -> None:
        """Look at the step, on all ranks."""
        raise NotImplementedError

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        name = type(self).__name__
        if not isinstance(trainer, Trainer):
            raise TypeError(f"this {name} is {CURE}")
        holds_shards = getattr(trainer.strategy, "holds_shards", None)
        if holds_shards and not self.works_on_shards:
            raise TypeError(
                f"{name} looks at whole parameters, and of them a rank holds shards here: remove the callback, or use"
                " CompressionMonitor() without by_parameter"
            )
        if holds_shards is None:
            self._refuse(
                f"{name} needs a SparseDDPStrategy, got {type(trainer.strategy).__name__}: choose one, such as"
                " Trainer(strategy='sparse_topk'), or remove the callback"
            )
        alike = sum(type(callback) is type(self) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        if alike > 1:
            raise ValueError(f"callbacks holds {alike} {name}, which would write over each other: give one")
        if stage == "fit" and holds_shards is not None:
            for feature in FEATURES.keys() & {kind.__name__ for kind in type(self).__mro__}:
                refuse(lacking(feature, sparse_strategy(trainer).settings))
        self._looks = False

    def _refuse(self, message: str) -> None:
        """Refuse a strategy that compresses nothing."""
        raise TypeError(message)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # A step of several batches is asked for once.
        if not self._looks:
            self._steps_before = trainer.global_step
            self._looks = self.looks_at(trainer, step_of(trainer))
            engine = engine_or_none(trainer)
            if self._looks and engine is not None:
                engine.worker.drain()  # what is still on its way would hear of the question on a slow rank only
                self.before_step(trainer, engine)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._look(trainer, pl_module)

    def _look(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the step that has just been made, if it is to be looked at and has not been yet; on all ranks."""
        if self._looks and trainer.global_step > self._steps_before:
            self._looks = False
            engine = engine_or_none(trainer)
            if engine is not None:
                engine.worker.drain()
                if engine.rounds is None:  # which sample when they exchange
                    engine.recorder.stop_sampling()
                self.after_step(trainer, pl_module, sparse_strategy(trainer), step_of(trainer))


def sparse_strategy(trainer: Trainer) -> SparseDDPStrategy:
    """Return the Trainer's strategy."""
    return cast(SparseDDPStrategy, trainer.strategy)  # or that of sharded models, of which the same is asked


def engine_or_none(trainer: Trainer) -> Optional[Engine]:
    """Return what exchanges; ``None`` on one process, and of a strategy that is not ours."""
    return getattr(trainer.strategy, "engine", None)


def engine_of(strategy: SparseDDPStrategy) -> Engine:
    """Return the engine of a strategy that exchanges something."""
    assert strategy.engine is not None
    return strategy.engine


def step_of(trainer: Trainer) -> int:
    """Return the number under which Lightning logs the step in progress, from 0."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def is_logged(trainer: Trainer, step: int) -> bool:
    """Tell whether the Trainer's ``log_every_n_steps`` names a step."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set where mypy does not look
    return every > 0 and (step + 1) % every == 0


def parameter_tag(statistic: str, parameter: str) -> str:
    """Return the tag of a parameter's statistic, under a prefix of its own: there are hundreds of them."""
    return f"sparse_parameters/{statistic}/{parameter}"


def log_scalars(trainer: Trainer, scalars: dict[str, float], step: int) -> None:
    """Hand scalars to all loggers of the Trainer."""
    for logger in trainer.loggers:
        logger.log_metrics(scalars, step=step)


def log_line(callback: Callback, line: str) -> None:
    """Tell the user something, once for all ranks."""
    rank_zero_info(f"{type(callback).__name__}: {line}")


def memory_statistics(engine: Engine) -> dict[str, float]:
    """Return what the memory did in the last step, if it was watched; on a GPU this waits for it."""
    engine.memory.is_watched = False
    return {name: float(statistic) for name, statistic in engine.memory.statistics().items()}


# The slowest rank is the one that all wait for, and samples of all ranks are trained on.
_REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "exposed_seconds": max,
    "exposed_share": max,
    "step_samples": math.fsum,
}


def gather_rows(strategy: SparseDDPStrategy, numbers: Sequence[float]) -> list[Sequence[float]]:
    """Gather equally many numbers from every rank; with local steps, when ranks need not meet, return this one's."""
    return gather_together(numbers) if strategy.rounds is None else [numbers]


def mean_over_ranks(strategy: SparseDDPStrategy, numbers: Sequence[float]) -> list[float]:
    """Return the mean over ranks of each of equally many numbers."""
    return list(map(fmean, zip(*gather_rows(strategy, numbers))))


def shares_of(strategy: SparseDDPStrategy) -> int:
    """Return over how many ranks a norm is spread, whose squares add up: over those of a node, with two levels.

    With local steps each rank tells of its own.
    """
    return engine_of(strategy).levels.node_ranks if strategy.rounds is None else 1


def reduce_over_ranks(strategy: SparseDDPStrategy, mine: Mapping[str, float]) -> dict[str, float]:
    """Return the mean over ranks by name; exposed times are those of the slowest rank, samples those of all."""
    columns = zip(*gather_rows(strategy, list(mine.values())))
    return {name: _REDUCTIONS.get(name, fmean)(column) for name, column in zip(mine, columns)}
