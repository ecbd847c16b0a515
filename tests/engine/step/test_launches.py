"""The launches of a step on a GPU, counted without one: what they grow with, and what they do not."""

from typing import NamedTuple

import pytest
import torch

from tests.helpers.examples import load

launches = load("launches")

# Blocks, batches and pieces are for large tensors, and bounded by their elements; here none is that large.
SIZES = tuple(max(1 << 9, size >> 10) for size in launches.SIZES)
MANY, FEW, RANKS, FEW_RANKS = 120, 40, 64, 4


class Growth(NamedTuple):
    """Launches that a step takes more for a tensor more, and for a rank more, at most."""

    by_tensor: float = 0
    by_rank: float = 0


# Lists of tensors count as one launch here. Where a system's own launches grow, the reason is beside it.
GROWTH = {
    "topk 0.001, gather": Growth(),
    "lags 0.001, AdamW": Growth(),
    "omgs 0.001, gather": Growth(),
    "dgc 0.001, gather": Growth(),
    # torch has no mean of several tensors. What many ranks sent is held as a byte for each element, where that is less.
    "sdagc 0.001, gather": Growth(by_tensor=1, by_rank=0.1),
    # Small tensors are gathered, with more ranks more of them, and the tensors of each way lie apart in memory; what
    # ranks send is added rank by rank, in the order that no grouping changes.
    "topk 0.01, owners": Growth(by_tensor=4, by_rank=24),
    "exdyna 0.001": Growth(by_rank=1),  # rank by rank; it indexes one by one what lies in its partition, a 64th here
    "micro 0.001": Growth(by_rank=1),  # likewise
    # Shards of a tensor are padded, and lie apart as they arrive; rank by rank.
    "dense": Growth(by_tensor=2, by_rank=1),
    "a2sgd": Growth(by_tensor=25),  # passes over each tensor for itself
    "qsgd": Growth(by_tensor=5, by_rank=7),  # likewise, to whole blocks, which are packed in pieces of a CPU's cache
}


SYSTEMS = {**launches.SYSTEMS, "lags 0.001, AdamW": launches.System("lags", 0.001, "gather", is_corrected=True)}


def counted(system, tensors, ranks):
    torch.manual_seed(0)
    sizes = SIZES[:tensors]
    return launches.launches_of_a_step(SYSTEMS[system], ranks, sizes, small=1 << 40, tensors_a_launch=len(SIZES))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("system", GROWTH)
def test_launches_grow_as_is_said_with_tensors_and_with_ranks(system):
    growth = GROWTH[system]
    many, few_tensors, few_ranks = (
        counted(system, *sizes).calls.total() for sizes in ((MANY, RANKS), (FEW, RANKS), (MANY, FEW_RANKS))
    )
    assert many - few_tensors <= growth.by_tensor * (MANY - FEW)
    assert many - few_ranks <= growth.by_rank * (RANKS - FEW_RANKS)
