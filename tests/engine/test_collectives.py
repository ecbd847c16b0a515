"""Collectives give what torch's own give, whichever way the bytes go."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse.engine.collectives import Collectives, _all_gather_into
from lightning_sparse.schedule.cost.network import DIRECT_BYTES
from lightning_sparse.testing.pool import Pool


def gathered(rank: int, nbytes: int, dtype: torch.dtype, has_out: bool) -> tuple[Tensor, Tensor, int]:
    """Gather different bytes from every rank; return them, what torch gathers, and how often torch's ring was used."""
    collectives = Collectives(list(range(dist.get_world_size())), torch.device("cpu"))
    torch.manual_seed(rank)
    mine = torch.randint(-128, 128, (nbytes,), dtype=torch.int8).view(dtype)
    expected = [torch.empty_like(mine) for _ in range(collectives.ranks)]
    ring = "lightning_sparse.engine.collectives._all_gather_into"
    try:
        dist.all_gather(expected, mine)
        out = torch.empty(collectives.ranks, mine.numel(), dtype=dtype) if has_out else None
        with patch(ring, wraps=_all_gather_into) as rings:
            received = collectives.all_gather(mine, out)
        assert out is None or received is out
    finally:
        collectives.close()
    return received.view(torch.int8), torch.stack(expected).view(torch.int8), rings.call_count


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("ranks", "nbytes", "rings"),
    [(2, 8, 1), (3, 0, 1), (3, 8, 0), (4, DIRECT_BYTES // 4, 0), (4, DIRECT_BYTES // 4 + 4, 1)],
)
def test_an_all_gather_gives_what_torch_gives(
    pools: dict[int, Pool], dtype: torch.dtype, ranks: int, nbytes: int, rings: int
) -> None:
    for received, expected, used in pools[ranks].run(gathered, nbytes, dtype, nbytes != 8):
        assert torch.equal(received, expected)
        assert used == rings


def added_up(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    """Add up different numbers of every rank; return the sum, what it should be, and how often torch's was used."""
    collectives = Collectives(list(range(dist.get_world_size())), torch.device("cpu"))
    theirs = [
        torch.randn(shape, generator=torch.Generator().manual_seed(each)).mul(8).to(dtype)
        for each in range(collectives.ranks)
    ]
    mine = theirs[rank]
    expected = torch.stack(theirs).double().sum(dim=0)
    try:
        with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as rings:
            received = collectives.all_reduce(mine)
        assert received.data_ptr() == mine.data_ptr()
    finally:
        collectives.close()
    return received, expected, rings.call_count


@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("ranks", "shape", "rings"),
    [(2, (5,), 1), (3, (0,), 1), (3, (5,), 0), (4, (3, 7), 0), (4, (), 0), (3, (DIRECT_BYTES // 2 + 1,), 1)],
)
def test_an_all_reduce_adds_up_in_place_the_same_on_all_ranks(
    pools: dict[int, Pool], dtype: torch.dtype, ranks: int, shape: tuple[int, ...], rings: int
) -> None:
    sums = pools[ranks].run(added_up, shape, dtype)
    for received, expected, used in sums:
        assert torch.equal(received, sums[0][0])
        torch.testing.assert_close(received.double(), expected, rtol=0.02, atol=0.1)
        assert used == rings


def added_up_sparse(rank: int) -> Tensor:
    """Add up one element of each rank, of a sparse layout."""
    collectives = Collectives(list(range(dist.get_world_size())), torch.device("cpu"))
    try:
        mine = torch.sparse_coo_tensor([[rank]], [1.0 + rank], (4,), check_invariants=True)
        return collectives.all_reduce(mine).to_dense()
    finally:
        collectives.close()


def test_a_sparse_layout_is_added_up_too(pools: dict[int, Pool]) -> None:
    assert [each.tolist() for each in pools[3].run(added_up_sparse)] == [[1.0, 2.0, 3.0, 0.0]] * 3
