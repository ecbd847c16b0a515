import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_sparse import AdamCorrection, sparsify_gradients
from tests.helpers.devices import DEVICE
from tests.helpers.tiers import exhaustive
from tests.helpers.trainers import Line

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
OTHERS = [*SETTINGS, "topk", "exdyna", "micro", "dgc", "sdagc", "omgs", "ddp"]


class Recipe:
    """A common rollback recipe: load the last snapshot if the loss rises far above the snapshot's loss."""

    def __init__(self, model, optimizer, shared_model=nullcontext, restore=None):
        self.model, self.optimizer, self.shared_model, self.restore = model, optimizer, shared_model, restore
        self.snapshot, self.rollbacks = None, 0

    def after_step(self, step, loss):
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        if self.snapshot is not None and not loss <= 4 * self.snapshot[2] + 0.2:
            weights, state, _ = self.snapshot
            self.rollbacks += 1
            self.load(weights, copy.deepcopy(state))
        elif step % EVERY == 0:
            with self.shared_model():
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


def train(rank, system, kind, is_poisoned, copies=False):
    model = Line().to(DEVICE)
    optimizer = OPTIMIZERS[kind](model.parameters())
    if system == "ddp":
        wrapped, handle = nn.parallel.DistributedDataParallel(model), None
        recipe = Recipe(model, optimizer)
    else:
        wrapped, handle = model, sparsify_gradients(model, optimizer, **settings_of(system, kind))
        recipe = Recipe(model, optimizer, handle.shared_model, handle.reset_residuals if copies else None)
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


def check(pair, system, kind, *arguments):
    both = zip(pair.run(train, system, kind, False), pair.run(train, system, kind, True, *arguments))
    for (_, clean), (rollbacks, loss) in both:
        assert rollbacks == 1
        assert abs(loss - clean) < 0.02


@pytest.mark.parametrize("kind", ["AdamW", *exhaustive(["SGD", "momentum"])])
@pytest.mark.parametrize("system", ["lags", *exhaustive(OTHERS)])
def test_a_loop_rolls_back_once_and_ends_as_without_the_batch(pair, system, kind):
    check(pair, system, kind)


@pytest.mark.exhaustive
def test_weights_that_are_copied_need_a_call(pair):
    check(pair, "lags", "momentum", True)


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
