import math

import pytest
import torch

from lightning_sparse.functional.reductions import (
    fingerprint,
    magnitude_histogram,
    magnitude_quantile,
    norm_of_all,
    norms_of,
    shift_by_sign,
    sign_totals,
)
from tests.helpers.devices import devices

SIZES = [1, 997, (1 << 18) + 3]


@devices
@pytest.mark.parametrize("scale", [1.0, 3e37], ids=["", "with sums beyond fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("numel", SIZES)
def test_totals_are_sums_to_a_few_roundings_of_what_travels(numel, dtype, scale, device):
    tensor = scale * torch.randn(numel, dtype=dtype, generator=torch.Generator().manual_seed(numel))
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
    above, below = torch.tensor(0.3, device=device), torch.tensor(-7.1, device=device)
    expected = torch.where(tensor > 0, tensor + above, torch.where(tensor < 0, tensor + below, tensor))
    shift_by_sign([tensor], above, below)
    assert torch.equal(tensor, expected)


@devices
def test_a_shift_that_is_not_finite_spares_nothing(device):
    nan, one = torch.tensor(float("nan"), device=device), torch.tensor(1.0, device=device)
    for shifts in ((nan, one), (one, nan)):
        tensor = torch.tensor([1.0, -1.0, 0.0], device=device)
        shift_by_sign([tensor], *shifts)
        assert not tensor.isfinite().any()


@devices
@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1.0), (torch.float32, 1e25), (torch.float16, 6e4)])
def test_a_norm_is_that_of_float64(dtype, scale, device):
    tensors = [(torch.rand(count) * scale).to(device, dtype) for count in (1000, 17)]
    expected = torch.cat(tensors).double().norm()
    assert norm_of_all(norms_of(tensors)).isfinite()
    torch.testing.assert_close(norm_of_all(norms_of(tensors)).double(), expected, rtol=1e-5, atol=0)


@devices
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_has_no_finite_norm(value, device):
    assert not norm_of_all(
        norms_of([torch.ones(3, device=device), torch.tensor([1.0, value], device=device)])
    ).isfinite()


@devices
def test_the_quantile_selects_about_the_number_asked_for(device):
    tensor = torch.randn(2_000_000, generator=torch.Generator().manual_seed(0)).to(device)
    for count in (200, 2000, 20_000, 200_000):
        threshold = magnitude_quantile(magnitude_histogram(tensor).double(), count)
        assert (tensor.abs() >= threshold).sum().item() == pytest.approx(count, rel=0.05)


@devices
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_zero_extremes_and_too_few_elements(dtype, device):
    limit = torch.finfo(dtype).max
    histogram = magnitude_histogram(torch.tensor([0.0, 0.0, 1.0, -limit], dtype=dtype, device=device)).double()
    assert 0 < magnitude_quantile(histogram, 1) < math.inf
    assert magnitude_quantile(histogram, 2) == pytest.approx(1.0, rel=1 / 8)
    assert magnitude_quantile(histogram, 3) == magnitude_quantile(histogram, 5) == 0.0
    assert magnitude_quantile(magnitude_histogram(torch.zeros(0, device=device)).double(), 1) == 0.0


def slow_fingerprint(tensor):
    kinds = {4: torch.int32, 8: torch.int64}
    total = 0
    for place, bits in enumerate(tensor.flatten().view(kinds[tensor.element_size()]).tolist()):
        total += ((place * 0x9E3779B97F4A7C15) % 2**64 | 1) * bits
    return (total + 2**63) % 2**64 - 2**63


@devices
def test_pieces_of_a_large_tensor_have_places_of_their_own(device):
    tensor = torch.randn((1 << 20) + 3, generator=torch.Generator().manual_seed(0))
    exchanged = tensor.clone()
    exchanged[[0, 1 << 20]] = tensor[[1 << 20, 0]]
    assert fingerprint(tensor.to(device)).item() == slow_fingerprint(tensor)
    assert fingerprint(exchanged.to(device)) != fingerprint(tensor.to(device))
