import os
import warnings
from functools import cache, partial
from unittest import mock

import torch
import torch.distributed as dist
from lightning_fabric.utilities import registry
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.accelerators import CUDAAccelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, debug
from torch.utils.data import DataLoader, Dataset

from lightning_sparse.engine.adam import memory
from lightning_sparse.functional.elements import local_tensor
from tests.helpers.devices import DEVICE

# Lightning's warnings with this torch, and properties of tests: few workers, few batches, one data set on several
# ranks.
EXPECTED_WARNINGS = (
    ".*LeafSpec.*is deprecated.*",
    ".*does not have many workers.*",
    ".*number of training batches.*is smaller than the logging interval.*",
    ".*`Trainer.fit` stopped.*",
    ".*Using `DistributedSampler` with the dataloaders.*",
    ".*`training_step` returned `None`.*",
    ".*was called without a model.*",
    ".*attempting to slice a submesh.*",  # torch 2.9: Lightning users slice the mesh of one replica by name
    ".*TypedStorage is deprecated.*",  # torch 2.9: saving of shards
    # On a GPU, DDPStrategy wraps the model on another stream than the stream of the forward.
    ".*AccumulateGrad node's stream does not match.*",
    ".*GPU available but not used.*",  # tests of the CPU
    # Adam and Muon; see tests/strategy/test_optimizers.py.
    ".*adapts to dense gradients.*",
    ".*`srun` command is available.*",  # machines with SLURM
)
_entry_points = cache(registry.entry_points)


class SharedGPU(CUDAAccelerator):
    """The first GPU for every rank, because Lightning requires one device per rank."""

    @staticmethod
    def parse_devices(devices):
        return [0] * devices


def accelerator():
    return "cpu" if DEVICE.type == "cpu" else SharedGPU()


class Rows(Dataset[Tensor]):
    def __init__(self, count, width=32):
        self.rows = torch.randn(count, width, generator=torch.Generator().manual_seed(7))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Small(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))

    def training_step(self, batch, batch_index):
        loss = (self.network(batch) - batch).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_index):
        self.log("val_loss", (self.network(batch) - batch).square().mean(), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self):
        return DataLoader(Rows(128), batch_size=4)

    def val_dataloader(self):
        return DataLoader(Rows(16), batch_size=4)

    test_dataloader = val_dataloader


class Failing(Small):
    def training_step(self, batch, batch_index):
        if batch_index == 3:
            raise ZeroDivisionError("of the user's")
        return super().training_step(batch, batch_index)


class Adversaries(Small):
    """Two optimizers that toggle in each batch. The first has ``losses`` losses with a backward each."""

    def __init__(self, losses=1):
        super().__init__()
        self.automatic_optimization = False
        self.losses = losses
        self.other = nn.Linear(32, 8)

    def training_step(self, batch, batch_index):
        losses = [
            [self.network(batch).square().mean() for _ in range(self.losses)],
            [self.other(batch).square().mean()],
        ]
        for optimizer, some in zip(self.optimizers(), losses):
            self.toggle_optimizer(optimizer)
            for loss in some:
                self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD(each.parameters(), lr=0.01) for each in (self.network, self.other)]


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
        self.register_buffer("teacher", torch.randn(16, 4, generator=torch.Generator().manual_seed(1)) / 4)

    def forward(self, step, rank, scale=1.0):
        rows = torch.randn(32, 16, generator=torch.Generator().manual_seed(10 * step + rank)).to(self.teacher)
        return (self.network(rows * scale) - (rows @ self.teacher) * scale).square().mean()


class WithSGD(Small):
    def __init__(self, one_cycle=False, **arguments):
        super().__init__()
        self.one_cycle = one_cycle
        self.arguments = {"lr": 0.1, "momentum": 0.9, **arguments}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), **self.arguments)
        if not self.one_cycle:
            return optimizer
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class WithAdam(Small):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


OPTIMIZERS = {"SGD": partial(torch.optim.SGD, lr=0.01, momentum=0.9), "AdamW": partial(torch.optim.AdamW, lr=1e-3)}


def with_optimizer(kind, module=Small, **arguments):
    model = module()
    model.configure_optimizers = lambda: kind(model.parameters(), **arguments)
    return model


def learning_in_turns(learns=True):
    """Refresh second moments of small models in turns, as for large models, if ``learns``."""
    return mock.patch.object(memory, "_MIN_ELEMENTS", 1 if learns else memory._MIN_ELEMENTS)


def expect(*more):
    for message in (*EXPECTED_WARNINGS, *more):
        warnings.filterwarnings("ignore", message=message)


def make_trainer(rank, strategy, local_world_size=None, **arguments):
    devices = dist.get_world_size() if local_world_size is None else local_world_size
    os.environ.update(LOCAL_RANK=str(rank % devices), NODE_RANK=str(rank // devices))
    expect()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    nodes = dist.get_world_size() // devices
    defaults = {"accelerator": accelerator(), "devices": devices, "num_nodes": nodes, "max_epochs": 1}
    # Each Trainer reads the metadata of all packages for callbacks, a tenth of the time of a short fit.
    with mock.patch.object(registry, "entry_points", _entry_points):
        return Trainer(strategy=strategy, **{**quiet, **defaults, **arguments})


def run_fit(rank, strategy, model=None, **arguments):
    trainer = make_trainer(rank, strategy, **arguments)
    trainer.fit(Small() if model is None else model)
    return trainer


def weights(module):
    return {name: local_tensor(parameter).clone() for name, parameter in module.named_parameters()}


def forget_groups():
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    if hasattr(debug, "_clear_sharding_prop_cache"):
        debug._clear_sharding_prop_cache()
    else:  # torch 2.9
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
