"""An epoch goes on where ranks of another number have left it: no sample is lost, none is seen twice."""

from collections import Counter

import pytest
import torch
from pytorch_lightning import LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_sparse import SparseDDPStrategy
from tests.helpers.trainers import make_trainer

SAMPLES = 60


class Numbers(Dataset[int]):
    def __init__(self, count=SAMPLES):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return index


class Seen(LightningModule):
    """A model that notes each sample that it sees, by epoch, and saves after a number of batches of an epoch."""

    def __init__(self, save_at, path, arguments):
        super().__init__()
        torch.manual_seed(0)
        self.save_at, self.path = save_at, path
        self.arguments = {"batch_size": 2, "shuffle": True, **arguments}
        self.layer = nn.Linear(4, 4)
        self.seen: list[tuple[int, int]] = []
        self.validated: list[int] = []

    def training_step(self, batch, batch_index):
        self.seen += [(self.current_epoch, int(each)) for each in batch]
        rows = batch.float()[:, None].expand(-1, 4) / SAMPLES
        return self.layer(rows).square().mean()

    def validation_step(self, batch, batch_index):
        if not batch_index:
            self.validated.append(self.current_epoch)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if (self.current_epoch, batch_idx + 1) == self.save_at:
            self.trainer.save_checkpoint(self.path)
            self.trainer.should_stop = True
            self.trainer.fit_loop.epoch_loop.max_steps = self.trainer.global_step  # here, and not at the epoch's end

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return DataLoader(Numbers(self.arguments.pop("count", SAMPLES)), **self.arguments)

    def val_dataloader(self):
        return DataLoader(Numbers(4), batch_size=2)


def see(rank, settings, trainer, loader, save_at, path, source):
    """Fit two epochs, from a checkpoint if given, up to the save; return what this rank saw and when it validated."""
    strategy = SparseDDPStrategy(**{"compressor": "topk", "density": 0.5, **settings})
    module = Seen(save_at, path, loader)
    arguments = {"max_epochs": 2, "num_sanity_val_steps": 0, "limit_val_batches": 0, **trainer}
    make_trainer(rank, strategy, **arguments).fit(module, ckpt_path=source)
    return module.seen, module.validated


def see_in_turn(pools, folder, turns, settings=None, trainer=None, loader=None):
    """Train by as many ranks as each turn has, up to its save; return how often each epoch has seen each sample."""
    source, epochs = None, {0: Counter[int](), 1: Counter[int]()}
    for turn, (ranks, save_at) in enumerate(turns):
        path = str(folder / f"{turn}.ckpt")
        for seen, _ in pools[ranks].run(see, settings or {}, trainer or {}, loader or {}, save_at, path, source):
            for epoch, sample in seen:
                epochs[epoch][sample] += 1
        source = path
    return epochs


ALL = Counter(range(SAMPLES))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("epoch", "settings", "trainer", "loader"),
    [
        (0, {}, {}, {}),
        (1, {}, {}, {}),
        (0, {}, {}, {"shuffle": False}),
        (1, {"local_steps": 2}, {}, {}),
        (0, {"compressor": "dense", "density": None}, {"limit_val_batches": 1, "val_check_interval": 0.5}, {}),
        (1, {}, {"accumulate_grad_batches": 2}, {"batch_size": 1}),
        (0, {}, {"reload_dataloaders_every_n_epochs": 1}, {}),
        (1, {}, {"reload_dataloaders_every_n_epochs": 1}, {}),
    ],
)
def test_each_epoch_is_the_data_set_when_the_number_of_ranks_changes(pools, tmp_path, epoch, settings, trainer, loader):
    # Of 60 samples 3 ranks take 24; to 2 ranks these are 6 batches of 2, and 3 more are 36; 24 are left for 3 ranks.
    pace = 2 // loader.get("batch_size", 2)
    turns = [(3, (epoch, 4 * pace)), (2, (epoch, 9 * pace)), (3, None)]
    epochs = see_in_turn(pools, tmp_path, turns, settings, trainer, loader)
    assert epochs[0] == epochs[1] == ALL


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("loader", "turns", "twice", "left_out"),
    [
        ({}, [(3, (0, 5)), (4, None)], 2, 0),  # 30 are left, and 4 ranks take 8 each
        ({"drop_last": True}, [(3, (0, 5)), (4, None)], 2, 0),
        ({"batch_size": 4, "drop_last": True}, [(3, (0, 2)), (2, None)], 0, 4),  # 36: 18 each, of which 16 are batches
        ({"batch_size": 7, "drop_last": True}, [(2, (0, 4)), (3, None)], 0, 4),  # whose epoch is over
        ({}, [(1, (0, 7)), (3, None)], 2, 0),  # 46: 16 each, and two of them are padding
        ({}, [(3, (0, 10)), (2, None)], 0, 0),  # a save at the end of an epoch
        ({}, [(2, (0, 3)), (2, None)], 0, 0),
    ],
)
def test_what_does_not_divide_is_padded_or_dropped_at_the_end_as_ever(pools, tmp_path, loader, turns, twice, left_out):
    epochs = see_in_turn(pools, tmp_path, turns, loader=loader)
    assert sum((epochs[0] - ALL).values()) == twice
    assert sum((ALL - epochs[0]).values()) == left_out
    assert epochs[1]


def see_numbers(rank, path, limits):
    """Fit an epoch of so many batches up to a save after four, then go on with another limit; return the numbers."""
    for limit, save_at, source in zip(limits, ((0, 4), None), (None, path)):
        module, numbers = Seen(save_at, path, {}), []
        module.on_train_batch_start = lambda batch, number, numbers=numbers: numbers.append(number)
        arguments = {"max_epochs": 1, "limit_train_batches": limit, "limit_val_batches": 0}
        make_trainer(rank, SparseDDPStrategy("topk", 0.5), **arguments).fit(module, ckpt_path=source)
    return numbers


@pytest.mark.parametrize("limits", [(8, 13), (13, 6), (8, 3)])
def test_another_limit_of_batches_holds_for_the_epoch_in_which_training_goes_on(pools, tmp_path, limits):
    for numbers in pools[2].run(see_numbers, str(tmp_path / "mid.ckpt"), limits):
        assert numbers == list(range(4, limits[1]))  # as with DDP


def see_again(rank, path, source):
    """Fit by a loader with a sampler of its own, and once more by the same; return what that has seen."""
    sampler = DistributedSampler(Numbers(), 2, rank)
    loader = DataLoader(Numbers(), batch_size=2, sampler=sampler)
    for ckpt_path in (source, None):
        module = Seen((0, 3) if source is None else None, path, {})
        arguments = {"max_epochs": 1, "num_sanity_val_steps": 0, "limit_val_batches": 0}
        make_trainer(rank, SparseDDPStrategy("topk"), **arguments).fit(module, loader, ckpt_path=ckpt_path)
    return module.seen


def test_a_training_that_follows_begins_its_epoch_anew(pools, tmp_path):
    path = str(tmp_path / "last.ckpt")
    pools[2].run(see_again, path, None)
    seen = [each for rank in pools[2].run(see_again, path, path) for each in rank]
    assert Counter(sample for _, sample in seen) == ALL
