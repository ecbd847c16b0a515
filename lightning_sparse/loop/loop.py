"""Start and end of a training that exchanges gradients, for strategies, Fabric and plain loops."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Optional

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_sparse.compressors.base import layout_of
from lightning_sparse.engine import Engine
from lightning_sparse.engine.replicas import Replicas
from lightning_sparse.engine.settings import Settings
from lightning_sparse.engine.step.reducer import Wrapper
from lightning_sparse.engine.step.topology import named_module
from lightning_sparse.loop.checks import check_momentum, check_optimizers
from lightning_sparse.loop.optimizer_states import states_of
from lightning_sparse.loop.optimizers import can_correct, warn_of_adaptive
from lightning_sparse.loop.summary import RESUMES_ALONE, describe
from lightning_sparse.loop.training import ONE_REPLICA, Log, RuntimeOptions, Training, warn_user
from lightning_sparse.schedule import Plan


class Loop:
    """Settings and current training (or ``None``) of a strategy, or of one model in Fabric or a plain loop."""

    def __init__(self, settings: Settings, log: Log) -> None:
        self.settings = settings  # checked user settings; ``start`` adds ``adam`` if Adam is corrected
        self._log = log
        self.training: Optional[Training] = None  # ``None`` also while a single process trains without an exchange
        self.optimizers: Sequence[Optimizer] = ()  # optimizers of the current or the last training
        self._scaler: Any = None
        self._finish_with({}, None)

    @property
    def engine(self) -> Optional[Engine]:
        """Engine of the current training, or ``None``."""
        return None if self.training is None else self.training.engine

    @property
    def replicas(self) -> Replicas:
        """Replica manager of the current training, or a no-op manager."""
        return ONE_REPLICA if self.training is None else self.training.replicas

    def start(
        self, ddp: Wrapper, optimizers: Sequence[Optimizer], given: RuntimeOptions, goes_alone: bool = False
    ) -> None:
        """Check the optimizers, and begin a training. A single process compresses only if ``goes_alone``."""
        self.end()
        self._finish_with({}, None)
        self.optimizers, self._scaler = optimizers, given.scaler
        settings = replace(self.settings, adam=None)
        self.settings = settings = settings.correcting_adam() if can_correct(settings, optimizers) else settings
        check_optimizers(settings, optimizers)
        for optimizer in optimizers:
            check_momentum(optimizer, settings.feedback)
        module = named_module(ddp)
        is_alone = dist.get_world_size(ddp.process_group) == 1
        if is_alone and not goes_alone:
            settings.compressor.begin(layout_of(module, 0, 1, next(module.parameters()).device))
            self._log(f"one process, so there is nothing to exchange or compress; on several {describe(settings)}.")
        else:
            self._log(f"{describe(settings)}.")
            if is_alone:
                self._log(RESUMES_ALONE)
            self.training = Training(ddp, optimizers, settings, given, self._log)
        warn_of_adaptive(settings, optimizers, warn_user)

    def reset_residuals(self) -> None:
        """Set residuals and momentum to zero, like :meth:`~lightning_sparse.SparseDDPStrategy.reset_residuals`."""
        if self.training is not None:
            self.training.reset_residuals()

    def compression_stats(self) -> dict[str, float]:
        """Return this rank's statistics of the last step's exchange, and of all exchanges, as plain floats.

        :meth:`~lightning_sparse.SparseDDPStrategy.compression_stats` lists the names. In a plain loop, the step time in
        ``exposed_share`` is all time between two steps, except inside ``shared_model()``. The dictionary is empty
        before the first step, and on one process. After training, the dictionary holds the last values.
        """
        return dict(self._final_stats) if self.engine is None else self.engine.compression_stats()

    def plan(self) -> Optional[Plan]:
        """Return this rank's bucket plan. After training, return the last plan, or ``None`` if there was no plan."""
        return self._final_plan if self.engine is None else self.engine.planner.plan

    def state(self) -> Optional[dict[str, Any]]:
        """Return this rank's compression state without copies. After training, return the stored state or ``None``.

        All ranks must call this between two steps, because ranks compare some tensors.
        """
        training = self.training
        state = self.final_state if training is None else training.state(together=True)
        if state is None or not self.settings.replicas_diverge:
            return state
        # The model's file holds the optimizer states of one rank, but diverging replicas have different states.
        state = {**state, "optimizers": states_of(self.optimizers if training is None else training.optimizers)}
        return state if self._scaler is None else {**state, "scaler": self._scaler.state_dict()}

    def _finish_with(self, stats: Mapping[str, float], plan: Optional[Plan]) -> None:
        self._final_stats, self._final_plan = dict(stats), plan
        self.final_state: Optional[dict[str, Any]] = None

    def end(self, has_failed: bool = False, keeps_state: bool = False) -> None:
        """End the training. If ``keeps_state``, store the final state on the CPU. A second call does nothing.

        ``has_failed`` means that this rank has raised an error.
        """
        if (training := self.training) is None:
            return
        # After an error, an exchange may block the GPU forever, so this method must not wait for the GPU.
        can_ask = not has_failed or training.device.type == "cpu"
        self._finish_with(*((self.compression_stats(), self.plan()) if can_ask else ({}, None)))
        is_whole = training.close(self._final_stats, has_failed)
        self.training, self.optimizers = None, training.optimizers
        if is_whole and can_ask and keeps_state:  # copies to the CPU, because residuals are as large as the model
            self.final_state = tree_map_only(Tensor, lambda each: each.detach().cpu(), training.state())
        vars(training).clear()  # breaks a reference cycle that would hold model-sized tensors until garbage collection
