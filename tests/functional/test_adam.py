import pytest
import torch

from lightning_sparse.functional.adam import (
    AdamScalars,
    accumulate_updates,
    apply_updates,
    to_gradients,
    to_updates,
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("numel", NUMELS)
def test_a_mean_update_is_converted_to_a_gradient_and_back(numel, scale, dtype):
    second, update = normal(numel, 1).square_(), arrived(numel)
    gradient, found = update.clone(), torch.empty_like(update, dtype=dtype)
    to_gradients([gradient], [second], [SCALARS])
    torch.testing.assert_close(gradient, update * ((second / 0.4).sqrt() + 1e-8))
    factor = None if scale is None else torch.full((), scale, device=DEVICE)
    to_updates([gradient * (scale or 1.0)], [second], [SCALARS], [found], factor)
    torch.testing.assert_close(found, update.to(dtype))


@pytest.mark.parametrize("shrinkage", [1.0, 0.99])
@pytest.mark.parametrize("numel", NUMELS)
def test_a_step_applies_an_update_once(numel, shrinkage):
    update, found = arrived(numel), normal(numel, 0)
    apply_updates([found], [update], 0.1, shrinkage)
    assert not update.any()
    torch.testing.assert_close(found, shrinkage * normal(numel, 0) - 0.1 * arrived(numel))
