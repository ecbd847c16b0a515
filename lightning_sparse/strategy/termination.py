"""SIGTERM, on which ranks agree without waiting for each other in every batch."""

import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any, Optional

from lightning_sparse._lightning import SIGTERMException, Trainer
from lightning_sparse.strategy.notes import Notes


class Termination:
    """End training on all ranks at the start of one batch, when any of them has been sent SIGTERM.

    From 2.6 on, Lightning has rank 0 tell the others at the start of every batch whether it was, and all of them wait:
    for a way there and back through a tree of ranks, and on a GPU for all that is queued (its issue 21487). Its handler
    exchanges something too, wherever the other ranks are. Here the handler notes the signal and no more, notes travel
    while batches run, and Lightning's handler is called when all ranks have heard, at one batch. In rounds of local
    steps they travel when ranks have exchanged something anyway.

    Args:
        trainer: in whose training signals are noted, until :meth:`close`.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._notes = Notes(trainer.strategy)
        self._is_signalled = False
        # Elsewhere than in the main thread nobody may have a handler, and this rank hears of signals from the others.
        self._has_handler = threading.current_thread() is threading.main_thread()
        self._replaced: Any = signal.signal(signal.SIGTERM, self._note) if self._has_handler else None
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = self._agree  # type: ignore[method-assign]

    @classmethod
    def of(cls, trainer: Trainer) -> Optional["Termination"]:
        """Return that of a training; ``None`` on one process, and in Lightning before 2.6, where nothing is sent."""
        sends = trainer.world_size > 1 and hasattr(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor")
        return cls(trainer) if sends else None

    def _note(self, number: int, frame: Optional[FrameType]) -> None:
        self._is_signalled = True

    def _agree(self) -> None:
        """End training if any rank had been signalled at the last batch; at the start of a batch, on all ranks."""
        if self._heard():
            self._answer()
            raise SIGTERMException
        self._notes.hand_in(self._is_signalled)

    def _answer(self) -> None:
        """Have Lightning's handler do its work, on all ranks at once, so that what it exchanges meets."""
        self._trainer.strategy.barrier()
        lightnings = self._trainer._signal_connector._sigterm_notifier_fn  # where it could not be registered
        handler: Any = self._replaced if callable(self._replaced) else lightnings
        handler(signal.SIGTERM, None)

    def _heard(self) -> bool:
        with suppress(RuntimeError):  # a rank has died: the exchange that comes next says so, and in which group
            return self._notes.last()
        return False

    def close(self, has_ended: bool) -> None:
        """Give back what was replaced.

        Args:
            has_ended: whether training has come to its end, on all ranks.
        """
        if has_ended:
            is_known = self._heard()
            self._notes.hand_in(self._is_signalled)
            if self._heard() or is_known:
                self._answer()
        if self._has_handler:
            signal.signal(signal.SIGTERM, self._replaced)
        del self._trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor
        self._notes.close()
