"""The Trainer's unwrapped model has the same buffers as behind DDP."""

import inspect
from functools import partial

import pytest
import torch
from torch import nn

from tests.helpers.fits import fits
from tests.helpers.resuming import Numbered

WHOLE = {"compressor": "topk", "density": 1.0, "warmup_steps": 0}


class Counted(Numbered):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.network = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
        self.notes = []

    def training_step(self, batch, batch_index):
        self.note()
        return super().training_step(batch, batch_index)

    def validation_step(self, batch, batch_index):
        self.note()
        self.log("loss", self.network(self.rows(batch_index)).square().mean(), sync_dist=True)

    def note(self):
        self.notes.append(torch.cat([self.network[1].running_mean, self.network[1].running_var]).clone())


@pytest.mark.parametrize("accumulated", [1, 2])
def test_buffers_are_those_of_ddp_in_each_step(pair, accumulated):
    limits = {"limit_val_batches": 2, "val_check_interval": 3, "num_sanity_val_steps": 1}
    more = {"accumulate_grad_batches": accumulated, **limits}
    ours, ddp = (fits(pair, Counted, settings, **more) for settings in (WHOLE, None))
    for one, other in zip(ours, ddp):
        assert len(one.notes) == len(other.notes) > 12
        assert all(map(torch.equal, one.notes, other.notes))


@pytest.mark.parametrize("name", ["broadcast_buffers", "forward_sync_buffers"])
def test_buffers_may_stay_each_ranks_own(pair, name):
    if name not in inspect.signature(nn.parallel.DistributedDataParallel).parameters:
        pytest.skip("this torch has it not")
    first, second = fits(pair, Counted, {**WHOLE, name: False})
    assert torch.equal(first.notes[0], second.notes[0])
    assert not any(map(torch.equal, first.notes[1:], second.notes[1:]))


class Asked(Numbered):
    def on_train_batch_start(self, batch, batch_index):
        assert self.trainer.model is self.trainer.strategy.model is self


@pytest.mark.parametrize("settings", [WHOLE, {**WHOLE, "local_steps": 2}], ids=["each step", "rounds"])
def test_the_model_is_the_lightning_module(pair, settings):
    fits(pair, partial(Asked), settings)
