"""Other code changes ``.grad`` between an exchange and the step of a corrected Adam."""

import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import AdamCorrection, sparsify_gradients
from lightning_sparse.loop.summary import CHANGED
from lightning_sparse.testing.tensors import assert_same
from lightning_sparse.testing.wrapping import Edges, batch, parameters_of
from tests.helpers.devices import DEVICE
from tests.helpers.fits import fit
from tests.helpers.racing import Skipping
from tests.helpers.resuming import Numbered
from tests.helpers.trainers import with_optimizer

DENSE, STEPS = 2, 6
CORRECTION = AdamCorrection(warmup_steps=DENSE, density_decay_steps=0, second_moment_interval=2)
SETTINGS = {"compressor": "topk", "density": 0.05, "optimizer_correction": CORRECTION}


def unchanged(gradients):
    pass


def clip_all(gradients):
    nn.utils.clip_grad_norm_([each for each, _ in gradients], 1e-3)


def clip_values(gradients):
    nn.utils.clip_grad_value_([each for each, _ in gradients], 1e-6)


def replace_by_clipped(gradients):
    for each, gradient in gradients:
        each.grad = gradient * 1e-3


def add_decay(gradients):
    for each, gradient in gradients:
        gradient.add_(each.detach(), alpha=1e-6)


def mask(gradients):
    for _, gradient in gradients:
        gradient.view(-1)[::2] = 0


def add_noise(gradients):
    for _, gradient in gradients:
        gradient.add_(torch.randn_like(gradient))


SILENT = [unchanged, clip_all, clip_values, replace_by_clipped]


def train(rank, change, has_scaler=False, factors=None, backwards=1, begins=DENSE, **ddp_arguments):
    """Train, and change mean gradients from step ``begins`` on. ``factors`` are of rank 1's loss, by step."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Edges().to(DEVICE), bucket_cap_mb=100, **ddp_arguments)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3, weight_decay=0.0)
    history = []
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0, enabled=has_scaler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with sparsify_gradients(ddp, optimizer, scaler=scaler, **SETTINGS):
            for step in range(STEPS):
                ddp.zero_grad(set_to_none=False)
                with nullcontext() if ddp.static_graph else ddp.no_sync():  # a static graph does not support no_sync
                    scaler.scale(ddp(batch(rank, step))).backward()
                for number in range(backwards):
                    factor = (factors or {}).get(step, 1.0) if rank == 1 else 1.0
                    scaler.scale(ddp(batch(rank, step + 100 + number)) * factor).backward()
                if step >= begins:
                    scaler.unscale_(optimizer)
                    change([(each, each.grad) for each in ddp.parameters() if each.grad is not None])
                scaler.step(optimizer)
                scaler.update()
                history.append(parameters_of(ddp))
    return history, [str(each.message) for each in caught].count(CHANGED)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"has_scaler": True}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"backwards": 2}],
    ids=str,
)
def test_changes_of_mean_gradients_change_nothing_and_only_clipping_is_silent(pair, arguments):
    plain = pair.run(partial(train, change=unchanged, **arguments))[0][0]
    for change in (*SILENT, mask, add_noise, add_decay):
        answers = pair.run(partial(train, change=change, **arguments))
        for parameters, _ in answers:
            assert_same(parameters, plain)
        assert [warned for _, warned in answers] == [change not in SILENT, 0], change


def heal(gradients):
    for _, gradient in gradients:
        gradient.nan_to_num_(0.0, 0.0, 0.0)


@pytest.mark.parametrize("change", [unchanged, heal])
def test_a_step_that_is_not_finite_breaks_the_model_as_with_ddp_unless_a_guard_repairs_gradients(pair, change):
    poisoned = DENSE + 1
    for history, _ in pair.run(partial(train, change=change, factors={poisoned: float("nan")})):
        is_finite = all(bool(each.isfinite().all()) for each in history[-1].values())
        assert is_finite == (change is heal)
        if is_finite:
            assert_same(history[poisoned], history[poisoned - 1])  # no part of a sent update is applied


def divide(gradients):
    for _, gradient in gradients:
        gradient.mul_(0.1)


def test_dense_steps_that_clip_make_no_later_step_longer(pair):
    (clipped, _), (plain, _) = (pair.run(partial(train, change=change, begins=0))[0] for change in (divide, unchanged))
    for step in range(DENSE, STEPS):
        moved, expected = (
            torch.stack([(each[step][name] - each[step - 1][name]).norm() for name in plain[0]])
            for each in (clipped, plain)
        )
        torch.testing.assert_close(moved, expected, rtol=0.1, atol=1e-4)


def fill_gradients(rank):
    torch.manual_seed(0)
    model = Skipping().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    history = []
    with sparsify_gradients(model, optimizer, **SETTINGS):
        for step in range(STEPS):
            optimizer.zero_grad()
            model(batch(rank, step), step == STEPS - 1).backward()
            for each in model.parameters():
                each.grad = torch.zeros_like(each) if each.grad is None else each.grad
            optimizer.step()
            history.append(model.between.weight.detach().clone())
    return history


def test_a_gradient_that_is_set_after_the_exchange_is_used(pair):
    for history in pair.run(fill_gradients):
        assert not torch.equal(history[-2], history[-3])
        assert torch.equal(history[-1], history[-2])


def seconds_after_spike(rank, factor):
    torch.manual_seed(0)
    model = Edges().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    with sparsify_gradients(model, optimizer, **SETTINGS):
        for step in range(20):
            optimizer.zero_grad()
            (model(batch(rank, step)) * (factor if 10 <= step < 14 else 1.0)).backward()
            optimizer.step()
    return {number: float(state["exp_avg_sq"].sum()) for number, state in optimizer.state_dict()["state"].items()}


def test_a_spike_hardly_changes_second_moments(pair):
    plain, spiked = (pair.run(seconds_after_spike, factor)[0] for factor in (1.0, 1e4))
    for number, each in plain.items():
        assert spiked[number] < 200 * each  # without a limit 1e7


class ClipsItself(Numbered):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def configure_gradient_clipping(self, optimizer, *clipping, **named_clipping):
        if self.norm is not None and self.global_step >= DENSE:
            self.clip_gradients(optimizer, self.norm, "norm")


@pytest.mark.parametrize(("ranks", "local_world_size"), [(2, 2), (4, 2)], ids=["one level", "two levels"])
def test_lightning_clips_only_dense_steps(pools, ranks, local_world_size):
    arguments = (SETTINGS, None, {"max_epochs": 1, "local_world_size": local_world_size})
    models = (partial(with_optimizer, torch.optim.AdamW, partial(ClipsItself, norm), lr=0.01) for norm in (1e-3, None))
    clipped, plain = ([each.end for each in pools[ranks].run(fit, model, *arguments)] for model in models)
    assert_same(clipped, plain)


# clips after each of several backwards in a step, as in truncated backpropagation through time
WINDOWS, LONG = 8, 40
LATE = AdamCorrection(warmup_steps=10, density_decay_steps=0)


def mean_length(rank, norm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lengths = []
    with sparsify_gradients(model, optimizer, "lags", 0.05, optimizer_correction=LATE):
        for step in range(LONG):
            before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
            for window in range(WINDOWS):
                generator = torch.Generator().manual_seed(1000 * step + 10 * window + rank)
                rows = torch.randn(4, 32, generator=generator).to(DEVICE)
                (model(rows) - rows).square().mean().backward()
                if norm is not None and step >= LATE.warmup_steps:
                    nn.utils.clip_grad_norm_(model.parameters(), norm)
            optimizer.step()
            optimizer.zero_grad()
            lengths.append((nn.utils.parameters_to_vector(model.parameters()).detach() - before).norm().item())
    return sum(lengths[LONG // 2 :]) / (LONG - LONG // 2)


@pytest.mark.exhaustive
def test_a_clip_after_each_backward_makes_no_step_longer(pair):
    for clipped, plain in zip(pair.run(mean_length, 0.1), pair.run(mean_length, None)):
        assert clipped < 1.2 * plain
