import torch

from lightning_sparse.compressors.selection import Selection, grouped
from lightning_sparse.engine.wire.reduce import UnionFormat
from tests.helpers.devices import DEVICE, moved
from tests.helpers.lockstep import run_phases

NUMELS = (5, 70_000, 3)


def exchange(chosen, formats, used=None):
    phases = []
    for rank, (choices, format_) in enumerate(zip(chosen, formats)):
        accumulated = [torch.randn(numel, device=DEVICE) for numel in NUMELS]
        indices = [torch.tensor(choice, dtype=torch.int64, device=DEVICE) for choice in choices]
        selections = [Selection(t[i], i, t.numel()) for t, i in zip(accumulated, indices)]
        flags = None if used is None else torch.tensor(used[rank], dtype=torch.uint8, device=DEVICE)
        phases.append(format_.exchange(grouped(selections), accumulated, flags))
    arrivals, handed_in = run_phases(phases)
    return moved(arrivals, "cpu"), [[payload.tensor for payload in payloads] for payloads in handed_in]


DISJOINT = [[[0, 4], [7, 69_999], []], [[], [8, 9, 10], [2]], [[1], [], []]]


def formats_of(ranks):
    return [UnionFormat(torch.float32, rank, ranks) for rank in range(ranks)]


def messages(chosen):
    return [payloads[0].nbytes for payloads in exchange(chosen, formats_of(len(chosen)))[1]]


def test_bytes_are_a_count_narrow_positions_and_the_values_of_the_union():
    positions = 4 * 2 + 2 * 4  # at most four per rank, in two blocks of 65 536 elements
    values = 16  # nine elements of three tensors, three per rank, padded to 16 bytes
    assert messages(DISJOINT) == [16, positions, 3 * values, values]
    assert messages([[[], [], []]] * 3) == [16]
