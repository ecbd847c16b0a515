"""Users clip Adam's gradients, while updates have replaced the gradients."""

import warnings
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import AdamCorrection, sparsify_gradients
from lightning_sparse.testing.wrapping import Edges, batch
from tests.helpers.devices import DEVICE
from tests.helpers.fits import fit
from tests.helpers.resuming import Numbered

DENSE = 2
CORRECTION = AdamCorrection(warmup_steps=DENSE, density_decay_steps=0, second_moment_interval=2)
SETTINGS = {"compressor": "topk", "density": 0.05, "optimizer_correction": CORRECTION}


@contextmanager
def noting_warnings():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield (told := [])
    told += [each for each in (str(warning.message) for warning in caught) if "clip_grad_norm_" in each]


class ClipsItself(Numbered):
    def __init__(self, place):
        super().__init__()
        self.place = place

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def clip_in(self, place):
        if place == self.place:
            nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    def on_after_backward(self):
        self.clip_in("on_after_backward")

    def on_before_optimizer_step(self, optimizer):
        self.clip_in("on_before_optimizer_step")

    def configure_gradient_clipping(self, *clipping, **named_clipping):
        super().configure_gradient_clipping(*clipping, **named_clipping)
        self.clip_in("configure_gradient_clipping")


def warned_of_fit(rank, place):
    with noting_warnings() as told:
        fit(rank, partial(ClipsItself, place), SETTINGS, None, {"gradient_clip_val": 0.05, "max_epochs": 1})
    return len(told)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", ["on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", ""])
def test_a_module_that_clips_what_has_arrived_is_told_once(pair, place):
    assert pair.run(warned_of_fit, place) == [bool(place), 0]


def all_clipped(ddp, handle):
    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)


def each_clipped(ddp, handle):
    for parameter in ddp.parameters():
        nn.utils.clip_grad_value_(parameter, 1.0)


def clipped_by_handle(ddp, handle):
    handle.clip(norm=1.0)


def train(rank, change, has_scaler=False, **ddp_arguments):
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Edges().to(DEVICE), bucket_cap_mb=100, **ddp_arguments)  # one bucket in total
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0, enabled=has_scaler)
    with noting_warnings() as told, sparsify_gradients(ddp, optimizer, scaler=scaler, **SETTINGS) as handle:
        for step in range(DENSE + 4):
            ddp.zero_grad(set_to_none=False)
            with nullcontext() if ddp.static_graph else ddp.no_sync():  # a static graph does not support no_sync
                scaler.scale(ddp(batch(rank, step))).backward()
            scaler.scale(ddp(batch(rank, step + 100))).backward()
            scaler.unscale_(optimizer)
            change(ddp, handle)
            scaler.step(optimizer)
            scaler.update()
    return len(told)


HERE = {
    "all": (all_clipped, {}),
    "one by one": (each_clipped, {}),
    "after unscaling": (all_clipped, {"has_scaler": True}),
    "views of a bucket after unscaling": (all_clipped, {"gradient_as_bucket_view": True, "has_scaler": True}),
    "a static graph": (each_clipped, {"static_graph": True}),
}
NOWHERE = {
    "by us": (clipped_by_handle, {}),
    "by us after unscaling": (clipped_by_handle, {"has_scaler": True}),
    "a static graph": (clipped_by_handle, {"static_graph": True}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("change", "arguments"), HERE.values(), ids=HERE)
def test_a_plain_loop_that_clips_what_has_arrived_is_told_once(pair, change, arguments):
    assert pair.run(partial(train, change=change, **arguments)) == [1, 0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("change", "arguments"), NOWHERE.values(), ids=NOWHERE)
def test_whoever_clips_otherwise_is_told_nothing(pair, change, arguments):
    assert pair.run(partial(train, change=change, **arguments)) == [0, 0]


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(400)) for _ in range(2))

    def forward(self, rank, names):
        cancelling = torch.tensor([2.0, -2.0]).repeat(200) * (1 if rank == 0 else -1)
        losses = {"first": (self.first * (0.1 + cancelling)).sum(), "second": 0.1 * self.second.sum()}
        return sum(losses[name] for name in names)


def clip_factors(rank, turns):
    model, found = Two(), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    with sparsify_gradients(model, optimizer, **SETTINGS) as handle:
        for step in range(24):
            optimizer.zero_grad()
            model(rank, names := turns[step * len(turns) // 24] if step < 23 else turns[-1]).backward()
            handle.clip(norm=1.0)
            optimizer.step()
            factors = handle.engine.memory._clips.factors
            found[names] = None if factors is None else float(factors.min())
    return found


@pytest.mark.parametrize(
    "turns", [(("first", "second"), ("second",)), (("first",), ("second",))], ids=["one rests", "in turns"]
)
def test_a_norm_is_that_of_the_mean_of_what_a_step_uses(pair, turns):
    # The means have norms of two each, far from the local norms.
    norms = {1: 2.0, 2: 8**0.5}
    for found in pair.run(clip_factors, turns):
        assert found == {names: pytest.approx(1 / norms[len(names)], rel=0.05) for names in turns}
