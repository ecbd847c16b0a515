"""Show when backward and exchange happened, on every rank."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional, Union

from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_sparse._lightning import LightningModule, Trainer
from lightning_sparse.callbacks.base import StepObserver, checked_interval, engine_of, say, sparse_strategy
from lightning_sparse.callbacks.reporting.gathering import clock_offsets, gather_objects
from lightning_sparse.callbacks.reporting.pictures import draw_steps, figure_class
from lightning_sparse.callbacks.reporting.tensorboard import log_picture
from lightning_sparse.engine import Engine
from lightning_sparse.engine.observe.timeline import RecordedStep, Slice, step_slices, trace
from lightning_sparse.strategy.trainer import SparseDDPStrategy

_EVERY_N_STEPS = 100


class OverlapTimeline(StepObserver):
    """Record some steps of all ranks, and write them as a trace for Perfetto (https://ui.perfetto.dev) and Chrome.

    Each rank is a process with a row for backward (a slice for each gradient, then the wait for the exchange) and one
    for the exchange worker (groups, and in them selection, encoding, exchange and commit, with elements, bytes and
    parameters); groups that are ready and wait for the worker have a row of their own. Rank 0 writes the file,
    after every recorded step. The clocks of ranks are compared by a few small collectives after each of them; the
    file says in ``metadata`` how far they may still be off.

    On a GPU a recorded step marks every gradient with an event. Other steps are left alone.

    Args:
        steps: numbers of the steps to record, from 0, as loggers count them.
        every_n_steps: record every so many steps instead; 100 if neither is given. The first steps, in which
            ``schedule="merged"`` tries groupings, are passed over unless ``steps`` names them.
        max_steps: no more than this many are recorded.
        path: file to write; the picture stands beside it, with the suffix ``.png``. ``None`` for ``overlap.json`` in
            the directory of the logger, or the Trainer's.
        pictures: draw the last recorded step when training ends; it is also shown in TensorBoard.

    Attributes:
        recorded: the steps recorded since training began, on every rank.

    Raises:
        ValueError: for steps that are not distinct numbers from 0, for both ways to choose steps, for an interval or
            a number of steps below 1, or if there is to be a picture and matplotlib is not installed; in ``setup``,
            with local steps.

    Example::

        >>> timeline = OverlapTimeline(steps=[100, 101], pictures=False)
    """

    def __init__(
        self,
        steps: Optional[Sequence[int]] = None,
        every_n_steps: Optional[int] = None,
        max_steps: int = 8,
        path: Optional[Union[str, Path]] = None,
        pictures: bool = True,
    ) -> None:
        if steps is not None and every_n_steps is not None:
            raise ValueError(f"steps={steps!r} and every_n_steps={every_n_steps!r} are two ways to choose: give one")
        self.steps = None if steps is None else _checked_steps(steps)
        self.every_n_steps = checked_interval("every_n_steps", every_n_steps) or _EVERY_N_STEPS
        self.max_steps = checked_interval("max_steps", max_steps) or 0
        self.path = path
        self._figure_class = figure_class(self) if pictures else None
        self.recorded: list[RecordedStep] = []
        self._target = Path()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        local = sparse_strategy(trainer).settings.local_steps
        if stage == "fit" and local is not None:
            raise ValueError(
                f"OverlapTimeline shows exchanges beside backward, and with local_steps={local.every!r} they come"
                " between batches: leave it out; CompressionMonitor logs how long training waits for them"
                " (exposed_seconds)"
            )
        directory = trainer.log_dir  # asks rank 0, so all ranks have to ask
        self._target = Path(directory or ".") / "overlap.json" if self.path is None else Path(self.path)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.recorded = []

    @override
    def looks_at(self, trainer: Trainer, step: int) -> bool:
        if len(self.recorded) >= self.max_steps:
            return False
        return step in self.steps if self.steps is not None else step > 0 and step % self.every_n_steps == 0

    @override
    def before_step(self, trainer: Trainer, engine: Engine) -> None:
        engine.recorder.is_watched = True

    @override
    def after_step(self, trainer: Trainer, pl_module: LightningModule, strategy: SparseDDPStrategy, step: int) -> None:
        engine = engine_of(strategy)
        engine.recorder.is_watched = False
        slices = _slices(pl_module, engine)
        offsets = clock_offsets(strategy)
        ranks = [[Slice(*row) for row in rows] for rows in gather_objects(strategy, slices)]
        aligned = [
            [each._replace(start=each.start - offset.seconds, end=each.end - offset.seconds) for each in rank]
            for rank, offset in zip(ranks, offsets)
        ]
        if not all(ranks):
            return  # every gradient was sparse_coo: there are no groups to show
        self.recorded.append(RecordedStep(step, aligned, [offset.uncertainty for offset in offsets]))
        if trainer.is_global_zero:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            self._target.write_text(json.dumps(trace(self.recorded)))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.recorded:
            asked = f"steps={list(self.steps)}" if self.steps is not None else f"every_n_steps={self.every_n_steps}"
            rank_zero_warn(
                f"OverlapTimeline has recorded nothing: {asked} names no step that more than one process made"
                f" (training ended before step {trainer.fit_loop.epoch_loop._batches_that_stepped}, counted from 0)"
            )
            return
        say(self, f"{len(self.recorded)} steps are in {self._target}; open it in https://ui.perfetto.dev")
        if self._figure_class is not None and trainer.is_global_zero:
            figure = self._figure_class(layout="constrained")
            draw_steps(figure, {"": self.recorded[-1]})
            figure.savefig(self._target.with_suffix(".png"))
            log_picture(trainer, "sparse/overlap", figure, self.recorded[-1].step)


def _slices(pl_module: LightningModule, engine: Engine) -> list[Slice]:
    marks = engine.last_marks
    if marks is None or not marks.ready:
        return []
    numels = {name: parameter.numel() for name, parameter in pl_module.named_parameters()}
    return step_slices(marks, *engine.recorder.clock.reference(), numels)


def _checked_steps(steps: Any) -> frozenset[int]:
    numbers = list(steps) if isinstance(steps, (Sequence, set, frozenset, range)) and not isinstance(steps, str) else []
    are_steps = all(isinstance(step, int) and not isinstance(step, bool) and step >= 0 for step in numbers)
    if not numbers or not are_steps or len(set(numbers)) < len(numbers):
        raise ValueError(
            f"steps={steps!r} must be a list of distinct whole numbers, at least 0, such as [100, 200]; for steps at"
            " regular distances give every_n_steps"
        )
    return frozenset(numbers)
