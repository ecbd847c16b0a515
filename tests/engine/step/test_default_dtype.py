"""Exchanges with float64 as torch's default dtype."""

from contextlib import ExitStack

import pytest
import torch

from lightning_sparse.testing.invariants import balance, settings_of
from tests.helpers.sparse_ddp import DIFFERENT_NAMES


def balance_in(rank, settings, dtype):
    with ExitStack() as later:
        later.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(dtype)
        return balance(rank, settings, 3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("compressor", DIFFERENT_NAMES)
def test_the_default_dtype_is_exchanged(pair, compressor):
    for book in pair.run(balance_in, settings_of(compressor), torch.float64):
        for name, gradient in (item for entry in book for item in entry["applied"].items()):
            assert gradient.dtype is torch.float64, f"{name}: dtype is {gradient.dtype}"
            assert gradient.isfinite().all(), f"{name}: not finite, {gradient}"
