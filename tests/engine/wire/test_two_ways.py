"""The two ways of a group: what goes which way, that nothing empty travels, and that all comes back."""

import pytest
import torch

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.selection import Selection
from lightning_sparse.engine.step.selecting import GroupSelector
from lightning_sparse.engine.wire import build_wires
from tests.helpers.lockstep import run_phases

NUMELS = (7, 300, 1, 40)


def selections_of(tensors, whole):
    """Select all of some tensors, and the first element of the others."""
    first = torch.zeros(1, dtype=torch.int64)
    return [
        Selection(tensor, None, tensor.numel())
        if position in whole
        else Selection(tensor[:1], first.clone(), tensor.numel())
        for position, tensor in enumerate(tensors)
    ]


class Answers(Compressor):
    """Select all of some tensors, without indices, and the first element of the others."""

    default_density = 0.5
    wire_format = "gather"
    dense_wire_format = "reduce"

    def __init__(self, whole):
        self._whole = whole

    def select(self, names, accumulated, counts):
        return selections_of(accumulated, self._whole)


def exchange(whole, poisoned=None):
    """Exchange between three ranks that used all tensors but the second; return what arrived, tensors, collectives."""
    ranks = 3
    tensors = [
        list(torch.randn(sum(NUMELS), generator=torch.Generator().manual_seed(rank)).split(NUMELS))
        for rank in range(ranks)
    ]
    if poisoned is not None:
        tensors[1][poisoned][0] = float("nan")
    used = torch.tensor([1, 0, 1, 1], dtype=torch.uint8)
    wires = [build_wires("gather", "reduce", torch.float32, rank, ranks) for rank in range(ranks)]
    names, densities, unknown = list("abcd"), [0.1] * 4, [None] * 4
    parts = [
        GroupSelector(Answers(whole), own).select(names, each, densities, unknown) for own, each in zip(wires, tensors)
    ]
    collectives = []
    arrivals = []
    for ours in zip(*parts):
        phases = [part.wire.exchange(part.selection, part.tensors, used[part.positions]) for part in ours]
        arrived, handed_in = run_phases(phases)
        collectives += [payloads[0].collective for payloads in handed_in]
        arrivals.append((ours[0], arrived[0]))
    return arrivals, tensors, collectives


@pytest.mark.parametrize(
    ("whole", "collectives"),
    [
        ((), ["all_gather"]),
        ((0, 1, 2, 3), ["all_to_all", "all_gather", "all_gather"]),
        ((1, 2), ["all_gather", "all_to_all", "all_gather", "all_gather"]),
        ((0, 3), ["all_gather", "all_to_all", "all_gather", "all_gather"]),
    ],
    ids=str,
)
def test_every_tensor_goes_its_way_and_comes_back_in_its_place(whole, collectives):
    arrivals, tensors, asked_for = exchange(whole)
    assert asked_for == collectives
    places = [position for part, _ in arrivals for position in part.positions]
    assert sorted(places) == [0, 1, 2, 3]
    for part, arrival in arrivals:
        assert bool(arrival.finite)
        assert arrival.used.tolist() == [position != 1 for position in part.positions]
        for position, mean, kept in zip(part.positions, arrival.means, arrival.kept):
            assert mean.numel == kept.numel == NUMELS[position]
            expected = sum(ours[position] for ours in tensors) / 3
            if position in whole:
                assert mean.indices is None
                torch.testing.assert_close(mean.values.flatten()[: mean.numel], expected)
            else:
                torch.testing.assert_close(mean.values.sum(), expected[0])


@pytest.mark.parametrize("poisoned", [0, 1])
def test_what_is_not_finite_is_seen_on_either_way(poisoned):
    arrivals, _, _ = exchange((1, 2), poisoned)
    assert [bool(arrival.finite) for part, arrival in arrivals] == [
        poisoned not in part.positions for part, _ in arrivals
    ]


def test_both_ways_are_tried_before_training():
    assert build_wires("gather", "reduce", torch.float32, 0, 2).collectives == ("all_gather", "all_to_all")
    assert build_wires("gather", None, torch.float32, 0, 2).collectives == ("all_gather",)
