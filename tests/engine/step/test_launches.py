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
    "sdagc 0.001, gather": Growth(),
    # Rank by rank, what ranks send is added in the order that no grouping changes.
    "topk 0.01, owners": Growth(by_rank=1.1),
    "exdyna 0.001": Growth(by_rank=1),
    "micro 0.001": Growth(by_rank=1),
    "dense": Growth(by_rank=1),
    "qsgd": Growth(by_rank=1.1),
    "a2sgd": Growth(),
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


NODE_RANKS = {"node_ranks": launches.NODE_RANKS}
ADAM = {"is_corrected": True}
# Weighed launches of a step of BERT-large over 64 ranks, at most: what is counted now, and a little.
BUDGETS = {
    ("topk 0.001, gather", ()): 400,
    ("topk 0.001, owners", ()): 680,
    ("topk 0.01, gather", ()): 345,
    ("topk 0.01, owners", ()): 580,
    ("lags 0.001, 16 groups", ()): 1850,
    # Of large tensors AdamW's elements are looked up one tensor at a time, which saves 15 passes over the model.
    # A tenth of the tensors is learned from in each step.
    ("lags 0.001, clipped", ("AdamW",)): 1360,
    ("topk 0.001, gather", ("AdamW",)): 1250,
    ("omgs 0.001, gather", ()): 205,
    ("dgc 0.001, gather", ()): 410,
    ("sdagc 0.001, gather", ()): 495,
    ("exdyna 0.001", ()): 265,
    ("micro 0.001", ()): 250,
    ("qsgd", ()): 305,
    ("a2sgd", ()): 165,
    ("dense", ()): 85,
    ("diloco, a round", ()): 125,
    ("loco, a round", ()): 1150,
    ("topk 0.001, gather", ("two levels",)): 765,  # each gradient is cut among the ranks of a node by itself
    ("dense", ("two levels",)): 665,
}


@pytest.mark.parametrize(("system", "way"), BUDGETS, ids=lambda each: each if isinstance(each, str) else " ".join(each))
def test_a_step_stays_within_its_budget_of_launches(system, way):
    changed = {**(ADAM if "AdamW" in way else {}), **(NODE_RANKS if "two levels" in way else {})}
    torch.manual_seed(0)
    counted = launches.launches_of_a_step(launches.SYSTEMS[system]._replace(**changed))
    assert counted.weighed.total() <= BUDGETS[system, way]


# What ranks select has no size known beforehand: a list of numbers, and another where a message had too little room.
WAITING = {"exdyna 0.001": 2, "micro 0.001": 2}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("system", [name for name, each in launches.SYSTEMS.items() if each.rounds is None])
def test_the_host_waits_for_a_device_only_where_sizes_are_selected(system):
    counted = launches.launches_of_a_step(launches.SYSTEMS[system], 8, launches.SYSTEMS[system].sizes[:40])
    assert counted.waits.total() <= WAITING.get(system, 0)


# Passes over memory: bytes moved by those of the model in fp32. With 64 ranks a 16th of all elements arrives, as int64
# and fp32; the gradients of a piece are copied together, three times. torch's foreach AdamW makes some 20 by itself.
@pytest.mark.parametrize(
    ("is_corrected", "ranks", "most"), [(False, 64, 14), (False, 8, 12.6), (True, 64, 29.1), (True, 8, 25.1)]
)
def test_passes_over_memory_are_bounded(is_corrected, ranks, most):
    system = launches.SYSTEMS["topk 0.001, gather"]._replace(is_corrected=is_corrected)
    passes = launches.passes_of(system, ranks)
    assert sum(passes.values()) <= most, passes
    if is_corrected:
        assert passes["compensate"] <= 11.2
        assert passes["optimizer"] <= 3.5
