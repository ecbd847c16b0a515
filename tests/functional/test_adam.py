import pytest
import torch

from lightning_sparse.functional.adam import (
    AdamScalars,
    accumulate_updates,
    apply_updates,
    denominator,
    few_to_gradients,
    look_up,
    to_gradients,
)
from tests.helpers.devices import DEVICE

SCALARS = AdamScalars(beta2=0.95, weight=0.4, eps=1e-8)
NUMELS = [5, 100_003, 1 << 20]  # less than a piece, and several pieces


def normal(numel, seed, dtype=torch.float32):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=dtype).to(DEVICE)


def places(numel):
    return (
        torch.stack([torch.arange(0, numel, 97), torch.arange(0, numel, 97).roll(1)])
        .sort(dim=1)
        .values.flatten()
        .to(DEVICE)
    )


def arrived(numel):
    gradient = torch.zeros(numel, device=DEVICE)
    chosen = places(numel).unique()
    gradient[chosen] = normal(len(chosen), 3)
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
def test_few_places_are_as_good_as_all(numel):
    second = normal(numel, 1).square_()
    found, expected = arrived(numel), arrived(numel)
    looked_up = look_up([places(numel)], [found], [second], [SCALARS])
    assert looked_up or numel < 1 << 20
    if looked_up:
        few_to_gradients([found], looked_up)
    else:
        to_gradients([found], [second], [SCALARS])
    to_gradients([expected], [second], [SCALARS])
    assert torch.equal(found, expected)
    torch.testing.assert_close(found, arrived(numel) * denominator(second, SCALARS))


@pytest.mark.parametrize("is_changed", [False, True], ids=["as it arrived", "written elsewhere since"])
@pytest.mark.parametrize("shrinkage", [1.0, 0.99])
@pytest.mark.parametrize("numel", NUMELS)
def test_a_step_applies_all_of_a_gradient(numel, shrinkage, is_changed):
    second, gradient = normal(numel, 1).square_(), arrived(numel)
    if is_changed:
        gradient[1] = 1e-3  # no value arrived here
    unchanged = gradient.clone()
    found = {}
    looked_up = look_up([places(numel)], [gradient], [second], [SCALARS]).get(0)
    for where, known in (("few", looked_up), ("all", None)):
        found[where] = normal(numel, 0)
        apply_updates([found[where]], [gradient], [known], [second], [SCALARS], 0.1, shrinkage)
        assert torch.equal(gradient, unchanged)
    assert torch.equal(found["few"], found["all"])
    expected = shrinkage * normal(numel, 0) - 0.1 * gradient / ((second / 0.4).sqrt() + 1e-8)
    torch.testing.assert_close(found["all"], expected)
