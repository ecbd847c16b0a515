"""The two roads of a group: what goes which way, that nothing empty travels, and that all comes back in order."""

from typing import Any, Optional

import pytest
import torch
from torch import Tensor

from lightning_sparse.compressors.selection import Selection
from lightning_sparse.engine.wire import Arrival, Payload, build_wire

NUMELS = (7, 300, 1, 40)


def selections_of(tensors: list[Tensor], whole: tuple[int, ...]) -> list[Selection]:
    """Select all of some tensors, and the first element of the others."""
    first = torch.zeros(1, dtype=torch.int64)
    return [
        Selection(tensor, None, tensor.numel())
        if position in whole
        else Selection(tensor[:1], first.clone(), tensor.numel())
        for position, tensor in enumerate(tensors)
    ]


def exchange(whole: tuple[int, ...], poisoned: Optional[int] = None) -> tuple[Arrival, list[list[Tensor]], list[str]]:
    """Exchange between three ranks that used all tensors but the second; return arrival, tensors and collectives."""
    ranks = 3
    tensors = [
        list(torch.randn(sum(NUMELS), generator=torch.Generator().manual_seed(rank)).split(NUMELS))
        for rank in range(ranks)
    ]
    if poisoned is not None:
        tensors[1][poisoned][0] = float("nan")
    used = torch.tensor([1, 0, 1, 1], dtype=torch.uint8)
    phases: list[Any] = [
        build_wire("gather", "reduce", torch.float32, rank, ranks).exchange(
            selections_of(tensors[rank], whole), tensors[rank], used
        )
        for rank in range(ranks)
    ]
    received: list[Any] = [None] * ranks
    collectives = []
    while True:
        try:
            payloads: list[Payload] = [phase.send(part) for phase, part in zip(phases, received)]
        except StopIteration as stop:
            return stop.value, tensors, collectives
        collectives.append(payloads[0].collective)
        rows = torch.stack([payload.tensor for payload in payloads])
        gathers = payloads[0].collective == "all_gather"
        received = [rows if gathers else rows[:, rank] for rank in range(ranks)]


@pytest.mark.parametrize(
    ("whole", "collectives"),
    [
        ((), ["all_gather"]),
        ((0, 1, 2, 3), ["all_to_all", "all_gather", "all_gather"]),
        ((1, 2), ["all_gather", "all_to_all", "all_gather"]),
        ((0, 3), ["all_gather", "all_to_all", "all_gather"]),
    ],
    ids=str,
)
def test_every_tensor_goes_its_way_and_comes_back_in_its_place(whole: tuple[int, ...], collectives: list[str]) -> None:
    arrival, tensors, asked_for = exchange(whole)
    assert asked_for == collectives
    assert bool(arrival.finite)
    assert arrival.used is not None
    assert arrival.used.tolist() == [True, False, True, True]
    for position, (mean, kept) in enumerate(zip(arrival.means, arrival.kept)):
        assert mean.numel == kept.numel == NUMELS[position]
        expected = sum(ours[position] for ours in tensors) / 3
        if position in whole:
            assert mean.indices is None
            torch.testing.assert_close(mean.values.flatten()[: mean.numel], expected)
        else:
            assert mean.indices is not None
            torch.testing.assert_close(mean.values.sum(), expected[0])


@pytest.mark.parametrize("poisoned", [0, 1])
def test_what_is_not_finite_is_seen_on_either_road(poisoned: int) -> None:
    arrival, _, _ = exchange((1, 2), poisoned)
    assert not bool(arrival.finite)


def test_both_roads_are_tried_before_training() -> None:
    assert build_wire("gather", "reduce", torch.float32, 0, 2).collectives == ("all_gather", "all_to_all")
    assert build_wire("gather", None, torch.float32, 0, 2).collectives == ("all_gather",)
