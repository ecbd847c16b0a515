"""QSGD against its formula, element by element, and as its paper says."""

import hashlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sparse.compressors import QSGD
from lightning_sparse.compressors.group_selection import WholeSelection
from lightning_sparse.compressors.layout import ModelLayout
from lightning_sparse.compressors.selection import Selection
from lightning_sparse.engine.wire import WIRE_FORMATS
from lightning_sparse.testing.pool import Pool
from tests.helpers.devices import DEVICE, moved
from tests.helpers.sparse_ddp import backpropagate, batch, parameters_of, sgd_steps, sparse_ddp

SEED = 5
BUCKET_SIZE = 50


def model() -> nn.Module:
    """Build a model small enough to be quantized in Python; its largest parameter has 320 elements."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 3))


def train(rank: int, settings: dict[str, Any], steps: int) -> list[dict[str, Tensor]]:
    """Train, and copy the parameters after every step."""
    with sparse_ddp(model(), QSGD(bucket_size=BUCKET_SIZE, seed=SEED, **settings), schedule="layerwise") as (
        ddp,
        engine,
    ):
        losses = (ddp(batch(rank, step)).square().mean() for step in range(steps))
        return [parameters_of(ddp) for _ in sgd_steps(ddp, engine, losses, lr=0.05, momentum=0.9)]


def slow_noise(rank: int, step: int, position: int, numel: int) -> list[float]:
    """Draw as documented: for the whole buckets, then for the short one."""
    key = f"{SEED} {rank} {step} {position}".encode()
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    generator = torch.Generator(DEVICE).manual_seed(seed)
    noise = []
    for count in filter(None, (numel // BUCKET_SIZE * BUCKET_SIZE, numel % BUCKET_SIZE)):
        words = torch.empty(math.ceil(count / 4), dtype=torch.int64, device=DEVICE)
        words.random_(-(2**63), None, generator=generator)
        parts = [(word >> shift) % 2**16 for word in words.tolist() for shift in (0, 16, 32, 48)]
        signed = [part - 2**16 if part >= 2**15 else part for part in parts]
        noise += [(part + 0.5) / 2**16 for part in signed[:count]]
    return noise


def slow_quantized(gradient: Tensor, noise: list[float], levels: int, norm: str) -> Tensor:
    """Quantize and restore, number by number."""
    restored = []
    for start in range(0, gradient.numel(), BUCKET_SIZE):
        bucket = gradient.flatten()[start : start + BUCKET_SIZE]
        numbers = bucket.tolist()
        scale = math.hypot(*numbers) if norm == "l2" else max(map(abs, numbers))
        # In fp32, whose rounding decides where a number and its noise meet a border.
        units = (bucket / torch.tensor(scale, device=DEVICE) * levels).tolist()
        restored += [round(unit + shift) * scale / levels for unit, shift in zip(units, noise[start:])]
    return torch.tensor(restored, device=DEVICE).view_as(gradient)


def slow_history(ranks: int, levels: int, norm: str, steps: int) -> list[dict[str, Tensor]]:
    """Train one model with the mean of what virtual workers send."""
    net = model().to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    history = []
    for step in range(steps):
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for rank in range(ranks):
            gradients = torch.autograd.grad(net(batch(rank, step)).square().mean(), list(net.parameters()))
            for position, (parameter, gradient) in enumerate(zip(net.parameters(), gradients)):
                noise = slow_noise(rank, step, position, gradient.numel())
                parameter.grad += slow_quantized(gradient, noise, levels, norm) / ranks
        optimizer.step()
        history.append({name: parameter.detach().cpu().clone() for name, parameter in net.named_parameters()})
    return history


@pytest.mark.parametrize(("levels", "norm"), [(7, "l2"), (1, "l2"), (20, "max")])
@pytest.mark.parametrize("ranks", [2, 3])
def test_it_trains_as_its_formula_says(pools: dict[int, Pool], ranks: int, levels: int, norm: str) -> None:
    expected = slow_history(ranks, levels, norm, 20)
    for history in pools[ranks].run(train, {"levels": levels, "norm": norm}, 20):
        for ours, theirs in zip(history, expected):
            for name in theirs:
                torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-6)


def begun(rank: int = 0, names: tuple[str, ...] = ("weight",), **settings: Any) -> QSGD:
    """Build a compressor that knows a model."""
    qsgd = QSGD(**settings)
    qsgd.begin(ModelLayout(names, (600,) * len(names), rank, 2, DEVICE))
    return qsgd


def selected(qsgd: QSGD, gradient: Tensor, name: str = "weight") -> Selection:
    """Select from one tensor, on the device under test; return what was selected on the CPU."""
    (selection,) = qsgd.select([name], [gradient.to(DEVICE)], [gradient.numel()])
    return moved(selection, "cpu")


def restored(selection: Selection) -> Tensor:
    """Turn codes back into what they stand for."""
    scales, bucket_size, levels = selection.quantization
    return selection.values * scales.repeat_interleave(bucket_size)[: selection.numel] / levels


@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize("levels", [1, 7, 127])
def test_it_is_right_on_average_with_the_variance_of_the_paper(levels: int, norm: str) -> None:
    draws, bucket_size = 2000, 128
    gradient = torch.randn(600, generator=torch.Generator().manual_seed(0)) ** 3
    qsgd = begun(levels=levels, bucket_size=bucket_size, norm=norm)
    drawn = []
    for step in range(draws):
        qsgd.load_state_dict({"step": step})
        drawn.append(restored(selected(qsgd, gradient)).double())
    errors = torch.stack(drawn) - gradient.double()
    scales = selected(qsgd, gradient).quantization.scales.repeat_interleave(bucket_size)[:600].double()
    units = gradient.double() / scales * levels
    fraction = units - units.floor()
    variance = fraction * (1 - fraction) * (scales / levels) ** 2
    standard_errors = (variance / draws).sqrt() + scales / levels * 2.0**-17
    # What is drawn once in a million comes once too often somewhere, which is many standard errors.
    assert (errors.mean(dim=0).abs() <= 5 * standard_errors + 2 * scales / levels / draws).all()
    for error, expected, bucket in zip(*(each.split(bucket_size, -1) for each in (errors, variance, gradient))):
        torch.testing.assert_close(error.square().sum(dim=1).mean(), expected.sum(), rtol=0.1, atol=0)
        bound = min(len(bucket) / levels**2, math.sqrt(len(bucket)) / levels) * bucket.double().square().sum()
        assert error.square().sum(dim=1).mean() <= bound


def count_bytes(rank: int, settings: dict[str, Any], ddp_arguments: dict[str, Any]) -> float:
    """Return the bytes of one step of a layer of 21 000 weights and 70 biases."""
    with sparse_ddp(nn.Linear(300, 70), QSGD(**settings), **ddp_arguments) as (ddp, engine):
        backpropagate(ddp, engine, ddp(torch.randn(4, 300, device=DEVICE)).sum())
        return engine.compression_stats()["wire_bytes"]


@pytest.mark.parametrize("tracks_usage", [False, True])
@pytest.mark.parametrize(
    ("levels", "bits"), [(1, 2), (2, 3), (3, 3), (4, 4), (7, 4), (8, 5), (63, 7), (64, 8), (127, 8)]
)
def test_a_code_takes_as_many_bits_as_it_must(pair: Pool, levels: int, bits: int, tracks_usage: bool) -> None:
    assert bits == math.ceil(math.log2(2 * levels + 1))
    scales = 4 * (math.ceil(21_000 / 512) + 1)
    codes = math.ceil(21_070 / 8) * bits
    arguments = {"find_unused_parameters": tracks_usage, "schedule": "single"}
    message = 16 * math.ceil((scales + codes + 2 * tracks_usage) / 16)
    assert pair.run(count_bytes, {"levels": levels}, arguments) == [message] * 2


def test_draws_differ_between_ranks_steps_parameters_and_seeds() -> None:
    gradient = torch.randn(600)
    later = begun()
    later.load_state_dict({"step": 1})
    both = ("weight", "bias")
    codes = [
        selected(begun(), gradient).values,
        selected(begun(rank=1), gradient).values,
        selected(later, gradient).values,
        selected(begun(names=both), gradient, "bias").values,
        selected(begun(seed=1), gradient).values,
    ]
    for position, one in enumerate(codes):
        assert all((one != other).float().mean() > 0.1 for other in codes[:position])
    assert torch.equal(codes[0], selected(begun(names=both), gradient).values)


def test_nobody_elses_random_numbers_are_touched() -> None:
    modules = [torch, torch.cuda] if DEVICE.type == "cuda" else [torch]
    before = [module.get_rng_state() for module in modules]
    selected(begun(), torch.randn(600, generator=torch.Generator().manual_seed(0)))
    assert all(torch.equal(module.get_rng_state(), state) for module, state in zip(modules, before))


def train_with_restart(rank: int, restart_after: int) -> dict[str, Tensor]:
    """Train four steps; after some of them go on from what was saved, with everything built anew."""
    saved: dict[str, Any] = {"parameters": model().state_dict(), "compressor": {"step": 0}}
    for steps in (range(restart_after), range(restart_after, 4)):
        net, qsgd = model(), QSGD()
        net.load_state_dict(saved["parameters"])
        with sparse_ddp(net, qsgd) as (ddp, engine):
            qsgd.load_state_dict(saved["compressor"])
            losses = (ddp(batch(rank, step)).square().mean() for step in steps)
            for _ in sgd_steps(ddp, engine, losses, lr=0.05):
                pass
            saved = {"parameters": net.state_dict(), "compressor": engine.state_dict()["compressor"]}
    assert saved["compressor"] == {"step": 4}
    return parameters_of(ddp)


def test_a_restart_continues_the_same_draws(pair: Pool) -> None:
    (through, _), (resumed, _) = pair.run(train_with_restart, 4), pair.run(train_with_restart, 2)
    assert all(torch.equal(through[name], resumed[name]) for name in through)


def test_a_new_model_starts_from_the_first_step() -> None:
    qsgd = begun()
    qsgd.load_state_dict({"step": 7})
    qsgd.begin(ModelLayout(("weight",), (600,), 0, 2, DEVICE))
    assert qsgd.state_dict() == {"step": 0}


def test_only_the_bucket_of_what_is_not_finite_is_lost() -> None:
    gradient = torch.ones(600)
    for poison in (float("nan"), float("inf"), float("-inf")):
        gradient[70] = poison
        for norm in ("l2", "max"):
            decoded = restored(selected(begun(bucket_size=64, norm=norm), gradient))
            assert not decoded[64:128].isfinite().any()
            assert decoded[:64].isfinite().all()
            assert decoded[128:].isfinite().all()


@pytest.mark.parametrize("size", [1e-44, 1e-30, 1e30, 3e38])
def test_every_size_of_a_gradient_is_quantized(size: float) -> None:
    gradient = torch.full((600,), size)
    for norm in ("l2", "max"):
        selection = selected(begun(bucket_size=16, norm=norm, levels=4), gradient)
        assert (selection.quantization.scales >= gradient[0]).all()
        assert selection.quantization.scales.isfinite().all()
        assert selection.values.any()


REFUSALS = {
    "no level": ({"levels": 0}, r"levels=0 must be .* 1 to 127.*7 takes 4 bits"),
    "too many levels": ({"levels": 128}, r"levels=128 must be .* 1 to 127"),
    "part of a level": ({"levels": 1.5}, r"levels=1.5 must be a whole number"),
    "no bucket": ({"bucket_size": 0}, r"bucket_size=0 must be .* at least 1; 512 adds"),
    "bucket of another type": ({"bucket_size": "512"}, r"bucket_size='512' must be a whole number"),
    "seed": ({"seed": None}, r"seed=None must be a whole number; leave it out"),
    "norm": ({"norm": "l1"}, r"norm='l1' must be one of 'l2', 'max'"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSALS.values(), ids=REFUSALS)
def test_bad_arguments_are_refused_with_a_cure(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QSGD(**arguments)


@pytest.mark.parametrize("state", [{}, {"threshold": 1.0}, {"step": 1, "threshold": 1.0}], ids=str)
def test_a_state_of_another_method_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"keeps the number of steps as 'step'.*that it was saved with"):
        QSGD().load_state_dict(state)


def test_the_wire_refuses_what_is_not_quantized() -> None:
    wire = WIRE_FORMATS["codes"](torch.float32, 0, 2)
    tensor = torch.ones(3)
    with pytest.raises(ValueError, match=r"quantization=None cannot travel as wire_format='codes'.*'gather'"):
        next(wire.exchange(WholeSelection.of([tensor]), [tensor], None))
