"""Packed codes: nothing lost, nothing wasted."""

import pytest
import torch

from lightning_sparse.functional.codes import dequantize, pack_codes, packed_nbytes, quantize, unpack_codes
from tests.helpers.devices import devices

COUNTS = [*range(10), 1000, (1 << 18) - 1, 1 << 18, (1 << 18) + 1]


@devices
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_survive(bits, count, device):
    codes = torch.randint(1 << bits, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(device)
    packed = pack_codes(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (-(-count // 8) * bits,) == (packed_nbytes(count, bits),)
    assert torch.equal(unpack_codes(packed, bits, count), codes)


@devices
@pytest.mark.parametrize(("bits", "most"), [(2, 0.20), (3, 0.07), (4, 0.013), (8, 4e-5)])
def test_quantizing_leaves_little_of_normal_values(bits, most, device):
    values = torch.randn(3, 64 * 100, generator=torch.Generator().manual_seed(0)).to(device)
    left = values - dequantize(quantize(values, bits), bits)
    assert left.square().sum() <= most * values.square().sum()
