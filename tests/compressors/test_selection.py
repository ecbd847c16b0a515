"""Selections laid end to end do what they do one by one, wherever their tensors lie."""

import random

import pytest
import torch

from lightning_sparse.compressors.selection import FlatSelection, Selection, WholeSelection, grouped, parted, runs
from tests.helpers.devices import devices


def beside_each_other(numels, device):
    """Return pieces of one tensor: what DDP hands over of one bucket."""
    return list(torch.randn(sum(numels), device=device).split(numels))


def by_themselves(numels, device):
    """Return tensors with memory of their own: what is left when a narrow type has been widened."""
    return [torch.randn(numel, device=device) for numel in numels]


def in_two_buckets(numels, device):
    """Return pieces of two tensors, of one with a gap: what a schedule makes of a group."""
    first, second = (torch.randn(2 * sum(numels), device=device).split(2 * numels) for _ in range(2))
    return [(second if place % 5 > 2 else first)[place] for place in range(len(numels))]


PLACES = [beside_each_other, by_themselves, in_two_buckets]
NUMELS = [7, 1, 300, 1, 2, 64, 5000, 3]
COUNTS = [2, 1, 30, 1, 2, 1, 700, 3]


def some_of(numel, count, seed, device):
    return torch.tensor(sorted(random.Random(seed).sample(range(numel), count)), device=device)


def selected_by_ranks(ranks, device):
    """Return what several ranks sent of tensors of ``NUMELS`` elements, at different places that meet now and then."""
    tensors = [by_themselves(NUMELS, device) for _ in range(ranks)]
    indices = [[some_of(*size, seed, device) for size in zip(NUMELS, COUNTS)] for seed in range(ranks)]
    each = [FlatSelection.of(*rank) for rank in zip(tensors, indices)]
    values, places = (torch.stack(rows) for rows in zip(*((one.values, one.indices) for one in each)))
    return each[0].replaced(values, places)


@devices
@pytest.mark.parametrize("place", PLACES)
def test_every_tensor_gives_its_own_elements(place, device):
    tensors = place(NUMELS, device)
    indices = [some_of(numel, count, numel, device) for numel, count in zip(NUMELS, COUNTS)]
    selections = FlatSelection.of(tensors, indices)
    assert len(selections) == len(tensors)
    for selection, tensor, wanted in zip(selections, tensors, indices):
        assert selection.numel == tensor.numel()
        assert torch.equal(selection.indices, wanted)
        assert torch.equal(selection.values, tensor[wanted])


@devices
@pytest.mark.parametrize("place", PLACES)
def test_overwrites_what_each_would_overwrite(place, device):
    tensors = place(NUMELS, device)
    selections = FlatSelection.of(
        by_themselves(NUMELS, device), [some_of(*size, 3, device) for size in zip(NUMELS, COUNTS)]
    )
    expected = [tensor.clone() for tensor in tensors]
    for tensor, selection in zip(expected, selections):
        tensor[selection.indices] = selection.values
    selections.overwrite(tensors)
    assert all(map(torch.equal, tensors, expected))


@devices
@pytest.mark.parametrize("place", PLACES)
def test_scatters_what_each_would_scatter_rank_by_rank(place, device):
    tensors = place(NUMELS, device)
    means = selected_by_ranks(3, device)
    expected = [torch.zeros_like(tensor) for tensor in tensors]
    for tensor, mean in zip(expected, means):
        for values, indices in zip(mean.values, mean.indices):
            tensor[indices] += values
    means.scatter(tensors)
    assert all(map(torch.equal, tensors, expected))


def test_what_lies_between_the_tensors_is_left_alone():
    bucket = torch.full((10,), 7.0)
    one, _, other = bucket.split([4, 2, 4])
    FlatSelection.of([one, other], [torch.tensor([1]), torch.tensor([0])]).scatter([one, other])
    assert bucket.tolist() == [0, 7, 0, 0, 7, 7, 7, 0, 0, 0]


def test_memory_that_only_happens_to_lie_behind_is_no_run():
    memory = torch.arange(8.0)
    one, other = (torch.frombuffer(memory.numpy(), dtype=torch.float32, count=4, offset=offset) for offset in (0, 16))
    assert other.data_ptr() == one.data_ptr() + one.nbytes
    assert [(first, stop) for first, stop, _ in runs([one, other])] == [(0, 1), (1, 2)]


def test_selections_of_single_tensors_laid_end_to_end_are_theirs():
    means = selected_by_ranks(2, "cpu")
    laid = grouped(list(means)).flat()
    assert torch.equal(laid.indices, means.indices)
    assert torch.equal(laid.values, means.values)
    assert (laid.numels, laid.counts) == (means.numels, means.counts)


def test_what_is_filled_stays_with_its_elements():
    filled = torch.tensor([True, False])
    one = Selection(torch.tensor([1.0, 2.0]), torch.tensor([0, 3]), 5, filled)
    laid = grouped([Selection(torch.tensor([3.0]), torch.tensor([1]), 2), one]).flat()
    assert laid.filled.tolist() == [True, True, False]
    assert [each.filled.tolist() for each in laid if each.filled is not None] == [[True], [True, False]]


def test_every_element_of_a_tensor_lies_where_all_of_its_indices_would():
    whole = WholeSelection.of([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    assert (whole.flat().indices.tolist(), whole.flat().values.tolist()) == ([0, 1, 2], [1.0, 2.0, 3.0])


def test_selections_without_indices_are_a_part_by_themselves():
    some = Selection(torch.ones(1), torch.zeros(1, dtype=torch.int64), 4)
    whole = Selection(torch.zeros(2), None, 2)
    parts = parted([whole, some, whole], lambda numel, count: "way")
    assert [(places, part.is_whole, part.numel) for _, places, part in parts] == [([1], False, 4), ([0, 2], True, 4)]
    flat = FlatSelection.of([torch.zeros(3)], [torch.tensor([1])])
    [(_, places, part)] = parted(flat, lambda numel, count: "way")
    assert (places, part) == ([0], flat)


def test_what_goes_another_way_is_a_part_by_itself():
    tensors = [torch.randn(numel) for numel in (5, 50, 7)]
    flat = FlatSelection.of(tensors, [torch.tensor([1]), torch.tensor([3, 40]), torch.tensor([0])])
    few, many = parted(flat, lambda numel, count: "many" if count == 2 and numel == 50 else "few")
    assert [(way, places, part.numels) for way, places, part in (few, many)] == [
        ("few", [0, 2], (5, 7)),
        ("many", [1], (50,)),
    ]
    assert torch.equal(many[2][0].values, tensors[1][[3, 40]])
