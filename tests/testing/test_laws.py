"""Our own compressors keep the laws of the conformance kit, which gets them by their being registered."""

# ruff: noqa: F403
import pytest
import torch

from lightning_sparse.testing.laws.edges import *
from lightning_sparse.testing.laws.finiteness import *
from lightning_sparse.testing.laws.mass import *
from lightning_sparse.testing.laws.mass import balance
from lightning_sparse.testing.laws.replicas import *
from lightning_sparse.testing.subjects import each_schedule
from tests.helpers.devices import DEVICE, moved

pytestmark = pytest.mark.sampled


@pytest.mark.parametrize("ranks", [2, 3])
@each_schedule
def test_top_k_on_a_lossless_wire_loses_not_one_bit(pools, ranks, schedule):
    books = pools[ranks].run(balance, {"compressor": "topk", "density": 0.05, "schedule": schedule}, 4)
    # Divided where the exchange divides: a GPU multiplies by the inverse, which may differ in the last bit.
    for entries in zip(*moved(books, DEVICE)):
        for name in entries[0]["gradient"]:
            total = torch.zeros_like(entries[0]["gradient"][name])
            for entry in entries:
                accumulated = entry["before"][name] + entry["gradient"][name]
                was_sent = entry["after"][name] != accumulated
                assert not entry["after"][name][was_sent].any()
                total += torch.where(was_sent, accumulated, 0.0) / ranks
            assert torch.equal(total, entries[0]["applied"][name])
