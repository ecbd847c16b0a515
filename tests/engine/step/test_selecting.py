import pytest
import torch

from lightning_sparse import Selection
from lightning_sparse.compressors import Compressor, TopK
from lightning_sparse.compressors.selection import FlatSelection
from lightning_sparse.engine.step.selecting import BucketSelector
from lightning_sparse.engine.step.topology import LocalGradient
from lightning_sparse.engine.wire import build_wires


class WholeMatrices(Compressor):
    default_density = 0.5
    wire_format = "gather"
    dense_wire_format = "reduce"

    def select(self, names, accumulated, counts):
        some = torch.zeros(1, dtype=torch.int64)
        return [
            Selection(each, None, each.numel()) if name == "matrix" else Selection(each[:1], some, each.numel())
            for name, each in zip(names, accumulated)
        ]


def select(compressor, numels, exchange="gather", ranks=2):
    wires = build_wires("gather", "reduce", torch.float32, 0, ranks, exchange)
    tensors = [torch.randn(numel) for numel in numels.values()]
    bucket = [LocalGradient(name, tensor, None) for name, tensor in zip(numels, tensors)]
    parts = BucketSelector(compressor, wires).select(bucket, tensors, [0.01] * len(numels))
    return wires, parts


def test_selections_without_indices_are_a_part_by_themselves_and_come_last():
    wires, parts = select(WholeMatrices(), {"matrix": 2, "bias": 4})
    assert [(part.wire, part.names) for part in parts] == [(wires.sparse, ["bias"]), (wires.dense, ["matrix"])]
    assert [[each.indices is None for each in part.selection] for part in parts] == [[False], [True]]


def test_what_goes_another_way_is_a_part_by_itself():
    wires, parts = select(TopK(), {"bias": 300, "matrix": 100_000, "other": 400}, "owners", ranks=16)
    expected = [(wires.sparse, ["bias", "other"]), (wires.owners, ["matrix"])]
    assert [(part.wire, part.names) for part in parts] == expected
    few, [matrix] = (part.selection for part in parts)
    assert (few.numels, few.counts) == ((300, 400), (3, 4))
    assert torch.equal(matrix.values, parts[1].tensors[0][matrix.indices])


def test_what_goes_one_way_is_the_object_that_the_compressor_has_returned():
    _, [part] = select(TopK(), {"bias": 300, "matrix": 1000})
    assert isinstance(part.selection, FlatSelection)


class ForgetsTheLast(WholeMatrices):
    def select(self, names, accumulated, counts):
        return super().select(names, accumulated, counts)[:-1]


def test_a_selection_is_wanted_of_each_parameter():
    with pytest.raises(ValueError, match=r"ForgetsTheLast\.select returned 1 selections for 2"):
        select(ForgetsTheLast(), {"matrix": 2, "bias": 4})
