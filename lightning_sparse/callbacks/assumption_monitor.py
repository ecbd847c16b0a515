"""Watch whether the assumption under which LAGS-SGD converges holds."""

import math

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from torchmetrics import MeanMetric
from typing_extensions import override

from lightning_sparse.callbacks.base import (
    StepObserver,
    engine_of,
    engine_or_none,
    log_scalars,
    parameter_tag,
    sparse_strategy,
)
from lightning_sparse.compressors.base import checked_count
from lightning_sparse.engine import Engine
from lightning_sparse.strategy.lightning import LightningModule, Trainer
from lightning_sparse.strategy.trainer import SparseDDPStrategy

_LIMIT = 1.0


def _mean_on(strategy: SparseDDPStrategy) -> MeanMetric:
    """Return a mean that any rank may ask for by itself: it is of the same numbers on all."""
    return MeanMetric(sync_on_compute=False).to(strategy.root_device)


class AssumptionMonitor(StepObserver):
    """Log ``delta`` of every layer: what a selection leaves over, next to a random one of the same size.

    The convergence proof of LAGS-SGD (arXiv 1911.08727) asks for ``delta <= 1`` in every layer. Logged are
    ``sparse_parameters/delta/<parameter name>`` and the largest, ``sparse/delta``, equal on all ranks; a layer that
    exceeds 1 is named in a warning, once. Such a step costs a dense all-reduce of the gradients, which its
    ``wire_bytes`` count.

    Args:
        every_n_steps: look at every so many steps.

    Attributes:
        means: :class:`torchmetrics.MeanMetric` by parameter name, over the steps looked at since training began.

    Raises:
        ValueError: for an interval below 1; at the start of ``fit``, for a method that does not select.

    Example::

        >>> monitor = AssumptionMonitor(every_n_steps=500)
    """

    def __init__(self, every_n_steps: int = 100) -> None:
        self.every_n_steps = checked_count("every_n_steps", every_n_steps, "steps")
        self.means: dict[str, MeanMetric] = {}
        self._deltas: dict[str, float] = {}
        self._exceeding: set[str] = set()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.means, self._exceeding = {}, set()
        if sparse_strategy(trainer).has_uneven_batches:
            raise ValueError(
                "AssumptionMonitor measures steps of all ranks together, and with local steps ranks have, or may have,"
                " different numbers of batches: remove the callback, or give all ranks as many, of a known length"
            )

    @override
    def before_step(self, trainer: Trainer, engine: Engine) -> None:
        engine.recorder.samples_deltas = True
        self._deltas = {}

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        # A batch may have several steps, and a step several exchanges.
        engine = engine_or_none(trainer)
        if self._looks and engine is not None:
            self._take(engine)

    def _take(self, engine: Engine) -> None:
        for exchange in engine.recorder.last_step:
            if exchange.deltas:
                deltas = zip(exchange.deltas, torch.stack([*exchange.deltas.values()]).tolist())
                self._deltas |= {name: delta for name, delta in deltas if not math.isnan(delta)}

    @override
    def after_step(self, trainer: Trainer, pl_module: LightningModule, strategy: SparseDDPStrategy, step: int) -> None:
        self._take(engine_of(strategy))  # a round is exchanged after the optimizer's step
        deltas = self._deltas
        if not deltas:
            return  # nothing was selected: every gradient was sparse_coo, or plain DDP made the step
        for name, delta in deltas.items():
            self.means.setdefault(name, _mean_on(strategy)).update(delta)
        if trainer.is_global_zero:
            tagged = {parameter_tag("delta", name): delta for name, delta in deltas.items()}
            log_scalars(trainer, {"sparse/delta": max(deltas.values()), **tagged}, step)
            self._warn(deltas, step)

    def _warn(self, deltas: dict[str, float], step: int) -> None:
        exceeding = {name: delta for name, delta in deltas.items() if delta > _LIMIT and name not in self._exceeding}
        if exceeding:
            self._exceeding |= exceeding.keys()
            listed = ", ".join(f"{name} ({delta:.3g})" for name, delta in list(exceeding.items())[:5])
            rank_zero_warn(
                f"in step {step} the selection left more over than a random one of the same size would (delta > 1) in"
                f" {len(exceeding)} layers: {listed}. LAGS-SGD's proof of convergence does not cover that; a higher"
                " density in these layers lowers it"
            )
