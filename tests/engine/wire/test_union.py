"""The union wire, rank by rank in one process: what travels, what arrives, what stays."""

import pytest
import torch

from lightning_sparse.compressors.selection import Selection, grouped
from lightning_sparse.engine.wire.union import UnionFormat
from tests.helpers.devices import DEVICE, devices, moved
from tests.helpers.lockstep import run_phases

NUMELS = (5, 70_000, 3)


def exchange(chosen, dtype=torch.float32, used=None, device=DEVICE, formats=None):
    """Exchange choices by rank and tensor; return arrivals, what was accumulated, and what every rank handed in."""
    ranks = len(chosen)
    accumulated = [
        list(torch.randn(sum(NUMELS), generator=torch.Generator().manual_seed(rank)).to(device).split(NUMELS))
        for rank in range(ranks)
    ]
    phases = []
    for rank, choices in enumerate(chosen):
        indices = [torch.tensor(choice, dtype=torch.int64, device=device) for choice in choices]
        selections = [Selection(t[i], i, t.numel()) for t, i in zip(accumulated[rank], indices)]
        flags = None if used is None else torch.tensor(used[rank], dtype=torch.uint8, device=device)
        format_ = UnionFormat(dtype, rank, ranks) if formats is None else formats[rank]
        phases.append(format_.exchange(grouped(selections), accumulated[rank], flags))
    arrivals, handed_in = run_phases(phases)
    for format_ in formats or ():
        format_.release()
    sent = [[payload.tensor for payload in payloads] for payloads in handed_in]
    return moved(arrivals, "cpu"), moved(accumulated, "cpu"), sent


CHOICES = {
    "disjoint": [[[0, 4], [7, 69_999], []], [[], [8, 9, 10], [2]], [[1], [], []]],
    "overlapping": [[[0, 4], [7, 8], []], [[0, 4], [7, 9], [2]], [[4], [], []]],
    "one rank alone": [[[], [], []], [[3], [100], [0]], [[], [], []]],
    "everything": [[list(range(5)), list(range(70_000)), []], [[], [], [0, 1, 2]], [[], [], []]],
}


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("chosen", CHOICES.values(), ids=CHOICES)
def test_everybody_contributes_where_anybody_selected(chosen, dtype, device):
    arrivals, accumulated, _ = exchange(chosen, dtype, device=device)
    for place, numel in enumerate(NUMELS):
        union = torch.tensor(sorted({index for choices in chosen for index in choices[place]}), dtype=torch.int64)
        owed = torch.stack([tensors[place][union] for tensors in accumulated]).double().mean(dim=0)
        kept = torch.stack([arrival.kept[place].values for arrival in arrivals]).double().mean(dim=0)
        for arrival in arrivals:
            mean = arrival.means[place]
            assert arrival.finite
            assert mean.numel == numel
            assert torch.equal(mean.indices, union[None])
            assert torch.equal(arrival.kept[place].indices, union)
            assert torch.equal(mean.values, arrivals[0].means[place].values)
            torch.testing.assert_close(mean.values[0].double() + kept, owed, rtol=1e-6, atol=1e-7)
            assert dtype != torch.float32 or not arrival.kept[place].values.any()


def messages(chosen, steps, dtype=torch.float32):
    """Return by step the bytes of rank 0's messages; every step selects the same."""
    ranks = len(chosen)
    formats = [UnionFormat(dtype, rank, ranks) for rank in range(ranks)]
    return [[payloads[0].nbytes for payloads in exchange(chosen, dtype, formats=formats)[2]] for _ in range(steps)]


def test_bytes_are_a_count_narrow_positions_and_the_values_of_the_union():
    first, second = messages(CHOICES["disjoint"], 2)
    positions = 4 * 2 + 2 * 4  # at most four of a rank, in two blocks of 65 536 elements
    values = 3 * 16  # nine elements of three tensors laid end to end, three for each rank, up to 16 bytes
    assert first == [16, positions, values]
    assert second == [32, values]  # the count and as much room, up to 16 bytes


def test_many_values_go_to_their_owners():
    *_, parts, means = messages(CHOICES["everything"], 1)[0]
    assert parts == 3 * means


def test_nothing_selected_is_one_small_message():
    arrivals, _, sent = exchange([[[], [], []]] * 2, used=[[1, 0, 0], [0, 0, 1]])
    assert [payloads[0].numel() for payloads in sent] == [16]  # a count, and whether each parameter was used
    for arrival in arrivals:
        assert arrival.finite
        assert arrival.used.tolist() == [True, False, True]
        assert [mean.values.shape for mean in arrival.means] == [(1, 0)] * 3
        assert [left.values.shape for left in arrival.kept] == [(0,)] * 3
