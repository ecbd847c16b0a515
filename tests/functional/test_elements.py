"""Elements are added in rank order. Indices are exact and as narrow as documented."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sparse.functional.elements import _FORMS, IndexCodec, add_rows, index_codec
from tests.helpers.devices import devices


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 3, 1_000, 1_024, 1_025, 10_000, 100_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_ranks_sent_of_one_element_is_added_in_the_order_of_ranks(threads, count, dtype):
    ranks = 4
    numel = count + count // 4 + 1  # most indices are on all ranks
    generator = torch.Generator().manual_seed(count)
    # Slices of a bucket are not contiguous.
    values = torch.randn(ranks, count + 7, dtype=dtype, generator=generator)[:, 2 : 2 + count]
    rows = [torch.randperm(numel, generator=generator)[:count].sort().values for _ in range(ranks)]
    indices = torch.stack([torch.nn.functional.pad(row, (3, 4)) for row in rows])[:, 3 : 3 + count]
    expected = torch.zeros(numel, dtype=dtype)
    for row, row_values in zip(rows, values):
        expected[row] += row_values
    assert torch.equal(add_rows(values, indices, torch.zeros(numel, dtype=dtype)), expected)


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += 1
        return operation(*args, **(kwargs or {}))


def test_a_device_is_called_once_for_many_ranks_and_for_few_as_often_as_there_are():
    counts = []
    for ranks in (4, 64, 512):
        values, indices = (
            torch.zeros(ranks, 10, device="meta"),
            torch.zeros(ranks, 10, dtype=torch.int64, device="meta"),
        )
        with Calls() as calls:
            add_rows(values, indices, torch.zeros(100, device="meta"))
        counts.append(calls.count)
    few, *many = counts
    assert many[0] == many[1] < few <= 4 * 4  # a view per rank, and its sum


@devices
@pytest.mark.parametrize("form", _FORMS, ids=lambda form: f"blocks of {1 << form[0]}")
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 65_535, 65_536, 65_537, 1_000_003])
@pytest.mark.parametrize("density", [0.0, 1e-9, 0.001, 0.1, 1.0])
def test_positions_survive(form, numel, density, device):
    count = math.ceil(density * numel)
    codec = IndexCodec(*form, numel, count)
    ranks = [
        torch.randperm(numel, generator=torch.Generator().manual_seed(seed))[:count].sort().values.to(device)
        for seed in (1, 2)
    ]
    wires = codec.encode(torch.stack(ranks))
    assert torch.equal(wires[1], codec.encode(ranks[1]))
    assert wires.dtype == torch.uint8
    assert wires.shape == (2, codec.nbytes)
    assert torch.equal(codec.decode(wires), torch.stack(ranks))


@pytest.mark.parametrize(
    ("density", "bytes_each"), [(0.0001, 2.7), (0.001, 2.07), (0.01, 1.8), (0.1, 1.1), (1.0, 1.01)]
)
def test_the_chosen_codec_is_narrow(density, bytes_each):
    numel = 10_000_000
    count = round(density * numel)
    assert index_codec(numel, count).nbytes / count <= bytes_each
