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

    Strategies add this callback, in place of Lightning's handlers. Lightning's handlers save and communicate
    in the middle of a step. Since Lightning 2.6, all ranks also synchronize in every batch (Lightning's issue 21487).
    Here, the signal handler only sets a flag. The ranks compare flags every few seconds, after a step. To save and
    requeue, all ranks then call Lightning's handler.
    """

    SECONDS = 5.0  # approximate seconds between two comparisons of flags

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._received: set[int] = set()
        self._before: Any = signal.getsignal(signal.SIGTERM)  # the user's handler; Lightning sets handlers later

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        environment: Any = getattr(trainer.strategy, "cluster_environment", None)
        requeues = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
        self._requeue_signal: Any = environment.requeue_signal if requeues else None  # SLURM's signal, or None
        if threading.current_thread() is threading.main_thread():  # Lightning restores all handlers after the fit
            signal.signal(signal.SIGTERM, self._receive)
            if self._requeue_signal is not None:
                self._requeue: Any = signal.signal(self._requeue_signal, self._receive)
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        self._step, self._next_step, self._began = trainer.global_step, trainer.global_step + 1, perf_counter()

    def _receive(self, number: int, frame: Optional[FrameType]) -> None:
        self._received.add(number)
        if number == signal.SIGTERM and callable(self._before):
            self._before(number, frame)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        if (step := trainer.global_step) < self._next_step:  # global_step is constant while gradients accumulate
            return
        seconds = (perf_counter() - self._began) / (step - self._step)
        ends, requeues, seconds = self._compare(trainer, seconds)
        self._step, self._next_step, self._began = step, step + max(1, round(self.SECONDS / seconds)), perf_counter()
        if requeues:
            self._received.discard(self._requeue_signal)
            self._requeue(self._requeue_signal, None)
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
