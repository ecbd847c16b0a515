"""Stop or requeue all ranks after the same step, on SIGTERM or on SLURM's signal before the time limit."""

import signal
import threading
from time import perf_counter
from types import FrameType
from typing import Any, Optional

import torch
from typing_extensions import override

from lightning_sparse.strategy.lightning import Callback, LightningModule, SIGTERMException, SLURMEnvironment, Trainer


class GracefulStop(Callback):
    """End or requeue all ranks after the same step, when one rank receives a signal.

    Strategies add this callback for a fit, in place of Lightning's handlers. Lightning's handlers save and communicate
    in the middle of a step. Since Lightning 2.6, all ranks also synchronize in every batch (Lightning's issue 21487).
    Here, the signal handler only sets a flag. The ranks compare flags every few seconds, after a step. To save and
    requeue, all ranks then call Lightning's handler.
    """

    SECONDS = 5.0  # approximate seconds between two comparisons of flags

    def __init__(self) -> None:
        self._received: set[int] = set()
        self._replaced: dict[int, Any] = {}
        self._before: Any = signal.getsignal(signal.SIGTERM)  # the user's handler; Lightning sets handlers later
        self._requeue_signal = 0  # number of SLURM's signal, or 0 to never requeue

    def _register(self, trainer: Trainer) -> None:
        environment = getattr(trainer.strategy, "cluster_environment", None)
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            self._requeue_signal = environment.requeue_signal or 0
        if not self._replaced and threading.current_thread() is threading.main_thread():
            for number in {signal.SIGTERM, self._requeue_signal or signal.SIGTERM}:
                self._replaced[number] = signal.signal(number, self._receive)

    def _receive(self, number: int, frame: Optional[FrameType]) -> None:
        self._received.add(number)
        if number == signal.SIGTERM and callable(self._before):
            self._before(number, frame)

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._register(trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._register(trainer)
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        self._step, self._next_step, self._began = trainer.global_step, trainer.global_step + 1, perf_counter()

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        if (step := trainer.global_step) < self._next_step:  # global_step is constant while gradients accumulate
            return
        seconds = (perf_counter() - self._began) / (step - self._step)
        ends, requeues, seconds = self._compare(trainer, seconds)
        self._step, self._next_step, self._began = step, step + max(1, round(self.SECONDS / seconds)), perf_counter()
        if requeues:
            self._received.discard(self._requeue_signal)
            self._replaced[self._requeue_signal](self._requeue_signal, None)
        if ends:
            raise SIGTERMException

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._compare(trainer, 0.0)[0]:
            raise SIGTERMException

    def _compare(self, trainer: Trainer, seconds: float) -> list[float]:
        """Return maxima over ranks: SIGTERM received (0 or 1), requeue signal received (0 or 1), and ``seconds``."""
        own = [float(number in self._received) for number in (signal.SIGTERM, self._requeue_signal)]
        strategy: Any = trainer.strategy
        most = strategy.reduce(torch.tensor([*own, seconds], device=strategy.root_device), reduce_op="max")
        return list(most.tolist())

    def close(self, trainer: Any) -> None:
        """Restore the replaced signal handlers, also after an error."""
        for number, handler in self._replaced.items():
            signal.signal(number, handler)
        trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)
        remove_callback(trainer, self)


def remove_callback(trainer: Any, callback: Callback) -> None:
    """Remove a callback from the Trainer's current list, which users or hyperparameter searches may have replaced."""
    trainer.callbacks = [each for each in trainer.callbacks if each is not callback]
