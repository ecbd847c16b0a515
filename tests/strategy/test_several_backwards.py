"""Several optimizers with several backwards per step: the gradient is the mean plus the local remainder."""

from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from lightning_sparse import AdamCorrection
from tests.helpers.fits import fits, one_model, refusals
from tests.helpers.resuming import Numbered

UNUSED = {"find_unused_parameters": True}
CORRECTION = AdamCorrection(warmup_steps=2, density_decay_steps=0, second_moment_interval=3)
WITH = {
    "SGD": {"compressor": "topk"},
    "AdamW": {"compressor": "lags", "optimizer_correction": CORRECTION},
}


class Adversaries(Numbered):
    def __init__(self, *arguments, kind="SGD", every=(3, 3)):
        super().__init__(*arguments)
        self.automatic_optimization = False
        self.kind, self.every = kind, every
        self.critic = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch, batch_index):
        for number, optimizer in enumerate(self.optimizers()):
            is_last = (batch_index + 1) % self.every[number] == 0
            with self.turn(optimizer, is_last):
                self.manual_backward(self.losses(self.rows(batch_index))[number])
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
        self.interfere(batch_index)

    @contextmanager
    def turn(self, optimizer, is_last):
        with optimizer.toggle_model(sync_grad=is_last):
            yield

    def losses(self, rows):
        made = self.network(rows)
        deceived = (made - rows).square().mean() + (self.critic(made) - 1).square().mean()
        return deceived, self.critic(made.detach()).square().mean() + (self.critic(rows) - 1).square().mean()

    def interfere(self, batch_index):
        """Do nothing between two batches."""

    def configure_optimizers(self):
        return [self.optimizer_of(part.parameters()) for part in (self.network, self.critic)]

    def optimizer_of(self, parameters):
        if self.kind == "AdamW":
            return torch.optim.AdamW(parameters, lr=1e-3)
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.0 if self.kind == "SGD" else 0.9)


class Sharing(Adversaries):
    def configure_optimizers(self):
        shared = list(self.network[0].parameters())
        parts = [*self.network[2].parameters(), *shared], [*self.critic.parameters(), *shared]
        return [self.optimizer_of(part) for part in parts]

    @contextmanager
    def turn(self, optimizer, is_last):
        with nullcontext() if is_last else self.trainer.strategy.block_backward_sync():
            yield

    def losses(self, rows):
        made = self.network(rows)
        one, other = (made - rows).square().mean(), (self.critic(made) - 1).square().mean()
        return one + other, one + 2 * other


class Replacing(Adversaries):
    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **{**settings, "every": (2, 6)})

    def interfere(self, batch_index):
        for parameter in self.critic.parameters() if batch_index == 1 else ():
            parameter.grad = parameter.detach() * (self.global_rank + 1)  # different values on each rank


MODELS = {
    "accumulating": (Adversaries, UNUSED),
    "one exchanges while the other's wait": (partial(Adversaries, every=(1, 3)), UNUSED),
    "a shared layer": (Sharing, {}),
    "one never steps, and drops no gradient": (partial(Sharing, every=(3, 100)), {}),
    "replaced": (Replacing, UNUSED),
}
CELLS = [(name, kind, {}) for name in MODELS for kind in WITH]
CELLS += [(name, "AdamW", {"gradient_as_bucket_view": False}) for name in ("a shared layer", "replaced")]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "kind", "more"), CELLS, ids=str)
def test_replicas_are_identical_and_sent_whole_it_is_ddp(pair, name, kind, more):
    module, of_ddp = MODELS[name]
    settings = {**WITH[kind], **of_ddp, **more}
    one_model(fits(pair, partial(module, kind=kind), {**settings, "density": 0.05}))
    whole = one_model(fits(pair, partial(module, kind=kind), {**settings, "density": 1.0}))
    ddp, _ = fits(pair, partial(module, kind=kind), {"ddp": of_ddp})
    torch.testing.assert_close(whole.batches, ddp.batches, rtol=1e-4, atol=1e-5)


class Cadence(Adversaries):
    def __init__(self, *arguments, kind="AdamW"):
        super().__init__(*arguments, kind=kind, every=(1, 3))

    losses = Sharing.losses

    @contextmanager
    def turn(self, optimizer, is_last):
        yield


class Parting(Cadence):
    def __init__(self, *arguments, kind, change, everywhere):
        super().__init__(*arguments, kind=kind)
        self.change, self.everywhere = change, everywhere

    def interfere(self, batch_index):
        if batch_index == 3 and (self.everywhere or self.global_rank == 1):
            self.change(self.optimizers()[1])


def set_to_none(optimizer):
    optimizer.zero_grad()


def set_to_zero(optimizer):
    optimizer.zero_grad(set_to_none=False)


def double(optimizer):
    for group in optimizer.param_groups:
        torch._foreach_mul_([parameter.grad for parameter in group["params"]], 2.0)


@pytest.mark.sampled
@pytest.mark.parametrize("change", [set_to_none, set_to_zero, double])
@pytest.mark.parametrize("kind", WITH)
def test_gradients_may_be_changed_in_a_step_on_all_ranks_and_on_one_are_noticed_on_all(pair, kind, change):
    everywhere, alone = (partial(Parting, kind=kind, change=change, everywhere=is_so) for is_so in (True, False))
    settings = {**WITH[kind], "density": 0.5}
    one_model(fits(pair, everywhere, settings))
    for told in refusals(pair, alone, settings):
        assert told.startswith("RuntimeError")
        assert "between two exchanges" in told


class Piecewise(Adversaries):
    def __init__(self, *arguments, kind, pieces, by_hand):
        super().__init__(*arguments, kind=kind)
        self.pieces, self.automatic_optimization = pieces, not by_hand

    def training_step(self, batch, batch_index):
        loss = self.losses(self.rows(batch_index))[0]
        if self.automatic_optimization:
            return loss
        self.optimizers().zero_grad()
        self.manual_backward(loss / self.pieces, retain_graph=True)
        for _ in range(1, self.pieces):
            (loss / self.pieces).backward(retain_graph=True)
        self.optimizers().step()
        return None

    def backward(self, loss, **named):
        pieces = self.pieces if self.automatic_optimization else 1
        for _ in range(pieces):
            (loss / pieces).backward(retain_graph=True)

    def configure_optimizers(self):
        return self.optimizer_of(self.parameters())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("by_hand", [False, True], ids=["automatic", "by hand"])
@pytest.mark.parametrize("kind", WITH)
def test_backwards_beside_the_one_that_lightning_knows_of_count_as_much(pair, kind, by_hand):
    settings = {**WITH[kind], "density": 1.0}
    once, twice = (partial(Piecewise, kind=kind, pieces=pieces, by_hand=by_hand) for pieces in (1, 2))
    expected = one_model(fits(pair, once, settings)).batches
    torch.testing.assert_close(one_model(fits(pair, twice, settings)).batches, expected, rtol=1e-4, atol=1e-5)


class Afterwards(Piecewise):
    def on_after_backward(self):
        self.losses(self.rows(50))[1].backward()


@pytest.mark.parametrize("by_hand", [False, True], ids=["automatic", "by hand"])
def test_momentum_correction_refuses_a_second_exchange_of_a_step(pair, by_hand):
    module = partial(Piecewise, kind="momentum", pieces=2, by_hand=by_hand)
    for told in refusals(pair, module, {"compressor": "dgc", "warmup_steps": 0, "density": 0.5}):
        assert "one exchanged backward per optimizer step" in told


@pytest.mark.parametrize("kind", WITH)
def test_a_backward_that_nobody_was_told_of_is_named(pair, kind):
    module = partial(Afterwards, kind=kind, pieces=1, by_hand=False)
    for told in refusals(pair, module, {**WITH[kind], "density": 0.5}):
        assert "on_after_backward" in told
