"""A gradient that is not finite reaches every rank, and moves nothing that is kept."""

import copy
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.testing.pool import Pool
from lightning_sparse.testing.subjects import density_for, each_compressor, each_way
from lightning_sparse.testing.tensors import assert_same
from lightning_sparse.testing.wrapping import Edges, backpropagate, batch, gradients_of, sparse_ddp

NOT_FINITE = (float("nan"), float("inf"), float("-inf"))


def train_with_gaps(rank: int, settings: dict[str, Any], gap_rank: int) -> list[tuple[Any, Any, Tensor, bool]]:
    """Train, with steps in which one rank's gradient is not finite.

    Returns, for each, what was kept before and after it, a gradient in it, and whether the next were all finite.
    """
    torch.manual_seed(0)
    gaps = []
    with sparse_ddp(Edges(), **settings) as (ddp, engine):
        for step in range(2):
            backpropagate(ddp, engine, ddp(batch(rank, step)))
        for step, poison in enumerate(NOT_FINITE, 1):
            before = copy.deepcopy(engine.state_dict())
            factor = poison if rank == gap_rank else 1.0
            backpropagate(ddp, engine, ddp(batch(rank, 2 * step)) + ddp.module.prime[3] * factor)
            poisoned, after = ddp.module.prime.grad.clone(), copy.deepcopy(engine.state_dict())
            backpropagate(ddp, engine, ddp(batch(rank, 2 * step + 1)))
            recovered = all(bool(gradient.isfinite().all()) for gradient in gradients_of(ddp).values())
            gaps.append((before, after, poisoned, recovered))
    return gaps


@each_way
@each_compressor
def test_a_gradient_that_is_not_finite_moves_nothing_that_is_kept(
    pair: Pool, compressor: str, schedule: str, wire: str
) -> None:
    settings = {"compressor": compressor, "density": density_for(compressor), "schedule": schedule, "wire": wire}
    assert_nothing_moves(pair.run(train_with_gaps, settings, 1))


def assert_nothing_moves(ranks: list[list[tuple[Any, Any, Tensor, bool]]]) -> None:
    """Check what :func:`train_with_gaps` returned on every rank: it shows, and neither stays nor moves what is kept."""
    for gaps in ranks:
        for poison, (before, after, poisoned, recovered) in zip(NOT_FINITE, gaps):
            assert_same(before, after)
            assert not poisoned.isfinite().all(), f"{poison} is hidden"
            assert recovered, f"{poison} is not forgotten"
