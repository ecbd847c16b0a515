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
