"""Histograms of magnitudes against sorting, and magnitudes above a floor against a comparison."""

import math

import pytest
import torch

from lightning_sparse.functional.reductions import magnitude_histogram, magnitude_quantile
from lightning_sparse.functional.topk import indices_reaching, indices_reaching_each
from tests.helpers.devices import devices, moved


@devices
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("count", [1, 10, 500, 49_999, 50_000])
def test_the_quantile_is_that_of_the_sorted_magnitudes(count, scale, device):
    tensor = (scale * torch.randn(50_000, generator=torch.Generator().manual_seed(0))).to(device)
    threshold = magnitude_quantile(magnitude_histogram(tensor).double(), count)
    exact = tensor.abs().topk(count).values.min().item()
    assert threshold == pytest.approx(exact, rel=1 / 8)


@devices
def test_the_quantile_selects_about_the_number_asked_for(device):
    tensor = torch.randn(2_000_000, generator=torch.Generator().manual_seed(0)).to(device)
    for count in (200, 2000, 20_000, 200_000):
        threshold = magnitude_quantile(magnitude_histogram(tensor).double(), count)
        assert (tensor.abs() >= threshold).sum().item() == pytest.approx(count, rel=0.05)


@devices
def test_histograms_add_up(device):
    tensor = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0)).to(device)
    pieces = tensor.split([1, 2_999_998, 1])
    assert torch.equal(sum(map(magnitude_histogram, pieces)), magnitude_histogram(tensor))


@devices
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_zero_extremes_and_too_few_elements(dtype, device):
    limit = torch.finfo(dtype).max
    histogram = magnitude_histogram(torch.tensor([0.0, 0.0, 1.0, -limit], dtype=dtype, device=device)).double()
    assert 0 < magnitude_quantile(histogram, 1) < math.inf
    assert magnitude_quantile(histogram, 2) == pytest.approx(1.0, rel=1 / 8)
    assert magnitude_quantile(histogram, 3) == magnitude_quantile(histogram, 5) == 0.0
    assert magnitude_quantile(magnitude_histogram(torch.zeros(0, device=device)).double(), 1) == 0.0


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
