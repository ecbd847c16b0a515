"""Predictions, against figures worked out by hand."""

import json

import pytest

from lightning_sparse.cli.plan.forecast import (
    Candidate,
    best_of,
    ddp_groups,
    levels,
    measure_candidates,
    predict_systems,
    sent_by,
    transfers,
)
from lightning_sparse.cli.plan.profiler import BackwardProfile
from lightning_sparse.cli.plan.rehearsal import SelectionCost, SettingsOf, StageCost
from lightning_sparse.cli.plan.report import as_json, as_table
from lightning_sparse.compressors import Dense
from lightning_sparse.schedule.hiding import Line
from lightning_sparse.schedule.network import Network
from lightning_sparse.strategy.names import systems

MEGA = 1_000_000
# Ready after 1 s and 3 s; 1 s outside backward.
PROFILE = BackwardProfile(("head", "body"), (MEGA, MEGA), (1.0, 2.0), other_seconds=1.0, device="cuda")
# A second for each 2 MB that one of two workers sends or receives.
NETWORK = Network(bandwidth=16e6, latency=0.0, workers=2)
DDP = Candidate("ddp")
# 0.1 ms a group, 5 ns an element.
COST = SelectionCost(StageCost(Line(1e-4, 5e-9), ((2, 1e-10),)), StageCost(Line(0.0, 1e-9)))
LARGE = BackwardProfile(
    tuple(f"layer{number}" for number in range(50)), (MEGA,) * 50, (0.004,) * 50, other_seconds=0.1, device="cpu"
)


def rows(network, *candidates, profile=PROFILE):
    return predict_systems(profile, network, [DDP, *candidates])


def topk(density=0.01, cost=COST, **more):
    return Candidate("sparse_topk", SettingsOf("topk", density, **more), cost)


def test_ddp_overlaps_its_buckets_and_half_the_bytes_take_half_the_time():
    # The first bucket, 4 MB, is over at 1 + 2 s, the second, ready at 3 s, at 5 s; 1 s more outside backward.
    whole, half = rows(NETWORK, Candidate("ddp + bf16 hook", wire_bytes=2))
    assert whole[2:7] == pytest.approx((6.0, 1.0, 2.0, 8 * MEGA, 2))
    # 1 s for each bucket: over at 1 + 1 s, and at 3 + 1 s.
    assert half[2:7] == pytest.approx((5.0, 6 / 5, 1.0, 4 * MEGA, 2))


def test_buckets_are_those_of_ddp():
    # 0.4 MB tensors: the first bucket is closed at 1 MiB, the others at 25 MiB, the last by the end.
    groups = ddp_groups([100_000] * 140, 4)
    assert [len(group) for group in groups] == [3, 66, 66, 5]
    assert [position for group in groups for position in group] == list(range(140))


def test_selection_and_finish_are_counted():
    # Each group costs 1 s of selection for each million elements; the finish 0.5 s for each.
    cost = SelectionCost(StageCost(Line(0.0, 1e-6)), StageCost(Line(0.0, 5e-7)))
    _, row = rows(NETWORK, topk(0.001, cost))
    # Ready at 3 s, selected from at 4 s, 6 bytes for each of 1000 elements and 32 for the last's block counts: 3 ms.
    travel = row.sent_bytes / 2 / 2e6
    assert row.sent_bytes == pytest.approx(2 * (1000 * 6 + 64), abs=100)
    assert row.step_seconds == pytest.approx(1 + 3 + 1 + 1.0 + travel, rel=1e-3)
    # On a CPU selection stops backward, whose cores it takes.
    stopping = rows(NETWORK, topk(0.001, cost), profile=PROFILE._replace(device="cpu"))[1]
    assert stopping.step_seconds == pytest.approx(row.step_seconds + 1.0, rel=1e-3)


def test_a_clip_norm_waits_for_the_whole_gradient(monkeypatch):
    candidate = Candidate("sparse_dense", SettingsOf("dense"))
    before = rows(NETWORK, candidate)[1]
    monkeypatch.setattr(Dense, "feedback", Dense.feedback._replace(clip_norm=1.0))
    # 4 MB out and in (half of 8, twice) after 3 s of backward, at 2 MB/s: nothing is hidden.
    after = rows(NETWORK, candidate)[1]
    assert (after.exposed_seconds, after.messages) == (pytest.approx(4.0), 1)
    assert before.exposed_seconds < after.exposed_seconds


def test_a2sgd_pays_for_its_averages_and_is_never_best():
    table = rows(NETWORK, Candidate("sparse_a2sgd", SettingsOf("a2sgd")))
    # 8 MB every 50 steps take 4 s; the 8 bytes take next to nothing.
    assert table[1].exposed_seconds == pytest.approx(4 / 50, rel=1e-3)
    assert table[1].sent_bytes == 8 + 8 * MEGA / 50
    assert table[1].speedup > 1.4
    assert best_of(table) is None


def test_more_workers_gather_more():
    found = [rows(Network(1e9, 1e-4, n), topk(), profile=LARGE)[1] for n in (2, 4, 16, 128, 1024)]
    times = [row.step_seconds for row in found]
    assert times == sorted(times)
    # To each of the others; among many they go through owners.
    assert found[1].sent_bytes == pytest.approx(3 * found[0].sent_bytes, rel=1e-3)
    assert found[-1].sent_bytes < 7 * found[1].sent_bytes


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_pays_on_a_slow_network_does_not_on_a_fast_one(device):
    profile = LARGE._replace(device=device)
    networks = [Network(bandwidth, 1e-5, 4) for bandwidth in (1e8, 1e9, 1e10, 1e11)]
    tables = [rows(network, topk(0.001), profile=profile) for network in networks]
    speedups = [table[1].speedup for table in tables]
    assert speedups == sorted(speedups, reverse=True)
    assert speedups[0] > 5
    assert speedups[-1] <= 1
    for network, table, best in ((networks[0], tables[0], 1), (networks[-1], tables[-1], None)):
        marked = [line for line in as_table(profile, table).splitlines() if line.startswith("*  ")]
        assert [line.split()[1] for line in marked] == ["sparse_topk"] * (best or 0)
        assert json.loads(json.dumps(as_json(profile, network, table)))["best"] == best


def test_one_tensor_is_enough():
    profile = BackwardProfile(("only",), (1,), (0.1,))
    assert [row.messages for row in rows(NETWORK, topk(cost=SelectionCost()), profile=profile)] == [1, 1]


def test_of_rows_within_noise_the_first_is_marked():
    densities = (("lags", 0.1), ("lags", 0.01), ("exdyna", 0.01))
    systems = [Candidate(f"sparse_{name}", SettingsOf(name, density), COST) for name, density in densities]
    table = rows(Network(1e9, 1e-5, 4), *systems, profile=LARGE)
    for seconds, marked in (
        ((2.0, 1.04, 1.03, 1.0), 1),
        ((2.0, 1.2, 1.03, 1.0), 2),
        ((2.0, 1.2, 1.06, 1.0), 3),
        ((1.04, 1.0, 1.0, 1.0), 0),
    ):
        made_up = [row._replace(step_seconds=each) for row, each in zip(table, seconds)]
        assert best_of(made_up) is (made_up[marked] if marked else None)


@pytest.mark.exhaustive
def test_all_systems_are_measured():
    profile = BackwardProfile(("one", "two"), (70_000, 3), (0.1, 0.1))
    candidates = measure_candidates(profile, densities=(0.5,))
    costs = {candidate.name: candidate.cost for candidate in candidates}
    assert {system.name for system in systems()} - set(costs) == {"sparse_auto"}
    assert costs["sparse_lags"] == costs["sparse_topk"], "what is the same to the bit is measured once"
    assert costs["sparse_dgc"] != costs["sparse_topk"] != costs["sparse_omgs"]
    assert all(row.step_seconds > 0.2 and row.sent_bytes > 0 for row in predict_systems(profile, NETWORK, candidates))


# Four workers on two nodes, a second for each 2 MB of a link, a tenth of it inside a node.
NODES = Network(bandwidth=16e6, latency=0.0, workers=4, node_ranks=2, node_bandwidth=160e6, node_latency=0.0)


def test_a_ring_crosses_a_link_once_and_messages_to_each_share_it():
    assert NODES.seconds("all_gather", 2 * MEGA) == pytest.approx(3.0)
    assert NODES.seconds("all_to_all", 2 * MEGA) == pytest.approx(2 * (4 - 2) / 4)
    assert NODES._replace(workers=2).seconds("all_gather", 2 * MEGA) == pytest.approx(0.1)
    assert NODES.between == Network(8e6, 0.0, 2)


def test_two_levels_send_a_share_between_nodes_and_everything_inside():
    two, one = (SettingsOf(name, 0.01).build() for name in ("topk", "exdyna"))
    assert [levels(each, NODES)[0] for each in (two, one)] == [2, 1]
    assert levels(two, NODES._replace(workers=2))[0] == 1
    candidate = topk(cost=SelectionCost())
    ours, flat = (rows(network, candidate)[1] for network in (NODES, NODES._replace(node_ranks=1)))
    # Of half as much, to one other node in place of three other workers.
    assert ours.sent_bytes == pytest.approx(flat.sent_bytes / 6, rel=0.01)
    assert sent_by(two, [MEGA], NODES) == transfers(two, [MEGA // 2], 2)
    # Shares, of MEGA / 2 elements: two workers send them over one link. Inside, all but the own share of 4 bytes each,
    # when a gradient is ready and when all groups have arrived.
    only = PROFILE._replace(names=("only",), sizes=(MEGA,), backward_seconds=(1.0,))
    exposed = rows(NODES, candidate, profile=only)[1].exposed_seconds
    selected = transfers(two, [MEGA // 2], 2)[0].nbytes
    assert exposed == pytest.approx(selected * 8 / 8e6 + 2 * (4 * MEGA / 2 * 8 / 160e6))


def test_more_on_a_node_pays_more():
    steps = [
        rows(Network(1e9, 1e-4, 64, node_ranks), topk(), profile=LARGE)[1].step_seconds for node_ranks in (1, 2, 8)
    ]
    assert steps == sorted(steps, reverse=True)


def test_nodes_have_to_be_filled():
    with pytest.raises(ValueError, match="node_ranks=3"):
        rows(NODES._replace(node_ranks=3))


def test_rounds_take_what_their_exchange_takes_once_in_a_round():
    one_by_one, rounds = rows(NETWORK, topk(), topk(local_steps=10), profile=LARGE)[1:]
    alone = LARGE.other_seconds + sum(LARGE.backward_seconds)
    assert rounds.sent_bytes == pytest.approx(one_by_one.sent_bytes / 10, rel=1e-3)
    assert rounds.step_seconds == pytest.approx(alone + rounds.exposed_seconds)
    fitting = topk(local_steps=max(2, rounds.fitting_steps))
    assert rows(NETWORK, fitting, profile=LARGE)[1].exposed_seconds <= 0.05 * alone
    assert best_of([one_by_one._replace(speedup=1.0), rounds._replace(speedup=9.0)]) is None
