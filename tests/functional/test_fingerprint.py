"""A fingerprint sees every bit, and nothing but bits."""

import pytest
import torch

from lightning_sparse.functional.reductions import fingerprint
from tests.helpers.devices import devices

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]


def slow_fingerprint(tensor):
    kinds = {4: torch.int32, 8: torch.int64}
    total = 0
    for place, bits in enumerate(tensor.flatten().view(kinds[tensor.element_size()]).tolist()):
        total += ((place * 0x9E3779B97F4A7C15) % 2**64 | 1) * bits
    return (total + 2**63) % 2**64 - 2**63


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_the_sum_that_it_says(device, dtype):
    tensor = torch.randn(37, 5, dtype=dtype, generator=torch.Generator().manual_seed(0))
    assert fingerprint(tensor.to(device)).item() == slow_fingerprint(tensor)


@devices
def test_pieces_of_a_large_tensor_have_places_of_their_own(device):
    tensor = torch.randn((1 << 20) + 3, generator=torch.Generator().manual_seed(0))
    exchanged = tensor.clone()
    exchanged[[0, 1 << 20]] = tensor[[1 << 20, 0]]
    assert fingerprint(tensor.to(device)).item() == slow_fingerprint(tensor)
    assert fingerprint(exchanged.to(device)) != fingerprint(tensor.to(device))


@devices
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_element_changes_it_in_every_type(device, dtype):
    tensor = torch.zeros(100, dtype=dtype, device=device)
    changed = tensor.clone()
    changed[73] = 1
    assert fingerprint(tensor) == fingerprint(tensor.clone())
    assert fingerprint(tensor) != fingerprint(changed)


def test_it_tells_zeros_of_different_sign_apart_and_takes_what_is_empty_or_not_contiguous():
    assert fingerprint(torch.tensor([0.0])) != fingerprint(torch.tensor([-0.0]))
    assert fingerprint(torch.tensor([])) == 0
    matrix = torch.arange(6.0).view(2, 3)
    assert fingerprint(matrix.t()) == fingerprint(matrix.t().contiguous())
