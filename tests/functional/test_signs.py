"""Totals and shifts by sign, against Python's own arithmetic."""

import math

import pytest
import torch

from lightning_sparse.functional.reductions import shift_by_sign, sign_totals
from tests.helpers.devices import devices

SIZES = [1, 997, (1 << 18) + 3]


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("numel", SIZES)
def test_totals_are_sums_to_a_few_roundings_of_what_travels(numel, dtype, device):
    tensor = torch.randn(numel, dtype=dtype, generator=torch.Generator().manual_seed(numel))
    tensor[::5] = 0.0
    numbers = tensor.tolist()
    positive, negative = [number for number in numbers if number > 0], [-number for number in numbers if number < 0]
    expected = [[math.fsum(numbers), len(numbers)] for numbers in (positive, negative)]
    totals = sign_totals(tensor.to(device)).cpu()
    exact = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(totals, exact, rtol=4 * torch.finfo(dtype).eps, atol=0)


@devices
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_shows_in_the_totals(poison, device):
    assert not sign_totals(torch.tensor([1.0, poison, -1.0], device=device)).isfinite().all()


@devices
@pytest.mark.parametrize("numel", SIZES)
def test_each_sign_gets_its_shift_and_zeros_none(numel, device):
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(device)
    tensor[::5] = 0.0
    before = tensor.clone()
    above, below = torch.tensor(0.3, device=device), torch.tensor(-7.1, device=device)
    expected = torch.where(tensor > 0, tensor + above, torch.where(tensor < 0, tensor + below, tensor))
    assert torch.equal(shift_by_sign(tensor, above, below), expected)
    assert torch.equal(tensor, before)


@devices
def test_a_shift_that_is_not_finite_spares_nothing(device):
    nan, one = torch.tensor(float("nan"), device=device), torch.tensor(1.0, device=device)
    for shifts in ((nan, one), (one, nan)):
        assert not shift_by_sign(torch.tensor([1.0, -1.0, 0.0], device=device), *shifts).isfinite().any()
