import torch

from lightning_sparse.compressors.selection import Selection, end_to_end, grouped, whole
from lightning_sparse.functional.elements import runs


def test_memory_that_only_happens_to_lie_behind_is_no_run():
    memory = torch.arange(8.0)
    one, other = (torch.frombuffer(memory.numpy(), dtype=torch.float32, count=4, offset=offset) for offset in (0, 16))
    assert other.data_ptr() == one.data_ptr() + one.nbytes
    assert [(first, stop) for first, stop, _ in runs([one, other])] == [(0, 1), (1, 2)]


def test_what_is_filled_stays_with_its_elements():
    filled = torch.tensor([True, False])
    one = Selection(torch.tensor([1.0, 2.0]), torch.tensor([0, 3]), 5, filled)
    laid = grouped([Selection(torch.tensor([3.0]), torch.tensor([1]), 2), one])
    assert laid.filled.tolist() == [True, True, False]
    assert [each.filled.tolist() for each in laid if each.filled is not None] == [[True], [True, False]]


def test_every_element_of_a_tensor_lies_where_all_of_its_indices_would():
    laid = end_to_end(whole([torch.tensor([1.0, 2.0]), torch.tensor([3.0])]))
    assert (laid.indices.tolist(), laid.values.tolist()) == ([0, 1, 2], [1.0, 2.0, 3.0])
