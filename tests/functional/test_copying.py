"""Copying between flat tensors."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sparse.functional.elements import add_rows


@pytest.fixture
def threads() -> Iterator[None]:
    """Let torch use several threads, as a user's ranks do."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 3, 1_000, 1_024, 1_025, 10_000, 100_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_ranks_sent_of_one_element_is_added_in_the_order_of_ranks(
    threads: None, count: int, dtype: torch.dtype
) -> None:
    ranks = 4
    numel = count + count // 4 + 1  # so that most places are taken by all ranks
    generator = torch.Generator().manual_seed(count)
    # Pieces of what has arrived for a group: not contiguous.
    values = torch.randn(ranks, count + 7, dtype=dtype, generator=generator)[:, 2 : 2 + count]
    rows = [torch.randperm(numel, generator=generator)[:count].sort().values for _ in range(ranks)]
    indices = torch.stack([torch.nn.functional.pad(row, (3, 4)) for row in rows])[:, 3 : 3 + count]
    expected = torch.zeros(numel, dtype=dtype)
    for row, row_values in zip(rows, values):
        expected[row] += row_values
    assert torch.equal(add_rows(values, indices, torch.zeros(numel, dtype=dtype)), expected)


class Calls(TorchDispatchMode):
    """Count the operations of a device that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one."""
        self.count += 1
        return operation(*args, **(kwargs or {}))


def test_a_device_is_called_as_often_for_many_ranks_as_for_few() -> None:
    counts = []
    for ranks in (4, 64):
        values, indices = (
            torch.zeros(ranks, 10, device="meta"),
            torch.zeros(ranks, 10, dtype=torch.int64, device="meta"),
        )
        with Calls() as calls:
            add_rows(values, indices, torch.zeros(100, device="meta"))
        counts.append(calls.count)
    assert counts[0] == counts[1]
