import pytest
import torch

from lightning_sparse.functional.adam import (
    AdamScalars,
    accumulate_updates,
    apply_updates,
    denominator,
    to_gradients,
)
from tests.helpers.devices import DEVICE

SCALARS = AdamScalars(beta2=0.95, weight=0.4, eps=1e-8)
NUMELS = [5, 100_003, 1 << 20]  # less than a piece, and several pieces


def normal(numel, seed, dtype=torch.float32):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=dtype).to(DEVICE)


def arrived(numel):
    gradient = torch.zeros(numel, device=DEVICE)
    gradient[::97] = normal(len(gradient[::97]), 3)
    return gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("numel", NUMELS)
def test_updates_are_the_formulas(numel, dtype):
    gradient, waiting, second = (normal(numel, seed, dtype) for seed in range(3))
    second.square_()
    root = (second / 0.4 + 4 * 0.05 * gradient.square() / 3).sqrt()
    expected = waiting + gradient / (root + 1e-8)
    accumulate_updates([gradient], [waiting], [second], [SCALARS], 3)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("numel", NUMELS)
def test_a_mean_update_is_converted_to_a_gradient(numel):
    second, update = normal(numel, 1).square_(), arrived(numel)
    to_gradients([update], [second], [SCALARS])
    torch.testing.assert_close(update, arrived(numel) * denominator(second, SCALARS))


@pytest.mark.parametrize("shrinkage", [1.0, 0.99])
@pytest.mark.parametrize("numel", NUMELS)
def test_a_step_applies_a_gradient(numel, shrinkage):
    second, gradient, found = normal(numel, 1).square_(), arrived(numel), normal(numel, 0)
    unchanged = gradient.clone()
    apply_updates([found], [gradient], [second], [SCALARS], 0.1, shrinkage)
    assert torch.equal(gradient, unchanged)
    expected = shrinkage * normal(numel, 0) - 0.1 * gradient / ((second / 0.4).sqrt() + 1e-8)
    torch.testing.assert_close(found, expected)
