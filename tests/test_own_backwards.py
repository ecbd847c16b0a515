from datetime import timedelta
from functools import partial

import pytest
import torch
from pytorch_lightning import Callback
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import AdamCorrection, sparsify_gradients
from lightning_sparse.testing.tensors import assert_same
from lightning_sparse.testing.wrapping import Edges, batch
from tests.helpers.devices import DEVICE
from tests.helpers.fits import fits, one_model
from tests.helpers.resuming import Numbered
from tests.helpers.trainers import OPTIMIZERS, weights

SHORT = timedelta(seconds=20)  # timeout of waiting ranks
RANKS = {"on rank 0": (0,), "on all ranks": (0, 1)}
CORRECTION = AdamCorrection(warmup_steps=2, density_decay_steps=0, second_moment_interval=3)
SPARSE = {"compressor": "lags", "density": 0.05, "warmup_steps": 0, "timeout": SHORT}
SETTINGS = {"SGD": SPARSE, "AdamW": {**SPARSE, "optimizer_correction": CORRECTION}}
each_kind = pytest.mark.parametrize("kind", OPTIMIZERS)
each_choice = pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)


class Trained(Numbered):
    def __init__(self, kind, by_hand):
        super().__init__()
        self.kind, self.by_hand = kind, by_hand
        self.automatic_optimization = not by_hand

    def training_step(self, given, batch_index):
        loss = super().training_step(given, batch_index)
        if not self.by_hand:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        if self.by_hand == "torch":
            loss.backward()
        else:
            self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, given, batch_index):
        """Do nothing; callbacks act after validation."""

    def configure_optimizers(self):
        return OPTIMIZERS[self.kind](self.parameters())


class Saliency(Callback):
    def __init__(self, ranks, to_none):
        self.ranks, self.to_none = ranks, to_none

    def on_validation_end(self, trainer, pl_module):
        if trainer.global_rank in self.ranks:
            with torch.enable_grad():
                pl_module.network(torch.ones(4, 32, device=pl_module.device)).sum().backward()
            pl_module.zero_grad(set_to_none=self.to_none)


@pytest.mark.sampled
@pytest.mark.parametrize("by_hand", [None, "Lightning", "torch"])
@pytest.mark.parametrize(("kind", "to_none"), [("SGD", True), ("SGD", False), ("AdamW", True)], ids=str)
@each_choice
def test_the_trainer_trains_as_without_a_callback_that_goes_backward(pair, by_hand, kind, to_none, ranks):
    arguments = {"limit_val_batches": 1, "val_check_interval": 2, "inference_mode": False}
    with_it, without = (
        one_model(fits(pair, partial(Trained, kind, by_hand), SETTINGS[kind], **arguments, callbacks=callbacks))
        for callbacks in ([Saliency(ranks, to_none)], [])
    )
    assert_same(with_it.batches, without.batches)


def evaluate(model):
    model.eval()
    model(torch.ones(4, 64, device=DEVICE)).backward()
    model.train()


def use_no_model(model):
    sum(each.square().sum() for each in model.parameters()).backward()


def use_what_is_wrapped(model):
    model.module(torch.ones(4, 64, device=DEVICE)).backward()


def trained(rank, kind, form, explain, ranks):
    torch.manual_seed(0)
    module = Edges().to(DEVICE)
    model = module if form == "bare" else DistributedDataParallel(module)
    optimizer = OPTIMIZERS[kind](model.parameters())
    with sparsify_gradients(model, optimizer, **SETTINGS[kind]) as handle:
        for step in range(5):
            with handle.no_sync():
                model(batch(rank, 2 * step)).backward()
            if rank in ranks:
                held = [each.grad for each in model.parameters()]
                optimizer.zero_grad()
                explain(model)
                for each, gradient in zip(model.parameters(), held):
                    each.grad = gradient
            model(batch(rank, 2 * step + 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank in ranks:
                explain(model)
                optimizer.zero_grad()
    return weights(module)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("form", "explain"),
    [("bare", evaluate), ("bare", use_no_model), ("wrapped", evaluate), ("wrapped", use_what_is_wrapped)],
)
@each_kind
@each_choice
def test_a_loop_trains_as_without_a_backward_beside_the_models(pair, form, explain, kind, ranks):
    with_it, without = (pair.run(trained, kind, form, explain, among) for among in (ranks, ()))
    assert_same(with_it[0], with_it[1])
    assert_same(with_it, without)
