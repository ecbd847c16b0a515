"""Facts of a step: the union of what many ranks sent, and how little is held of it once the step has ended."""

import pytest
import torch

from lightning_sparse.compressors.group_selection import FlatSelection
from lightning_sparse.engine.observe.facts import StepFacts

NUMEL, COUNT = 4000, 40


def arrived(ranks: int) -> FlatSelection:
    """Return what so many ranks have sent of two tensors; each has sent one zero."""
    generator = torch.Generator().manual_seed(ranks)
    rows = [torch.randperm(NUMEL, generator=generator)[:COUNT].sort().values for _ in range(ranks)]
    values = torch.ones(ranks, COUNT)
    values[:, 3] = 0
    return FlatSelection(values, torch.stack(rows), (NUMEL,), (COUNT,))


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_the_union_is_known_after_the_step_has_ended(ranks: int) -> None:
    facts = StepFacts(ranks)
    means = arrived(ranks)
    facts.add_selection(means)
    facts.add_means(means)
    sent = {int(place) for row in means.indices for number, place in enumerate(row) if number != 3}
    assert facts.union() == len(sent)
    facts.close()
    assert facts.union() == len(sent)


def reachable_bytes(thing: object) -> int:
    """Return the bytes of all tensors that an object holds."""
    if isinstance(thing, torch.Tensor):
        return thing.nbytes
    parts = thing if isinstance(thing, list) else vars(thing).values() if hasattr(thing, "__dict__") else ()
    return sum(map(reachable_bytes, parts))


def test_what_is_held_of_a_step_does_not_grow_with_ranks() -> None:
    held = []
    for ranks in (64, 1024):
        facts = StepFacts(ranks)
        facts.add_means(arrived(ranks))
        facts.close()
        held.append(reachable_bytes(facts))
    assert held[0] == held[1] <= NUMEL
