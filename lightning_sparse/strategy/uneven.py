"""Ranks with different numbers of batches, in rounds of local steps: what Lightning cannot do is refused."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_sparse.engine.collectives import gather_together
from lightning_sparse.strategy.lightning import (
    ModelCheckpoint,
    ModelPruning,
    Timer,
    Trainer,
    _extract_batch_size,
    _LRCallback,
)


class _Epoch(NamedTuple):
    """An epoch of one rank."""

    batches: float
    validations: float  # in its midst and at its end; NaN where that is not known
    every: Optional[float]  # batches, a validation; ``None`` for none
    begun: int  # batches, before the checkpoint that training goes on from
    has_ended: bool


def samples_of(batch: Any) -> Optional[int]:
    """Return the length of a batch's first tensor, as ``self.log`` takes it; ``None`` where there is none."""
    if isinstance(batch, Iterator):  # which training_step itself takes batches from
        return None
    try:
        return next((size for size in _extract_batch_size(batch) if size is not None), None)
    except (TypeError, RecursionError):  # a collection that cannot be gone through
        return None


def check_batches(trainer: Trainer, synchronous: int, is_position_own: bool, in_step: int = 1) -> list[float]:
    """Return each rank's number of batches of an epoch, infinite for an iterable; refuse what cannot go with others.

    So many ``synchronous`` steps are still to be made, and so many ranks are ``in_step``.
    """
    epochs: list[_Epoch] = gather_together(_epoch_of(trainer))
    batches = [epoch.batches for epoch in epochs]
    if len(set(batches)) == 1:
        return batches
    numbers = ", ".join(f"{number:g} on rank {rank}" for rank, number in enumerate(batches))
    if not is_position_own and epochs[0].has_ended:
        # The checkpoint has the end of an epoch of another rank.
        current = trainer.fit_loop.epoch_loop.batch_progress.current
        left = int(trainer.num_training_batches) - current.ready
        for name in ("ready", "started", "processed", "completed"):
            setattr(current, name, getattr(current, name) + left)
        is_position_own = True
    refused = next(_refusals(trainer, synchronous, epochs, is_position_own, in_step), None)
    if refused is not None:
        raise ValueError(f"ranks have different numbers of batches ({numbers}), and {refused}")
    return batches


def check_ranks_apart(trainer: Trainer) -> None:
    """Refuse what each rank would decide by its own clock, or by its own model, where ranks step apart."""
    seconds = getattr(trainer, "_val_check_time_interval", None)
    if seconds is not None:
        raise ValueError(
            f"val_check_interval is a time ({seconds} s), which each rank has from its own clock, and ranks that step"
            " apart would validate after different steps: give a number of batches or a fraction of an epoch, such as"
            " val_check_interval=0.5"
        )
    if any(isinstance(each, ModelPruning) for each in trainer.callbacks):  # type: ignore[attr-defined]
        raise ValueError(
            "ModelPruning removes what is small in each rank's own model, and ranks that step apart have different"
            " ones: exchange in every step, such as with strategy='sparse_lags', or prune when training has ended"
        )


def step_ratio_of(trainer: Trainer, batches: Sequence[float]) -> tuple[int, int]:
    """Return the optimizer steps of an epoch of this rank, and of the rank with the most; 1 where none has more."""
    if float("inf") in batches or len(set(batches)) == 1:
        return 1, 1
    steps = [math.ceil(each / trainer.accumulate_grad_batches) for each in batches]
    return steps[trainer.global_rank], max(steps)


def _epoch_of(trainer: Trainer) -> _Epoch:
    known, progress, every = trainer.num_training_batches, trainer.fit_loop.epoch_loop.batch_progress, None
    loader: Any = trainer.fit_loop._combined_loader
    batches = known if known == float("inf") else len(loader)  # a sampler's may change, and Lightning asks only once
    if trainer.enable_validation:
        every = trainer.val_check_batch
    validations = 0 if every is None or known in (0, float("inf")) else known // every
    has_begun = trainer.fit_loop.restarting
    return _Epoch(batches, validations, every, has_begun * progress.current.ready, has_begun and progress.is_last_batch)


def _refusals(
    trainer: Trainer, synchronous: int, epochs: Sequence[_Epoch], is_position_own: bool, in_step: int
) -> Iterator[str]:
    """Yield what cannot go with different numbers of batches, and what to do."""
    if any(epoch.batches != epochs[rank - rank % in_step].batches for rank, epoch in enumerate(epochs)):
        yield (
            f"{in_step} ranks train in step, those of a node with levels=2, or of a replica in shards: give all of one"
            " equally many; nodes, or replicas, may have different numbers"
        )
    fewest = min(epoch.batches for epoch in epochs)
    if fewest == 0:
        yield "Lightning trains nothing on a rank that has none: give each at least one"
    yield from _refusals_of_synchronous_steps(synchronous, trainer.accumulate_grad_batches, epochs)
    if trainer.enable_validation:
        yield from _refusals_of_validation(trainer, epochs)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelCheckpoint) and (callback._every_n_train_steps or callback._train_time_interval):
            yield (
                "ModelCheckpoint(every_n_train_steps=..., train_time_interval=...) saves where some have ended: give"
                " every_n_epochs=..., or save_on_train_epoch_end=False for a save after each validation"
            )
        if isinstance(callback, Timer) and callback._duration is not None and callback._interval == "step":
            yield "max_time is looked at by all ranks in every batch: give Timer(..., interval='epoch')"
        if isinstance(callback, _LRCallback):
            yield (
                "a search for a learning rate sends the loss in every batch: search where all have equally many, such"
                " as with limit_train_batches=..."
            )
    if len({epoch.has_ended for epoch in epochs}) > 1:
        yield (
            "the checkpoint was saved where some of them had ended their epoch, from where Lightning cannot go on: take"
            " one that was saved at the end of an epoch"
        )
    if not is_position_own and epochs[0].begun:
        yield (
            "the checkpoint was saved in the midst of an epoch, by other ranks: take one that was saved at the end of"
            " an epoch"
        )


def _refusals_of_synchronous_steps(steps: int, batches: int, epochs: Sequence[_Epoch]) -> Iterator[str]:
    if min(epoch.batches for epoch in epochs) <= steps * batches:
        yield (
            f"{steps} synchronous_steps exchange gradients, on all ranks together: give fewer than"
            " the shortest epoch has steps"
        )
    firsts = {math.inf if epoch.every is None else epoch.every for epoch in epochs}
    if len(firsts) > 1 and min(firsts) <= steps * batches:
        yield (
            f"{steps} synchronous_steps exchange gradients, on all ranks together, and some validate before"
            " the others: give fewer than there are steps before any validates, or val_check_interval=1.0"
        )


def _refusals_of_validation(trainer: Trainer, epochs: Sequence[_Epoch]) -> Iterator[str]:
    if trainer.check_val_every_n_epoch is None or getattr(trainer, "_val_check_time_interval", None) is not None:
        yield "validations that go by batches of all epochs, or by time, come at other times on each: give fractions"
    counts = [epoch.validations for epoch in epochs]
    if len(set(counts)) > 1:
        listed = ", ".join(f"{count:g}" for count in counts)
        yield (
            f"val_check_interval={trainer.val_check_interval} has them validate {listed} times an epoch: give 1.0, or a"
            " fraction by which all validate equally often"
        )


def check_logged(trainer: Trainer) -> None:
    """Refuse what a training step has logged of all ranks, which have different numbers of steps."""
    for metric in () if trainer._results is None else trainer._results.result_metrics:
        if metric.meta.on_step and metric.meta.sync.should:
            raise ValueError(
                f"self.log({metric.meta.name!r}, on_step=True, sync_dist=True) sends in every step, and ranks have"
                " different numbers of batches: give on_step=False, on_epoch=True, or leave out sync_dist"
            )


def check_rates(trainer: Trainer, optimizers: Sequence[Optimizer]) -> None:
    """Refuse learning rates that each rank has set by what it has measured itself; all call, as an epoch begins."""
    if not any(each.reduce_on_plateau for each in trainer.lr_scheduler_configs):
        return
    first, *others = gather_together([float(group["lr"]) for each in optimizers for group in each.param_groups])
    if any(each != first for each in others):
        raise RuntimeError(
            f"learning rates differ between ranks, {first[0]} is that of one: a schedule went by a number"
            " that is each rank's own. Log what it monitors with self.log(..., sync_dist=True)"
        )


def skip_steps(trainer: Trainer, steps: int) -> None:
    """Count steps without a batch as made, also for rates that change in each; others catch up where all meet."""
    limit = trainer.max_steps
    if limit is not None and limit >= 0:  # the step that is being made counts as well
        steps = min(steps, limit - trainer.global_step - 1)
    if steps <= 0 or not trainer.lightning_module.automatic_optimization:
        return
    _count(trainer, steps)
    for config in trainer.lr_scheduler_configs:
        if config.interval == "step" and config.frequency == 1 and not config.reduce_on_plateau:
            for _ in range(steps):
                trainer.lightning_module.lr_scheduler_step(config.scheduler, None)


def _count(trainer: Trainer, steps: int) -> None:
    """Count steps as made."""
    loop = trainer.fit_loop.epoch_loop
    by_hand = loop.manual_optimization.optim_step_progress.total
    is_automatic = trainer.lightning_module.automatic_optimization
    total = loop.automatic_optimization.optim_progress.optimizer.step.total if is_automatic else by_hand
    total.ready += steps
    total.completed += steps


def sync_schedulers(trainer: Trainer, optimizers: Sequence[Optimizer], batches: float) -> None:
    """Go on with step number and learning rates of the rank with the most batches; all must call, and have had one."""
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    settings = [
        {name: each for name, each in group.items() if isinstance(each, (int, float, tuple, Tensor))}
        for group in groups
    ]
    loop = trainer.fit_loop.epoch_loop
    states = [each.state_dict() for each in schedulers]
    told = batches, trainer.global_step, loop._batches_that_stepped, states, settings
    everywhere = gather_together(tree_map_only(Tensor, Tensor.cpu, told))
    for rank, (theirs, *_) in enumerate(everywhere):
        if theirs == 0:
            raise ValueError(f"rank {rank} had no batch in an epoch in which others had some: give it at least one")
    most, step, stepped, states, settings = max(everywhere, key=lambda theirs: theirs[0])
    if batches == most:
        return
    for scheduler, state in zip(schedulers, states):
        scheduler.load_state_dict(state)
    for group, setting in zip(groups, settings):
        for name, value in setting.items():
            if isinstance(value, Tensor):
                group[name].copy_(value)  # who has compiled or captured the step reads this one
            else:
                group[name] = value
    _count(trainer, step - trainer.global_step)
    loop._batches_that_stepped = stepped
