"""A gradient that is not finite reaches every rank, and moves nothing that is kept."""

import copy
from typing import Any

import pytest
import torch

from lightning_sparse.testing.equality import assert_same
from lightning_sparse.testing.laws.marks import each_schedule, each_wire
from lightning_sparse.testing.pool import Pool
from lightning_sparse.testing.subjects import any_compressor, density_for, holds_for
from lightning_sparse.testing.wrapping import Edges, backpropagate, batch, gradients_of, sparse_ddp


def train_with_gap(rank: int, settings: dict[str, Any], poisoned: float, gap_rank: int) -> tuple[Any, ...]:
    """Train two steps, then one in which one rank's gradient is not finite, then go on."""
    torch.manual_seed(0)
    with sparse_ddp(Edges(), **settings) as (ddp, engine):
        for step in range(2):
            backpropagate(ddp, engine, ddp(batch(rank, step)))
        before = copy.deepcopy(engine.state_dict())
        factor = poisoned if rank == gap_rank else 1.0
        backpropagate(ddp, engine, ddp(batch(rank, 2)) + ddp.module.prime[3] * factor)
        gradients = {name: gradient.clone() for name, gradient in gradients_of(ddp)}
        after = copy.deepcopy(engine.state_dict())
        backpropagate(ddp, engine, ddp(batch(rank, 3)))
        recovered = all(gradient.isfinite().all() for _, gradient in gradients_of(ddp))
        return before, after, gradients, recovered


@pytest.mark.parametrize("poisoned", [float("nan"), float("inf"), float("-inf")])
@each_wire
@each_schedule
@holds_for(any_compressor)
def test_a_gradient_that_is_not_finite_moves_nothing_that_is_kept(
    pair: Pool, compressor: str, schedule: str, wire: str, poisoned: float
) -> None:
    settings = {"compressor": compressor, "density": density_for(compressor), "schedule": schedule, "wire": wire}
    for before, after, gradients, recovered in pair.run(train_with_gap, settings, poisoned, 1):
        assert_same(before, after)
        assert not gradients["prime"].isfinite().all()
        assert recovered
