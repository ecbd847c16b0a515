import torch

from lightning_sparse.compressors.selection import FlatSelection, Selection, end_to_end, grouped, scatter, whole
from lightning_sparse.functional.elements import runs


def test_what_lies_between_the_tensors_is_left_alone():
    bucket = torch.full((10,), 7.0)
    one, _, other = bucket.split([4, 2, 4])
    scatter([one, other], FlatSelection.of([one, other], [torch.tensor([1]), torch.tensor([0])]))
    assert bucket.tolist() == [0, 7, 0, 0, 7, 7, 7, 0, 0, 0]


def test_memory_that_only_happens_to_lie_behind_is_no_run():
    memory = torch.arange(8.0)
    one, other = (torch.frombuffer(memory.numpy(), dtype=torch.float32, count=4, offset=offset) for offset in (0, 16))
    assert other.data_ptr() == one.data_ptr() + one.nbytes
    assert [(first, stop) for first, stop, _ in runs([one, other])] == [(0, 1), (1, 2)]


def test_selections_of_single_tensors_laid_end_to_end_are_theirs():
    numels, counts = (7, 1, 300, 5000), (2, 1, 30, 700)
    singles = [
        Selection(torch.randn(2, count), torch.stack([torch.randperm(numel)[:count] for _ in range(2)]), numel)
        for numel, count in zip(numels, counts)
    ]
    laid = grouped(singles)
    assert (laid.numels, laid.counts) == (numels, counts)
    for one, single in zip(laid, singles):
        assert torch.equal(one.values, single.values)
        assert torch.equal(one.indices, single.indices)


def test_what_is_filled_stays_with_its_elements():
    filled = torch.tensor([True, False])
    one = Selection(torch.tensor([1.0, 2.0]), torch.tensor([0, 3]), 5, filled)
    laid = grouped([Selection(torch.tensor([3.0]), torch.tensor([1]), 2), one])
    assert laid.filled.tolist() == [True, True, False]
    assert [each.filled.tolist() for each in laid if each.filled is not None] == [[True], [True, False]]


def test_every_element_of_a_tensor_lies_where_all_of_its_indices_would():
    laid = end_to_end(whole([torch.tensor([1.0, 2.0]), torch.tensor([3.0])]))
    assert (laid.indices.tolist(), laid.values.tolist()) == ([0, 1, 2], [1.0, 2.0, 3.0])
