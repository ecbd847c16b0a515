import math
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Optional
from unittest.mock import patch

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor

from lightning_sparse import LocalSteps, SparseDDPStrategy
from tests.compatibility.modules import Plain
from tests.helpers.devices import DEVICE
from tests.helpers.trainers import make_trainer, weights

ROUND = 2  # local steps
# The densities select some elements of a small model, but not all. The first four strategies train in different ways
# and run with every feature, and each of the others with every fourth.
STRATEGIES = {
    "sparse_topk": {"compressor": "topk", "density": 0.05},
    "sparse_auto": {"compressor": "lags", "density": 0.05, "schedule": "auto"},
    "sparse_a2sgd": {"compressor": "a2sgd"},
    "sparse_loco": {
        "compressor": "topk",
        "density": 0.05,
        "wire": "2bit",
        "local_steps": LocalSteps(ROUND, residual_decay=0.95),
    },
    "ddp": None,
    "sparse_exdyna": {"compressor": "exdyna", "density": 0.05},
    "sparse_sdagc": {"compressor": "sdagc", "density": 0.001},
    "sparse_omgs": {"compressor": "omgs", "density": 0.05},
}
IN_EVERY_ROW = tuple(STRATEGIES)[:4]

NEEDS_GPU = "SyncBatchNorm"


class Batch(NamedTuple):
    total: float  # sum of the elements
    loss: float  # loss on this rank
    step: int  # optimizer steps so far
    norm: float  # norm of the optimizers' gradients
    stats: dict[str, float]  # statistics of the strategy; empty with DDP
    is_dense: bool  # whether DDP ran the step
    checksum: float  # sum of all parameters
    logged: dict[str, float]
    buffers: dict[str, list[float]]

    @property
    def is_whole(self):
        """Return whether the step was dense, as ``sparse_auto`` is before a change to DDP."""
        return self.stats["wire_bytes"] >= self.stats["dense_bytes"]


class Update(NamedTuple):
    rate: float
    norm: float


class Outcome(NamedTuple):
    """Outcome of a cell on a rank.

    ``kept`` has the kinds of the first optimizer's state, ``notes`` the notes of the feature.
    """

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    batches: list[Batch]
    updates: list[Update]
    kept: set[str]
    notes: dict[str, Any]


class Watch(Callback):
    def __init__(self):
        self.batches = []
        self.updates = []
        self.kept = set()

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.updates.append(Update(optimizer.param_groups[0]["lr"], norm_of_gradients(pl_module)))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        strategy = trainer.strategy
        is_ours = isinstance(strategy, SparseDDPStrategy)
        self.batches.append(
            Batch(
                float(batch.sum()),
                float(outputs["loss"]) if outputs else math.nan,
                trainer.global_step,
                norm_of_gradients(pl_module),
                strategy.compression_stats() if is_ours else {},
                is_ours and strategy.training is not None and strategy.engine.reducer.is_dense,
                float(sum(parameter.detach().double().sum() for parameter in pl_module.parameters())),
                {name: float(value) for name, value in trainer.callback_metrics.items()},
                buffers_of(pl_module),
            )
        )

    def on_train_end(self, trainer, *args):
        self.kept = {kind for state in trainer.optimizers[0].state.values() for kind in state}


def buffers_of(module):
    return {name: buffer.flatten().tolist() for name, buffer in module.named_buffers()}


def norm_of_gradients(module):
    gradients = [parameter.grad.float() for parameter in module.parameters() if parameter.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients))


class TakingTurns:
    """Replace the choice by measured times: two plain DDP steps of six, after dense steps."""

    def __init__(self, engine, *args):
        self.wants_dense = False
        self.verdict = "took turns"
        self._engine = engine
        self._step = 0

    def end_step(self):
        self._step += 1
        self._engine.densities.sends_all = self._step % 6 == 2
        self.wants_dense = self._step % 6 in (3, 4)


@contextmanager
def changing_hands():
    """Let ``sparse_auto`` change the backend now and then, independent of times."""
    with patch("lightning_sparse.loop.training.AutoBackend", TakingTurns):
        yield


def nothing(folder):
    return {}


def fit(trainer, module):
    trainer.fit(module)


class Feature(NamedTuple):
    name: str  # first column of the table
    check: Callable[[Outcome, Outcome], None]  # called with the outcomes of both ranks
    trainer: Callable[[str], dict[str, Any]] = nothing  # Trainer arguments for a folder
    module: Callable[[], LightningModule] = Plain
    strategy: Mapping[str, Any] = {}  # strategy arguments besides those of the column
    use: Callable[[Trainer, Any], Optional[dict[str, Any]]] = fit  # run of the Trainer; returns notes
    refusals: Mapping[str, str] = {}  # part of the error message by strategy
    needs_gpu: bool = False  # whether every strategy raises an error on the CPU
    untrained: frozenset[str] = frozenset()  # parameters without training
    sent_whole: float = 0.0  # share of dense elements in every step

    def refusal_by(self, strategy):
        """Return part of a strategy's error message on this device, or ``None`` if the feature works."""
        if strategy not in self.refusals and self.needs_gpu:
            return NEEDS_GPU if DEVICE.type == "cpu" else None
        return self.refusals.get(strategy)


def build_strategy(name, arguments):
    settings = STRATEGIES[name]
    if name in ("ddp", "sparse_a2sgd", "sparse_loco"):  # no delayed gradients, and nothing to correct
        arguments = {key: value for key, value in arguments.items() if key != "optimizer_correction"}
    if settings is None:
        return DDPStrategy(**{"find_unused_parameters": True, **arguments})  # only DDP needs the flag
    return SparseDDPStrategy(**{**settings, **arguments})


def run_cell(rank, strategy, feature, folder):
    watch, module = Watch(), feature.module()
    arguments = feature.trainer(folder)
    callbacks = [*arguments.pop("callbacks", []), watch]
    trainer = make_trainer(rank, build_strategy(strategy, feature.strategy), callbacks=callbacks, **arguments)
    before = weights(module)
    with changing_hands():
        notes = feature.use(trainer, module)
    return Outcome(before, weights(module), watch.batches, watch.updates, watch.kept, notes or {})
