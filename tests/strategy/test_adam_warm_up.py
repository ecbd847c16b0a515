from functools import partial

import pytest
import torch
from torch import nn

from lightning_sparse import AdamCorrection
from lightning_sparse.testing.tensors import assert_same
from tests.helpers.fits import fits, one_model
from tests.helpers.resuming import Numbered
from tests.helpers.trainers import Small

DENSITY = 0.05
SPARSE = {"compressor": "lags", "density": DENSITY}  # default settings, without Adam
LONG = {"max_epochs": 1000}  # Lightning's default, for EarlyStopping


class Watched(Numbered):
    def __init__(self, save_after=None, path="", stop_after=None):
        super().__init__(save_after, path)
        self.stop_after, self.seen = stop_after, 0

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.seen += 1
        self.trainer.should_stop = self.seen == self.stop_after

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def densities(pair, module, settings=SPARSE, source=None, **trainer):
    return [stats["density"] for stats in one_model(fits(pair, module, settings, source, **trainer)).stats]


def test_the_first_steps_are_ddps_to_the_bit(pair):  # with more ranks DDP adds in another order
    ours, theirs = (fits(pair, partial(Watched, stop_after=10), each, **LONG) for each in (SPARSE, None))
    for one, other in zip(ours, theirs):
        assert [stats["density"] for stats in one.stats] == [1.0] * 10
        assert_same(one.batches, other.batches)


def test_the_first_steps_travel_in_sixteen_bits_where_the_wire_has_the_range_of_fp32(pair):
    wires = ("float32", "float16", "bfloat16", "4bit")
    module = partial(Watched, stop_after=10)
    wide, half, *narrow = (one_model(fits(pair, module, {**SPARSE, "wire": wire}, **LONG)) for wire in wires)
    assert_same(half.batches, wide.batches)
    for each in narrow:
        assert [stats["wire_bytes"] for stats in each.stats] == [stats["wire_bytes"] / 2 for stats in wide.stats]
        assert [stats["dense_bytes"] for stats in each.stats] == [stats["dense_bytes"] for stats in wide.stats]
        with pytest.raises(AssertionError):
            assert_same(each.batches, wide.batches)
        torch.testing.assert_close(each.batches, wide.batches, rtol=0, atol=2e-3)  # ten updates of a thousandth each
    assert_same(narrow[0].batches, narrow[1].batches)


def test_in_few_bits_adam_still_learns_from_sixteen(pair):
    module = partial(Watched, stop_after=12)
    by_wire = {}
    for wire in ("bfloat16", "4bit"):
        settings = {
            **SPARSE,
            "wire": wire,
            "optimizer_correction": AdamCorrection(warmup_steps=5, density_decay_steps=100),
        }
        by_wire[wire] = one_model(fits(pair, module, settings, **LONG))
    sixteen, four = by_wire["bfloat16"], by_wire["4bit"]
    assert_same(sixteen.batches[:5], four.batches[:5])
    assert [each["wire_bytes"] for each in sixteen.stats[:5]] == [each["wire_bytes"] for each in four.stats[:5]]
    assert four.stats[6]["density"] > 0.8
    assert four.stats[5]["wire_bytes"] < 0.5 * sixteen.stats[5]["wire_bytes"]  # before the first refresh
    learned = [each.stats[7]["wire_bytes"] - each.stats[5]["wire_bytes"] for each in (four, sixteen)]
    assert learned[0] == pytest.approx(learned[1], rel=0.1)


def test_a_hundredth_of_the_training_is_sent_whole_and_ten_steps_at_least(pair):
    found = densities(pair, partial(Watched, stop_after=105), **LONG)
    assert found[:60] == [1.0] * 60
    assert found[-1] < 1.0
    found = densities(pair, Watched, max_epochs=4)
    assert found[:10] == [1.0] * 10
    assert found[14] < 0.1


def test_a_resume_with_more_epochs_does_not_go_back(pair, tmp_path):
    path = str(tmp_path / "adam.ckpt")
    densities(pair, partial(Watched, 36, path), max_epochs=6)
    for epochs in (200, 100_000):
        assert max(densities(pair, partial(Watched, stop_after=6), SPARSE, path, max_epochs=epochs)) < 1.2 * DENSITY


class TwoKinds(Small):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.network = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))

    def configure_optimizers(self):
        first, second = self.network
        return torch.optim.AdamW(first.parameters()), torch.optim.SGD(second.parameters(), lr=0.1)

    def training_step(self, batch, batch_index):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward((self.network(batch) - batch).square().mean())
        for optimizer in self.optimizers():
            optimizer.step()


def test_beside_an_optimizer_that_is_not_corrected(pair):
    found = densities(pair, TwoKinds, limit_train_batches=16)
    assert found[:10] == [1.0] * 10
    assert found[-1] < 1.2 * DENSITY
