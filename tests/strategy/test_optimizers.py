import re
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from lightning_sparse import AdamCorrection, SparseDDPStrategy
from lightning_sparse.compressors import DGC, LAGS, SDAGC
from lightning_sparse.loop.checks import check_momentum
from lightning_sparse.testing.tensors import assert_same
from tests.helpers.fits import fits, refusals
from tests.helpers.trainers import WithSGD, make_trainer, with_optimizer

WHOLE = {"compressor": DGC(), "density": 1.0, "warmup_steps": 0}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("arguments", [{}, {"nesterov": True}, {"one_cycle": True}, {"momentum": 0.0}], ids=str)
def test_sent_whole_momentum_in_the_memory_is_momentum_in_the_optimizer(pair, arguments):
    ours, ddp = (fits(pair, partial(WithSGD, **arguments), settings) for settings in (WHOLE, None))
    for one, other in zip(ours, ddp):
        torch.testing.assert_close(one.batches, other.batches, rtol=1e-4, atol=1e-6)


class Watched(WithSGD):
    def __init__(self, path):
        super().__init__(weight_decay=0.01, nesterov=True)
        self.path = path
        self.notes = []

    def note(self, *arguments):
        group = self.trainer.optimizers[0].param_groups[0]
        self.notes.append({name: group[name] for name in ("momentum", "nesterov", "weight_decay")})

    on_before_optimizer_step = on_fit_end = note

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 3:
            self.trainer.save_checkpoint(self.path)


def test_what_is_taken_while_the_optimizer_updates_nobody_misses(pair, tmp_path):
    path = str(tmp_path / "momentum.ckpt")
    for each in fits(pair, partial(Watched, path), {"compressor": DGC()}):
        saved = torch.load(path, weights_only=True)["optimizer_states"][0]
        assert not any(each.get("momentum_buffer") is not None for each in saved["state"].values())
        for group in (saved["param_groups"][0], *each.notes):
            assert (group["momentum"], group["nesterov"], group["weight_decay"]) == (0.9, True, 0.01)


class MuonOfMatrices(torch.optim.Muon):
    def __init__(self, parameters, **arguments):
        super().__init__([each for each in parameters if each.dim() == 2], **arguments)


WithRMSprop = partial(with_optimizer, torch.optim.RMSprop)
WithAdam = partial(with_optimizer, torch.optim.Adam)
REFUSALS = {
    "adam as it is": (DGC(), WithAdam, "ValueError.*optimizer_correction='auto'", {"optimizer_correction": None}),
    "rmsprop": (DGC(), WithRMSprop, "ValueError.*RMSprop needs gradients .*: choose", {}),
    "a number as momentum": (DGC(momentum=0.5), WithAdam, "ValueError.*Adam needs gradients .*: choose", {}),
    "dampening": (DGC(), partial(WithSGD, dampening=0.5), "ValueError.*dampening=0.5", {}),
    "given twice": (DGC(momentum=0.5), WithSGD, "ValueError.*momentum=0.5 .*momentum=0.9", {}),
    "no momentum": (SDAGC(momentum=None), WithAdam, "was not refused", {}),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("compressor", "model", "message", "settings"), REFUSALS.values(), ids=REFUSALS)
def test_an_optimizer_that_makes_no_sense_is_refused(pair, compressor, model, message, settings):
    for answer in refusals(pair, model, {"compressor": compressor, **settings}, max_steps=2):
        assert re.match(message, answer)


def warned_of(rank, compressor, density, kind):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(rank, SparseDDPStrategy(compressor, density=density), max_steps=1)
        warnings.filterwarnings("always", message=".*mean gradients.*")
        trainer.fit(with_optimizer(kind, lr=0.01))
    return [str(each.message) for each in caught if "mean gradients" in str(each.message)]


ONE_LAYER = LAGS(densities={"network.0.weight": 0.01})
WARNED = {
    "RMSprop": ("lags", 0.01, torch.optim.RMSprop, True),
    "Adagrad": ("topk", 0.01, torch.optim.Adagrad, True),
    "Rprop": ("topk", 0.01, torch.optim.Rprop, True),
    "LBFGS": ("topk", 0.01, torch.optim.LBFGS, True),
    "Muon": ("topk", 0.01, MuonOfMatrices, True),
    "Muon in four bits": ("qsgd", None, MuonOfMatrices, False),
    "AdamW": ("lags", 0.01, torch.optim.AdamW, False),
    "Adam with momentum of its own": ("dgc", 0.01, torch.optim.Adam, False),
    "whole": ("topk", 1.0, torch.optim.RMSprop, False),
    "whole but for a layer": (ONE_LAYER, 1.0, torch.optim.RMSprop, True),
    "AdamW, whole but for a layer": (ONE_LAYER, 1.0, torch.optim.AdamW, False),
    "dense": ("dense", None, torch.optim.RMSprop, False),
    "SGD": ("topk", 0.01, torch.optim.SGD, False),
    "ASGD": ("topk", 0.01, torch.optim.ASGD, False),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("compressor", "density", "kind", "is_warned"), WARNED.values(), ids=WARNED)
def test_an_optimizer_that_learns_from_sparse_gradients_how_large_they_are_is_warned_of(
    pair, compressor, density, kind, is_warned
):
    first, second = pair.run(warned_of, compressor, density, kind)
    assert [kind.__name__ in line for line in first] == [True] * is_warned
    assert second == []  # a single warning, not a warning per rank


def test_adam_is_corrected_wherever_a_density_is_below_1(pair):
    early = {"optimizer_correction": AdamCorrection(warmup_steps=2, density_decay_steps=0), "warmup_steps": 0}
    by_name = LAGS(densities={f"network.{layer}.{kind}": 0.05 for layer in (0, 2) for kind in ("weight", "bias")})
    choices = {"compressor": by_name, "density": 1.0}, {"compressor": "lags", "density": 0.05}
    named, of_all = (fits(pair, partial(WithAdam, lr=0.01), {**each, **early})[0] for each in choices)
    assert_same(named.batches, of_all.batches)


def test_adam_beside_sgd_is_refused_with_what_would_help():
    matrix, vector = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
    optimizers = [torch.optim.AdamW([matrix]), torch.optim.SGD([vector], 0.1)]
    check_momentum(optimizers[1], DGC().feedback)
    with pytest.raises(ValueError, match=r"AdamW needs gradients.*for the whole model"):
        check_momentum(optimizers[0], DGC().feedback)
