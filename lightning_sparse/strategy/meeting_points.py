"""Meeting points: where ranks that may step apart become one model, around epochs, validations and the end of a fit."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Optional

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sparse.engine.local_steps import Rounds
from lightning_sparse.engine.step.shards import reshard
from lightning_sparse.loop.loop import Training
from lightning_sparse.strategy.lightning import Trainer
from lightning_sparse.strategy.uneven import (
    check_batches,
    check_rates,
    samples_of,
    skip_steps,
    step_ratio_of,
    sync_schedulers,
)


class MeetingPoints:
    """Have all ranks meet where Lightning asks callbacks first and a strategy last.

    ``replace`` has a method of ours stand in the place of one of Lightning's, until training ends.
    """

    def __init__(
        self, trainer: Trainer, training: Training, replace: Callable[[Any, str, Callable[..., Any]], None]
    ) -> None:
        self.have_uneven_batches = False  # ranks have, or may have, different numbers of them
        self.has_own_position = False  # each rank goes on from where it was in its data
        self._trainer = trainer
        self._training = training
        self._is_before_validation: Optional[bool] = None  # the checkpoint that was read, by all; it ends a round
        self._seen_batch = 0  # the number of the last one, since the start
        self._validated_batch = 0  # the number of the one after which the last validation came, or was left out
        fit_loop, validation = trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop
        replace(fit_loop, "run", partial(self._run, fit_loop.run))
        replace(fit_loop, "on_run_end", partial(self._end, fit_loop.on_run_end))
        replace(fit_loop, "on_advance_start", partial(self._begin_epoch, fit_loop.on_advance_start))
        replace(fit_loop, "on_advance_end", partial(self._end_epoch, fit_loop.on_advance_end))
        replace(validation, "run", partial(self._validate, validation.run))

    @property
    def _rounds(self) -> Optional[Rounds]:
        return self._training.engine.rounds

    @property
    def _has_one_pace(self) -> bool:
        """Whether no rank is ahead of others until all meet."""
        return self._rounds is None or self._rounds.meeting.step_ratio[1] == 1

    def begin_steps(self) -> None:
        """Know that a fit's first batch comes next; all ranks call."""
        self._seen_batch = self._validated_batch = 0
        was_before, self._is_before_validation = self._is_before_validation, None
        if not self._has_one_pace:  # schedules may be as long as an epoch of each rank's own
            sync_schedulers(self._trainer, self._trainer.optimizers, self._trainer.num_training_batches)
        if self._rounds is not None and was_before is not None and self._training.engine.mean_over_ranks(was_before):
            self._rounds.synchronize()  # Lightning may leave that validation out

    def see_batch(self, batch: Any) -> None:
        """Know that a batch is trained on, maybe once more by a closure."""
        if self._rounds is None or (number := self._progress.total.ready) == self._seen_batch:
            return
        self._seen_batch = number
        self._rounds.meeting.see_batch(samples_of(batch))
        if self._trainer.fit_loop.batch_idx == 0 and self._has_one_pace and self._training.replicas.are_apart:
            check_rates(self._trainer, self._trainer.optimizers)

    def end_step(self) -> None:
        """Count what this rank's step has stood for beside itself."""
        if self._rounds is not None:
            skip_steps(self._trainer, self._rounds.meeting.skipped())

    @property
    def _progress(self) -> Any:
        return self._trainer.fit_loop.epoch_loop.batch_progress

    def _run(self, run: Callable[[], None]) -> None:
        """Train, and end with one model."""
        self._begin_epoch(self._trainer.fit_loop.setup_data)
        run()
        replicas = self._training.replicas
        if replicas.are_apart:  # a resume with nothing left to train has no end
            replicas.synchronize()
            replicas.adopt()

    def _end(self, end: Callable[[], None]) -> None:
        self._training.replicas.synchronize()
        end()

    def _begin_epoch(self, begin: Callable[[], None]) -> None:
        """Begin an epoch, or prepare the first, as Lightning does, and know each rank's share of its steps."""
        begin()
        if (rounds := self._rounds) is not None:
            meeting = rounds.meeting
            batches = check_batches(
                self._trainer, rounds.synchronous_left, self.has_own_position, meeting.ranks_in_step
            )
            self.have_uneven_batches = len(set(batches)) > 1 or batches[0] == float("inf")
            meeting.step_ratio = step_ratio_of(self._trainer, batches)

    def _end_epoch(self, end: Callable[[], None]) -> None:
        """End an epoch as Lightning does, on all ranks together, and training on all where one wants to stop."""
        self._meet("the end of an epoch")
        end()
        if self._rounds is not None:
            self._trainer.should_stop = self._training.engine.mean_over_ranks(self._trainer.should_stop) > 0

    def _validate(self, validate: Callable[[], Any]) -> Any:
        """Validate the model of all ranks, on all together; not where some are past it."""
        trainer = self._trainer
        if not trainer.sanity_checking:
            self._validated_batch = self._seen_batch
            if not self._meet("a validation"):
                return []
            self._training.end_round(bool(trainer.fast_dev_run))  # type: ignore[attr-defined]
        with self._training.replicas.shared_model():
            try:
                return validate()
            finally:
                reshard(trainer.lightning_module)

    def _meet(self, place: str) -> bool:
        """Return whether all ranks come here, when they have: those without a batch take part in others' rounds."""
        have_met = self._training.replicas.meet(place)
        if have_met and self._rounds is not None and self._rounds.meeting.are_uneven:
            sync_schedulers(self._trainer, self._trainer.optimizers, self._progress.current.ready)
        if not have_met:
            rank_zero_warn(
                f"{place} is left out: some ranks' batches have ended, and they go on to the end of the epoch"
            )
        return have_met

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has to tell all ranks: in a round, whether a validation comes next."""
        is_validated = self._validated_batch == self._seen_batch > 0
        if self._rounds is None or not self._rounds.steps_since_ended or is_validated:
            return {}
        fit_loop = self._trainer.fit_loop
        fetcher, progress = fit_loop._data_fetcher, self._progress.current
        is_trained = progress.processed == progress.ready  # else it is trained on again
        is_before = is_trained and fetcher is not None and fit_loop.epoch_loop._should_check_val_fx(fetcher)
        return {"is_before_validation": is_before}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; all ranks call."""
        self._is_before_validation = bool(state.get("is_before_validation"))
