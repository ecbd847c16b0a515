"""Norms, also of what is too large for squares."""

import pytest
import torch

from lightning_sparse.functional.reductions import norm_of
from tests.helpers.devices import devices


@devices
@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1.0), (torch.float32, 1e25), (torch.float16, 6e4)])
def test_a_norm_is_that_of_float64(dtype, scale, device):
    tensors = [(torch.rand(count) * scale).to(device, dtype) for count in (1000, 17)]
    expected = torch.cat(tensors).double().norm()
    assert norm_of(tensors).isfinite()
    torch.testing.assert_close(norm_of(tensors).double(), expected, rtol=1e-5, atol=0)


@devices
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_has_no_finite_norm(value, device):
    assert not norm_of([torch.ones(3, device=device), torch.tensor([1.0, value], device=device)]).isfinite()
