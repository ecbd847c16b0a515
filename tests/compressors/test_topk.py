import pytest
import torch

from lightning_sparse.compressors.topk import batched_top_k_indices, top_k_indices
from tests.helpers.devices import devices


def normal(numel):
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel))


def few_rows(numel):
    tensor = torch.zeros(numel)
    tensor[numel // 7 : numel // 7 + max(1, numel // 50)] = normal(max(1, numel // 50))
    return tensor


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
