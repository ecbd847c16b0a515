import math

import pytest
import torch

from lightning_sparse.compressors.selection import FlatSelection, SelectionSize, overwrite, scatter
from lightning_sparse.compressors.topk import largest_of_each
from lightning_sparse.engine.settings import Settings
from lightning_sparse.engine.wire import build_wires
from lightning_sparse.engine.wire.owners import OwnersFormat
from tests.helpers.examples import load
from tests.helpers.lockstep import run_phases

KEEP = 4.0
WIRES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def exchanged(tensors, counts, dtype=torch.float32, filled=None):
    ranks = len(tensors)
    phases = []
    for rank, each in enumerate(tensors):
        selection = largest_of_each(each, counts)
        selection = FlatSelection(selection.values, selection.indices, selection.numels, selection.counts, filled)
        phases.append(OwnersFormat(dtype, rank, ranks).exchange(selection, each, None))
    arrivals, handed_in = run_phases(phases)
    return arrivals, [payloads[0].tensor.nbytes for payloads in handed_in]


def gradients(ranks, numels):
    generator = torch.Generator().manual_seed(1)
    common = [torch.randn(numel, generator=generator) for numel in numels]
    sizes = [(3 * torch.randn(numel, generator=generator)).exp() for numel in numels]
    return [
        [size * (each + torch.randn(len(each), generator=generator)) for each, size in zip(common, sizes)]
        for _ in range(ranks)
    ]


def written(arrival, tensors):
    means, kept = ([tensor.clone() for tensor in tensors] for _ in range(2))
    scatter(means, arrival.means)
    overwrite(kept, arrival.kept)
    return means, kept


def owners_of(numel, ranks):
    owners = []
    for index in range(numel):
        block = index // ranks
        owners.append((index + (block * 0x9E3779B1 >> 16)) % ranks)
    return owners


def chosen_of(tensors, count):
    ranks, numel = len(tensors), tensors[0].numel()
    owners = owners_of(numel, ranks)
    room = math.ceil(count / ranks + 4 * math.sqrt(count / ranks))
    sums = torch.zeros(numel)
    for tensor in tensors:
        largest = sorted(range(numel), key=lambda index: -abs(float(tensor[index])))[:count]
        for rank in range(ranks):
            for index in [index for index in largest if owners[index] == rank][:room]:
                sums[index] += tensor[index].bfloat16().float() / ranks
    chosen = set()
    for rank in range(ranks):
        share = [index for index in range(numel) if owners[index] == rank]
        share.sort(key=lambda index: -abs(float(sums[index])))
        chosen |= set(share[: min(numel // ranks, math.ceil(min(KEEP, ranks) * count / ranks))])
    return {index for index in chosen if sums[index]}  # any element without a proposal may fill the room


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("ranks", [2, 5, 7])
def test_all_ranks_send_where_a_loop_chooses(ranks, wire):
    counts = (200, 170)
    tensors = gradients(ranks, (2003, 1500))
    arrivals, _ = exchanged(tensors, counts, WIRES[wire])
    results = [written(arrival, each) for arrival, each in zip(arrivals, tensors)]
    for place, count in enumerate(counts):
        chosen = sorted(chosen_of([each[place] for each in tensors], count))
        owed = sum(each[place].double() for each in tensors) / ranks
        stays = sum(kept[place].double() for _, kept in results) / ranks
        bound = 2e-6 * sum(each[place].abs() for each in tensors)
        for (means, kept), each in zip(results, tensors):
            was_sent = means[place] != 0
            assert was_sent[chosen].all()
            assert was_sent.sum() <= ranks * math.ceil(KEEP * count / ranks)
            assert torch.equal(kept[place][~was_sent], each[place][~was_sent])
            assert wire != "float32" or not kept[place][was_sent].any()
            assert ((means[place] + stays - owed).abs() <= bound).all()


def test_of_what_does_not_fit_the_smallest_are_not_proposed():
    ranks, numel, count = 4, 8000, 400
    mine = (torch.tensor(owners_of(numel, ranks)) == 2).nonzero().flatten()[:count]
    tensor = torch.zeros(numel)
    tensor[mine] = torch.arange(1.0, count + 1)
    arrivals, _ = exchanged([[tensor.clone()] for _ in range(ranks)], (count,))
    room = math.ceil(count / ranks + 4 * math.sqrt(count / ranks))
    _, [kept] = written(arrivals[0], [tensor])
    assert not kept[mine[-room:]].any()
    # The owner has room for more elements than were proposed, and may fill the room with any element.
    assert kept[mine[:-room]].count_nonzero() >= count - 2 * room


def test_elements_are_shared_evenly_also_in_columns_and_rows():
    ranks = 16
    owners = torch.tensor(owners_of(512 * 512, ranks)).view(512, 512)
    for share in (owners[:, 7], owners[3], owners[::2, ::2].flatten(), owners[:, :8].flatten()):
        counts = torch.bincount(share, minlength=ranks)
        assert counts.max() <= len(share) / ranks + 4 * math.sqrt(len(share) / ranks)


def received(wires, sizes, ranks):
    shares = {"all_gather": ranks - 1, "all_to_all": (ranks - 1) / ranks}
    return sum(shares[name] * nbytes for name, nbytes in load("echo").transfers_of(wires, sizes))


def test_bytes_do_not_grow_with_ranks():
    numels = (2_000_000, 512, 500_000, 1000)
    sizes = [SelectionSize(numel, max(1, numel // 100)) for numel in numels]
    at = {
        (name, ranks): received(build_wires("gather", "reduce", torch.float32, 0, ranks, name), sizes, ranks)
        for name in ("gather", "owners", "auto")
        for ranks in (2, 4, 16, 64, 1024)
    }
    assert at["owners", 16] < 0.5 * at["gather", 16]
    assert at["owners", 64] < 1.1 * at["owners", 16]
    assert at["auto", 64] < 0.12 * at["gather", 64]
    assert at["auto", 1024] < 1.5 * at["auto", 16]
    for ranks in (2, 4):
        assert at["auto", ranks] == at["gather", ranks]


def test_a_way_depends_on_the_tensor_and_the_ranks_alone():
    def way(exchange, ranks, numel, count):
        wires = build_wires("gather", "reduce", torch.float32, 0, ranks, exchange)
        return type(wires.format_for(numel, count)).__name__

    assert way("auto", 8, 1_000_000, 10_000) == "GatherFormat"
    assert way("auto", 16, 1_000_000, 10_000) == "OwnersFormat"
    assert way("auto", 16, 1000, 10) == "GatherFormat"
    assert way("auto", 512, 1000, 30) == "ReduceFormat"
    assert way("owners", 2, 10_000, 100) == "OwnersFormat"
    assert way("owners", 2, 3000, 30) == "GatherFormat"
    assert way("owners", 512, 300, 3) == "GatherFormat"
    assert way("gather", 512, 1_000_000, 10_000) == "GatherFormat"


def test_an_unknown_exchange_or_format_is_refused():
    with pytest.raises(ValueError, match=r"exchange='owner'.*owners"):
        Settings.of("topk", exchange="owner")
    with pytest.raises(ValueError, match=r"wire_format='all_gather'.*gather"):
        build_wires("all_gather", None, torch.float32, 0, 2)
