"""All ranks issue the collectives of all communicators in one order, independent of speed and use.

NCCL may deadlock if two ranks launch two collectives in different orders.
"""

import time
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse.loop.training as training_module
from lightning_sparse import AdamCorrection
from lightning_sparse.compressors import A2SGD
from lightning_sparse.engine.settings import Settings
from lightning_sparse.loop.checks import in_one_order
from tests.compatibility.modules import NormTogether, SumOverRanks
from tests.helpers.fits import strategy_of
from tests.helpers.issued import recording, stuck_at
from tests.helpers.resuming import Numbered, fit_numbered
from tests.helpers.tiers import exhaustive

SLOW_BACKWARD, SLOW_WORKER = 0, 1  # ranks
SECONDS, LONG_SECONDS = 0.002, 0.02


def dawdle(module, seconds):
    next(module.children()).register_forward_pre_hook(lambda layer, given: time.sleep(seconds))
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: time.sleep(seconds))


class Partly(Numbered):
    def __init__(self, optimizer="SGD"):
        super().__init__()
        self.optimizer = optimizer
        self.network = nn.Sequential(nn.Linear(32, 64), self.norm(), nn.ReLU(), nn.Linear(64, 32))
        self.apart = nn.Linear(32, 32)

    def norm(self):
        return nn.BatchNorm1d(64)

    def loss(self, batch_index):
        rows = self.rows(batch_index)
        used = self.apart(rows) if self.global_rank == 0 and batch_index != 2 else rows
        return (self.network(used) - rows).square().mean()

    def training_step(self, batch, batch_index):
        loss = self.loss(batch_index)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_index):
        self.log("val_loss", self.loss(batch_index), sync_dist=True)

    def build(self, parameters):
        if self.optimizer == "AdamW":
            return torch.optim.AdamW(parameters, lr=0.01)
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def configure_optimizers(self):
        return self.build(self.parameters())


class Twice(Partly):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.automatic_optimization = False

    def training_step(self, batch, batch_index):
        for number, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            for _ in range(1 + number):
                self.manual_backward(super().training_step(batch, batch_index))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [
            self.build([*self.apart.parameters(), *self.network[0].parameters()]),
            self.build(self.network[3:].parameters()),
        ]


class Freezing(Partly):
    def on_train_batch_start(self, batch, batch_index):
        self.network[0].requires_grad_(batch_index not in (2, 3))


class Embedded(Partly):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.rows_of = nn.Embedding(8, 32)

    def loss(self, batch_index):
        return super().loss(batch_index) + self.rows_of(torch.tensor([self.global_rank, batch_index])).square().mean()


class SyncedOnProcessors(NormTogether, nn.SyncBatchNorm):
    """SyncBatchNorm for the CPU, which communicates in backward."""


class SyncedEmbedded(Embedded):
    def norm(self):
        return SyncedOnProcessors(64)


class OwnCollective(Partly):
    def loss(self, batch_index):
        hidden = self.network[:3](self.rows(batch_index))
        return self.network[3](SumOverRanks.apply(hidden)).square().mean()


def fit(rank, module, settings, arguments, seconds, backend):
    model, strategy = module(), strategy_of(settings)
    if rank == SLOW_BACKWARD:
        dawdle(model, seconds)
    # The handle raises an error for a SyncBatchNorm on the CPU.
    check = mock.patch.object(DistributedDataParallel, "_passing_sync_batchnorm_handle")
    claim = mock.patch.object(training_module, "backend_of", return_value=backend) if backend else nullcontext()
    more = {"max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 0, **arguments}
    with check, claim, recording(seconds if rank == SLOW_WORKER else 0) as issued:
        fit_numbered(rank, strategy, model, **more)
    assert strategy.settings.overlaps_backward == settings.get("overlaps_backward", True)  # for a later fit
    return issued


class Case(NamedTuple):
    settings: dict[str, Any]
    module: Any = Partly
    ranks: int = 2
    arguments: Mapping[str, Any] = MappingProxyType({})

    def issued(self, pools, seconds=SECONDS, backend=None):
        given = (self.module, self.settings, dict(self.arguments), seconds, backend)
        recordings = pools[self.ranks].run(fit, *given)
        assert all(len({each.communicator for each in issued}) > 1 for issued in recordings)
        return recordings


def orders_differ(fit_once):
    """Return whether orders differ in one of a few fits. A busy machine shows a possible difference only sometimes."""
    return any(stuck_at(fit_once()) is not None for _ in range(4))


def corrected(settings):
    return {**settings, "optimizer_correction": AdamCorrection(2, 1, 2)}


LAYERS = {"compressor": "lags", "density": 0.1, "schedule": "layerwise"}
LARGEST = {"compressor": "topk", "density": 0.1}
NODES = {"local_world_size": 2}
ADAMW = partial(Partly, "AdamW")
IN_ONE_ORDER = {
    "LAGS": Case(LAYERS),
    "LAGS, AdamW clipped": Case(corrected(LAYERS), ADAMW, arguments={"gradient_clip_val": 0.1}),
    "several backwards": Case(LAYERS, Twice, arguments={"limit_train_batches": 3}),
    "an embedding, after backward": Case({**LAYERS, "overlaps_backward": False}, SyncedEmbedded),
    "a user's collective, after backward": Case({**LAYERS, "overlaps_backward": False}, OwnCollective),
    "ExDyna": Case({"compressor": "exdyna", "density": 0.1, "schedule": "layerwise"}),
    "auto": Case({"compressor": "lags", "density": 0.1, "schedule": "auto"}),
    "two levels": Case({**LARGEST, "schedule": "layerwise", "levels": 2}, Partly, 4, NODES),
    "rounds": Case({**LARGEST, "local_steps": 3}),
}
MORE_IN_ONE_ORDER = {
    "batches accumulated": Case(LAYERS, arguments={"accumulate_grad_batches": 2}),
    "a layer is frozen": Case(LAYERS, Freezing),
    "top-k by owners": Case({**LARGEST, "exchange": "owners"}),
    "dense": Case({"compressor": "dense", "schedule": "layerwise"}),
    "A2SGD": Case({"compressor": A2SGD(2)}),
    "SDAGC": Case({"compressor": "sdagc", "density": 0.1, "schedule": "layerwise"}),
    "OMGS": Case({"compressor": "omgs", "density": 0.1}),
    "DGC": Case({"compressor": "dgc", "density": 0.1, "warmup_steps": 0}),
    "QSGD": Case({"compressor": "qsgd", "schedule": "layerwise"}),
    "two levels, AdamW": Case(corrected({**LARGEST, "levels": 2}), ADAMW, 4, NODES),
}
CASES = [*IN_ONE_ORDER, *exhaustive(MORE_IN_ONE_ORDER)]


@pytest.mark.parametrize("name", CASES)
def test_ranks_issue_all_collectives_in_one_order(pools, name):
    assert stuck_at({**IN_ONE_ORDER, **MORE_IN_ONE_ORDER}[name].issued(pools)) is None


def test_validation_and_checkpoints_come_in_one_order(pools, tmp_path):
    keepers = [ModelCheckpoint(tmp_path, monitor="val_loss"), EarlyStopping("val_loss")]
    more = {"callbacks": keepers, "enable_checkpointing": True, "limit_val_batches": 1, "val_check_interval": 2}
    assert stuck_at(Case(LAYERS, arguments=more).issued(pools)) is None


THREE = {"limit_train_batches": 3}


def test_what_meets_the_exchange_on_another_thread_waits_for_it_on_nccl(pools):
    case = Case(LAYERS, SyncedEmbedded, arguments=THREE)
    assert orders_differ(lambda: case.issued(pools, LONG_SECONDS))
    assert stuck_at(case.issued(pools, LONG_SECONDS, "nccl")) is None


class Cut(nn.Linear):
    def set_requires_gradient_sync(self, *arguments):
        """Do nothing."""


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(2), nn.SyncBatchNorm(2), Cut(2, 2)], ids=["", "SyncBatchNorm", "FSDP"]
)
@pytest.mark.parametrize("overlaps_backward", [True, False])
def test_only_on_nccl_and_where_something_meets_it_is_an_overlap_left_out(overlaps_backward, layer, backend):
    given = Settings.of("topk", 0.1, overlaps_backward=overlaps_backward)
    kept = in_one_order(given, nn.Sequential(nn.Linear(2, 2), layer), backend)
    is_nccl, meets = backend == "nccl", isinstance(layer, (nn.SyncBatchNorm, Cut))
    assert kept.overlaps_backward == (overlaps_backward and not (is_nccl and meets))
    assert given.overlaps_backward == overlaps_backward
