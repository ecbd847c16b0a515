"""The fast selection against torch.topk, where it is easy and where it misleads; what reaches a floor."""

import math
from unittest import mock

import pytest
import torch

from lightning_sparse.functional import segments, topk
from lightning_sparse.functional.topk import (
    batched_top_k_indices,
    indices_reaching,
    indices_reaching_each,
    top_k_indices,
    top_k_of_all,
)
from tests.helpers.devices import devices, moved


def normal(numel):
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel))


def spike(numel):
    tensor = torch.zeros(numel)
    tensor[numel // 3] = -1e30
    return tensor


def few_rows(numel):
    """Return the gradient of an embedding: everything in few rows."""
    tensor = torch.zeros(numel)
    tensor[numel // 7 : numel // 7 + max(1, numel // 50)] = normal(max(1, numel // 50))
    return tensor


INPUTS = {
    "normal": normal,
    "constant": lambda numel: torch.full((numel,), -0.25),
    "zero": torch.zeros,
    "few distinct values": lambda numel: normal(numel).round(),
    "one spike": spike,
    "sorted": lambda numel: torch.arange(numel, dtype=torch.float32),
    "sorted down": lambda numel: -torch.arange(numel, 0, -1, dtype=torch.float32),
    "negative": lambda numel: -normal(numel).abs(),
    "heavy tails": lambda numel: normal(numel) ** 9,
    "denormal": lambda numel: normal(numel) * 1e-42,
    "one large in every hundred": lambda numel: torch.where(torch.arange(numel) % 100 == 0, 9.0, normal(numel)),
    "periodic": lambda numel: torch.sin(torch.arange(numel) * (2 * torch.pi / 64)),
    "few rows": few_rows,
}


def assert_are_positions(indices, count):
    assert indices.shape == (count,)
    assert indices.dtype == torch.int64
    assert (indices.diff() > 0).all()


@pytest.mark.sampled
@devices
@pytest.mark.parametrize("numel", [1, 2, 63, 64, 1000, 32_769, 100_003, 1_000_003])
@pytest.mark.parametrize("kind", INPUTS)
def test_selects_what_torch_topk_selects(kind, numel, device):
    tensor = INPUTS[kind](numel).to(device)
    before = tensor.clone()
    largest = torch.topk(tensor.abs(), numel).values
    for density in (1e-9, 0.0003, 0.001, 0.0039, 0.01, 0.1, 0.5, 0.99):
        count = max(1, round(density * numel))
        indices = top_k_indices(tensor, count)
        assert_are_positions(indices, count)
        assert torch.equal(tensor[indices].abs().sort(descending=True).values, largest[:count]), f"{density=}"
    assert torch.equal(tensor, before)


@devices
@pytest.mark.parametrize("density", [0.0003, 0.01, 0.2])
@pytest.mark.parametrize("numel", [100, 40_000, 300_000])
def test_a_nan_and_an_infinity_are_larger_than_any_number(numel, density, device):
    tensor = normal(numel).to(device)
    tensor[numel // 2], tensor[-1], tensor[0] = float("nan"), float("-inf"), float("nan")
    count = max(3, round(density * numel))
    indices = top_k_indices(tensor, count)
    assert {0, numel // 2, numel - 1} <= set(indices.tolist())
    assert indices.numel() == indices.unique().numel() == count


@devices
@pytest.mark.parametrize("density", [0.0003, 0.03])
def test_all_nan_still_selects_the_count(density, device):
    indices = top_k_indices(torch.full((200_000,), float("nan"), device=device), round(density * 200_000))
    assert indices.unique().numel() == round(density * 200_000)


@devices
@pytest.mark.parametrize("numel", [10, 5000, 70_000, 2_200_000])
def test_a_batch_selects_as_each_alone_does(numel, device):
    tensors = [normal(numel).to(device) * scale for scale in (1.0, -2.0, 0.0)]
    count = max(1, numel // 1000)
    for tensor, indices in zip(tensors, batched_top_k_indices(tensors, count)):
        assert torch.equal(indices, top_k_indices(tensor, count))


@devices
@pytest.mark.parametrize("numel", [100, 400_000])
def test_is_deterministic_and_leaves_the_global_generator_alone(numel, device):
    modules = [torch] if device == "cpu" else [torch, torch.cuda]
    states = [module.get_rng_state() for module in modules]
    tensor = normal(numel).round().to(device)
    assert torch.equal(top_k_indices(tensor, 50), top_k_indices(tensor.clone(), 50))
    assert all(torch.equal(module.get_rng_state(), state) for module, state in zip(modules, states))


@pytest.mark.parametrize("count", [0, -1, 11])
def test_an_impossible_count_is_refused(count):
    with pytest.raises(ValueError, match=rf"count={count} must lie between 1 and the number of elements, 10"):
        top_k_indices(torch.ones(10), count)


@devices
@pytest.mark.parametrize("numel", [70_000, 300_001])
def test_neighbours_do_not_decide_between_equal_magnitudes(numel, device):
    kinds = [normal(numel).round(), few_rows(numel).round(), normal(numel), torch.full((numel,), 2.0)]
    tensors = [tensor.to(device) for tensor in kinds]
    count = numel // 1000
    for tensor, indices in zip(tensors, batched_top_k_indices(tensors, count)):
        assert torch.equal(indices, top_k_indices(tensor, count))


def test_which_of_equal_magnitudes_a_device_takes_depends_on_the_tensor_alone():
    generator = torch.Generator().manual_seed(1)
    tensor, *others = ((16 * torch.randn(1 << 17, generator=generator)).round() for _ in range(3))  # many are equal
    small = torch.ones(1000)
    alone, _ = top_k_of_all([tensor], [512])
    with mock.patch.object(segments, "_MANY", 1 << 10), mock.patch.object(topk, "_SORTED", 500):
        narrowed, _ = top_k_of_all([small, tensor, small, *others], [7, 512, 7, 512, 300])
    assert (narrowed[7 : 7 + 512] - 1000).tolist() == alone.tolist()


@devices
@pytest.mark.parametrize("numel", [1, 7, 8, 300_001])
@pytest.mark.parametrize("floor", [0.0, 1.5, 100.0, torch.tensor(1.5)])
def test_what_reaches_a_floor(numel, floor, device):
    tensor, floor = moved((torch.randn(numel, generator=torch.Generator().manual_seed(1)), floor), device)
    assert torch.equal(indices_reaching(tensor, floor), (tensor.abs() >= floor).nonzero().squeeze(1))
    tensor[-1] = math.nan
    assert indices_reaching(tensor, floor)[-1] == numel - 1


@devices
@pytest.mark.parametrize("numels", [[7], [0, 0], [0, 9000, 0, 5, 1], [300_001, 64]])
def test_what_reaches_a_floor_in_many_is_what_reaches_it_in_each(numels, device):
    generator = torch.Generator().manual_seed(1)
    tensors = moved([torch.randn(numel, generator=generator) for numel in numels], device)
    found = indices_reaching_each(tensors, 1.5)
    assert [each.device for each in found] == [tensor.device for tensor in tensors]
    for tensor, each in zip(tensors, found):
        assert torch.equal(each, (tensor.abs() >= 1.5).nonzero().squeeze(1))
