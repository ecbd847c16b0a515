"""Rounding for the wire."""

import pytest
import torch

from lightning_sparse.functional import round_to
from tests.helpers.devices import devices


@devices
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_only_what_is_infinite_becomes_infinite(dtype: torch.dtype, device: str) -> None:
    limit = torch.finfo(torch.float32).max
    values = torch.tensor([limit, -limit, 65_519.9, 1e6, -1e30, 0.0, 1.0], device=device)
    assert round_to(values, dtype).isfinite().all()
    special = round_to(torch.tensor([float("inf"), float("-inf"), float("nan")], device=device), dtype)
    assert special[0] == float("inf")
    assert special[1] == float("-inf")
    assert special[2].isnan()


@devices
def test_values_in_range_are_rounded_to_nearest(device: str) -> None:
    values = torch.randn(1000, device=device)
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(round_to(values, dtype), values.to(dtype))


def test_the_same_type_is_passed_through() -> None:
    values = torch.randn(3)
    assert round_to(values, torch.float32) is values
