import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from pytorch_lightning import Callback
from torch import nn
from torch.utils.data import DataLoader

from lightning_sparse import AdamCorrection, SparseDDPStrategy, sparsify_gradients
from tests.helpers.devices import DEVICE
from tests.helpers.tiers import exhaustive
from tests.helpers.trainers import Line, Rows, Small, run_fit

STEPS, POISONED, EVERY = 160, 90, 20
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.02, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=3e-3),
}
SETTINGS = {
    "auto": {"compressor": "lags", "schedule": "auto"},
    "rounds": {"compressor": "topk", "density": 0.2, "local_steps": 4},
}


class Recipe:
    """A common rollback recipe: load the last snapshot if the loss rises far above the snapshot's loss."""

    def __init__(self, model, optimizer, restore=None):
        self.model, self.optimizer, self.restore = model, optimizer, restore
        self.snapshot, self.rollbacks = None, 0

    def after_step(self, step, loss):
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        if self.snapshot is not None and not loss <= 4 * self.snapshot[2] + 0.2:
            weights, state, _ = self.snapshot
            self.rollbacks += 1
            self.load(weights, copy.deepcopy(state))
        elif step % EVERY == 0:
            self.snapshot = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict(), loss))

    def load(self, weights, state):
        self.optimizer.load_state_dict(state)
        if self.restore is None:
            self.model.load_state_dict(weights)
            return
        with torch.no_grad():
            for name, each in self.model.state_dict().items():
                each.copy_(weights[name])
        self.restore()


def settings_of(system, kind):
    settings = SETTINGS.get(system, {"compressor": system})
    is_corrected = kind == "AdamW" and "local_steps" not in settings
    corrected = (
        {"optimizer_correction": AdamCorrection(warmup_steps=10, density_decay_steps=10)} if is_corrected else {}
    )
    return {"warmup_steps": 0, **settings, **corrected}


def scale_of(step, is_poisoned):
    return 1e3 if is_poisoned and step == POISONED else 1.0


def train_loop(rank, system, kind, is_poisoned, copies=False):
    model = Line().to(DEVICE)
    optimizer = OPTIMIZERS[kind](model.parameters())
    if system == "ddp":
        wrapped, handle = nn.parallel.DistributedDataParallel(model), None
    else:
        wrapped, handle = model, sparsify_gradients(model, optimizer, **settings_of(system, kind))
    recipe = Recipe(model, optimizer, handle.reset_residuals if copies else None)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = wrapped(step, rank, scale_of(step, is_poisoned))
        loss.backward()
        optimizer.step()
        recipe.after_step(step, loss)
    if handle is not None:
        handle.close()
    with torch.no_grad():
        return recipe.rollbacks, sum(model(1000 + each, 0) for each in range(8)).item() / 8


class Fitted(Small):
    def __init__(self, kind, is_poisoned):
        super().__init__()
        self.network, self.kind, self.is_poisoned = Line(), kind, is_poisoned

    def training_step(self, batch, step):
        return self.network(step, self.global_rank, scale_of(step, self.is_poisoned))

    def train_dataloader(self):
        return DataLoader(Rows(2 * STEPS), batch_size=1)

    def configure_optimizers(self):
        return OPTIMIZERS[self.kind](self.network.parameters())


class RollsBack(Callback):
    def on_train_start(self, trainer, module):
        self.recipe = Recipe(module, trainer.optimizers[0])

    def on_train_batch_end(self, trainer, module, outputs, batch, step):
        self.recipe.after_step(step, outputs["loss"])


def fit(rank, system, kind, is_poisoned):
    strategy = "ddp" if system == "ddp" else SparseDDPStrategy(**settings_of(system, kind))
    callback, model = RollsBack(), Fitted(kind, is_poisoned)
    run_fit(rank, strategy, model, callbacks=[callback], max_steps=STEPS, limit_val_batches=0)
    with torch.no_grad():
        return callback.recipe.rollbacks, sum(model.network(1000 + each, 0) for each in range(8)).item() / 8


def check(pair, train, system, kind, *arguments):
    both = zip(pair.run(train, system, kind, False), pair.run(train, system, kind, True, *arguments))
    for (_, clean), (rollbacks, loss) in both:
        assert rollbacks == 1
        assert abs(loss - clean) < 0.02


@pytest.mark.parametrize("kind", ["AdamW", *exhaustive(["SGD", "momentum"])])
@pytest.mark.parametrize("system", ["lags", *exhaustive(["topk", "exdyna", "micro", "dgc", "sdagc", "omgs"])])
def test_a_loop_rolls_back_once_and_ends_as_without_the_batch(pair, system, kind):
    check(pair, train_loop, system, kind)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["SGD", "momentum", "AdamW"])
@pytest.mark.parametrize("system", ["sdagc", "auto", "lags", "exdyna", "dgc", "rounds", "ddp"])
def test_a_fit_rolls_back_once_and_ends_as_without_the_batch(pair, system, kind):
    check(pair, fit, system, kind)


@pytest.mark.exhaustive
def test_weights_that_are_copied_need_a_call(pair):
    check(pair, train_loop, "lags", "momentum", True)


def residual_norms(rank, act):
    model = Line().to(DEVICE)
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    with sparsify_gradients(model, optimizer, "lags", warmup_steps=0) as handle:
        for step in range(3):
            optimizer.zero_grad()
            if step == 2:
                act(model, optimizer)
            (model(step, rank) * (step < 2)).backward()  # zero last gradients leave residuals
            optimizer.step()
        residuals = handle.engine.memory.state_dict()["residual"]
        return {name: bool(each.norm() > 0) for name, each in residuals.items()}


def load_a_layer(model, optimizer):
    model.network[0].load_state_dict({name: each + 1 for name, each in model.network[0].state_dict().items()})


def show_averages(model, optimizer):
    own = copy.deepcopy(model.state_dict())
    model.load_state_dict({name: each / 2 for name, each in own.items()})
    model.load_state_dict(own)


@pytest.mark.parametrize(("act", "reset"), [(load_a_layer, ["0"]), (show_averages, [])], ids=["load", "average"])
def test_residuals_start_again_of_loaded_parameters_alone(pair, act, reset):
    for remain in pair.run(residual_norms, act):
        assert remain == {
            f"network.{layer}.{kind}": layer not in reset for layer in "02" for kind in ("weight", "bias")
        }
