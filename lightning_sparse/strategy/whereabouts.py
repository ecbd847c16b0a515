"""How far each rank got, or why it ended: left behind for others, told in their errors, brought back by launchers."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from textwrap import shorten
from typing import Any, Optional

from typing_extensions import override

from lightning_sparse.engine.collectives import post_status, statuses, waited_in_vain
from lightning_sparse.strategy.lightning import Trainer, _MultiProcessingLauncher, _SubprocessScriptLauncher

_FAILED = -1  # in place of a number of batches
_KEY = "lightning_sparse"
_MOST = 3  # ranks that a message names
_LONGEST = 300  # characters of another rank's error
_UNEQUAL = (
    "ranks have different numbers of batches, or one of them stopped by itself. Give Trainer(limit_train_batches=...)"
    " as many as the shortest has, use a DistributedSampler, or train with local_steps=..., which needs no equal ones."
)
_FEWER = (
    "it has left out a backward, or another call that all ranks have to make. Have all go backward equally often: where"
    " a batch is left out, from 0 * next(self.parameters()).sum()."
)


def leave_end_of_epoch(trainer: Trainer) -> None:
    """Leave behind that this rank is in the last batch of an epoch."""
    batches, epoch = _begun(trainer), trainer.current_epoch
    _leave(epoch, batches, f"has had all batches of epoch {epoch}, {batches} since the start")


def leave_end_of_training(trainer: Trainer) -> None:
    """Leave behind that this rank has trained to the end."""
    batches = _begun(trainer)
    _leave(math.inf, batches, f"has finished its training, after {batches} batches")


@contextmanager
def posting(trainer: Optional[Trainer]) -> Iterator[None]:
    """Say what it means that a rank has waited in vain, wherever it did, and leave behind what else ended this one."""
    try:
        yield
    except Exception as error:
        in_vain = waited_in_vain(error)
        if in_vain is None:
            _leave(math.inf, _FAILED, shorten(f"has failed with {type(error).__name__}: {error}", _LONGEST).rstrip("."))
            raise
        if trainer is not None and (known := _known_of_others(trainer)):
            in_vain = in_vain.because(known)
        if in_vain is error:
            raise
        raise in_vain from error


def told(trainer: Optional[Trainer], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function inside of :func:`posting`."""
    if trainer is None:  # nothing is trained here
        return function(*args, **kwargs)
    with posting(trainer):
        return function(*args, **kwargs)


def _leave(epoch: float, batches: int, line: str) -> None:
    """Leave a line behind that explains why others wait that are past these batches and not past the epoch."""
    post_status(json.dumps([epoch, batches, line]))


def _known_of_others(trainer: Trainer) -> str:
    begun = _begun(trainer)
    left = [(rank, *json.loads(word)) for rank, word in sorted(statuses().items()) if word]
    known = [each for each in left if each[1] >= trainer.current_epoch and each[2] < begun][:_MOST]
    sentences = [f"rank {rank} {line}." for rank, _, _, line in known]
    if any(batches != _FAILED for _, _, batches, _ in known):
        sentences.append(f"This rank is in its batch {begun}: {_UNEQUAL}")
    if not known and (fewer := [each for each in left if each[1] == math.inf and each[2] == begun]):
        rank, _, _, line = fewer[0]
        sentences.append(f"rank {rank} {line}, as many as this rank has begun: {_FEWER}")
    return " ".join(sentences)


def _begun(trainer: Trainer) -> int:
    """Return how many batches this rank has begun."""
    return trainer.fit_loop.total_batch_idx + 1


class _Telling:
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Optional[Trainer] = None, **kwargs: Any) -> Any:
        return super().launch(told, trainer, function, *args, trainer=trainer, **kwargs)  # type: ignore[misc]


class ScriptLauncher(_Telling, _SubprocessScriptLauncher):
    """Lightning's launcher of scripts, which also has each rank say why it waited in vain for another one."""


class ProcessLauncher(_Telling, _MultiProcessingLauncher):
    """The same of forked and spawned processes; it brings back what the strategy has to tell, beside the metrics."""

    _strategy: Any

    @override
    def get_extra_results(self, trainer: Trainer) -> dict[str, Any]:
        return {**super().get_extra_results(trainer), _KEY: self._strategy.told()}

    @override
    def update_main_process_results(self, trainer: Trainer, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        self._strategy.remember(**extra[_KEY])
