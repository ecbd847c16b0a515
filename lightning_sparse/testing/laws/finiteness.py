"""A gradient that is not finite reaches every rank, and moves nothing that is kept."""

import copy
import random
from itertools import product
from typing import Any

import torch

from lightning_sparse.testing.pool import Pool
from lightning_sparse.testing.subjects import density_for, each_compressor, each_way
from lightning_sparse.testing.tensors import differences
from lightning_sparse.testing.wrapping import Edges, backpropagate, batch, gradients_of, sparse_ddp

_PRIME = 997
_PLACES = (0, _PRIME // 2, _PRIME - 1, random.Random(0).randrange(_PRIME))
# What is not finite, and in which element of the prime size.
GAPS = list(product((float("nan"), float("inf"), float("-inf")), _PLACES))


def train_with_gaps(rank: int, settings: dict[str, Any], gap_rank: int) -> list[tuple[list[str], bool, bool]]:
    """Train, with steps in which one rank's gradient is not finite.

    Returns, for each, what it changed of what is kept, whether it shows here, and whether the next were all finite.
    """
    torch.manual_seed(0)
    gaps = []
    with sparse_ddp(Edges(), **settings) as (ddp, engine):
        for step in range(2):
            backpropagate(ddp, engine, ddp(batch(rank, step)))
        for step, (poison, place) in enumerate(GAPS, 1):
            before = copy.deepcopy(engine.state_dict())
            factor = poison if rank == gap_rank else 1.0
            backpropagate(ddp, engine, ddp(batch(rank, 2 * step)) + ddp.module.prime[place] * factor)
            changes = differences(before, engine.state_dict())
            shows = not ddp.module.prime.grad.isfinite().all()
            backpropagate(ddp, engine, ddp(batch(rank, 2 * step + 1)))
            recovered = all(bool(gradient.isfinite().all()) for gradient in gradients_of(ddp).values())
            gaps.append((changes, shows, recovered))
    return gaps


@each_way
@each_compressor
def test_a_gradient_that_is_not_finite_moves_nothing_that_is_kept(
    pair: Pool, compressor: str, schedule: str, wire: str
) -> None:
    settings = {"compressor": compressor, "density": density_for(compressor), "schedule": schedule, "wire": wire}
    assert_nothing_moves(pair.run(train_with_gaps, settings, 1))


def assert_nothing_moves(ranks: list[list[tuple[list[str], bool, bool]]]) -> None:
    """Check what :func:`train_with_gaps` returned on every rank: it shows, and neither stays nor moves what is kept."""
    for gaps in ranks:
        for (poison, place), (changes, shows, recovered) in zip(GAPS, gaps, strict=True):
            assert not changes, f"{poison} in element {place} changes {changes}"
            assert shows, f"{poison} in element {place} is hidden"
            assert recovered, f"{poison} in element {place} is not forgotten"
