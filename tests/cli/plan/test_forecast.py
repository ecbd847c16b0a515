"""Steps by formula, against figures worked out by hand."""

import pytest

from lightning_sparse.cli.plan.forecast import BACKWARD, Candidate, candidates, forecast, levels, transfers
from lightning_sparse.compressors import Dense
from lightning_sparse.engine.settings import LocalSteps, Settings
from lightning_sparse.schedule.network import Network
from lightning_sparse.strategy.names import systems

MEGA = 1_000_000
# A second for each 2 MB that one of two workers sends or receives.
NETWORK = Network(bandwidth=16e6, latency=0.0, workers=2)
DDP = Candidate("ddp")
SECOND = 1.0  # of compute


def settings(compressor, density=None, **more):
    return Settings.of(compressor, density, warmup_epochs=0, optimizer_correction=None, **more)


def topk(density=0.01, **more):
    return Candidate("sparse_topk", density, settings("topk", density, **more))


def rows(network, *ways, elements=50 * MEGA, compute=SECOND):
    return forecast(elements, compute, network, [DDP, *ways])


def test_ddp_overlaps_its_buckets_and_half_the_bytes_take_half_the_time():
    # 40 MB are two buckets, of which backward, 6 s, has the first ready after 3 s: over at 3 + 10 and at 13 + 10 s.
    whole, half = rows(NETWORK, Candidate("ddp + bf16 hook", value_bytes=2), elements=10 * MEGA, compute=6 / BACKWARD)
    assert whole[2:6] == pytest.approx((9 + 23 - 6, 1.0, 17.0, 40 * MEGA))
    # 5 s for each: over at 8 and at 13 s.
    assert half[2:6] == pytest.approx((9 + 13 - 6, 26 / 16, 7.0, 20 * MEGA))


def test_the_last_message_is_never_hidden():
    slow = rows(NETWORK._replace(bandwidth=1e12), elements=10 * MEGA, compute=600.0)
    assert slow[0].exposed_seconds == pytest.approx(20e6 * 8 / 1e12)


@pytest.mark.parametrize("density", [0.1, 0.01])
def test_as_many_messages_as_are_fastest(density):
    # Backward hides what there is, and the sixteenth part that is last stands out.
    found = rows(Network(1e10, 0.0, 2), topk(density))[1]
    nbytes = sum(each.nbytes for each in transfers(settings("topk", density), [50 * MEGA // 16], 2))
    assert found.exposed_seconds == pytest.approx(nbytes * 8 / 1e10)
    # Where a message takes long whatever it holds, one is enough.
    far = rows(Network(1e10, 1.0, 2), topk(density))[1]
    nbytes = sum(each.nbytes for each in transfers(settings("topk", density), [50 * MEGA], 2))
    assert far.exposed_seconds == pytest.approx(2 + nbytes * 8 / 1e10)


def test_a_clip_norm_waits_for_the_whole_gradient(monkeypatch):
    candidate = Candidate("sparse_dense", None, settings("dense"))
    before = rows(NETWORK, candidate, elements=MEGA)[1]
    monkeypatch.setattr(Dense, "feedback", Dense.feedback._replace(clip_norm=1.0))
    # 2 MB out and in, twice half of 4, after backward, at 2 MB/s: nothing is hidden.
    after = rows(NETWORK, candidate, elements=MEGA)[1]
    assert after.exposed_seconds == pytest.approx(2.0)
    assert before.exposed_seconds < after.exposed_seconds


def test_a2sgd_pays_for_its_averages():
    row = rows(NETWORK, Candidate("sparse_a2sgd", None, settings("a2sgd")), elements=2 * MEGA)[1]
    # 8 MB every 50 steps take 4 s; the 8 bytes of each message take next to nothing.
    assert row.exposed_seconds == pytest.approx(4 / 50, rel=1e-3)
    assert row.sent_bytes == pytest.approx(8 * MEGA / 50, rel=1e-3)


def test_with_adam_the_mean_gradients_are_counted():
    corrected = Candidate("sparse_topk", 0.01, Settings.of("topk", 0.01, warmup_epochs=0))
    plain, adam = rows(NETWORK, topk(), corrected)[1:]
    assert adam.sent_bytes - plain.sent_bytes == pytest.approx(0.01 * 2 * 50 * MEGA)


def test_more_workers_gather_more():
    found = [rows(Network(1e9, 1e-4, workers), topk())[1] for workers in (2, 4, 16, 128, 1024)]
    times = [row.step_seconds for row in found]
    assert times == sorted(times)
    # To each of the others; among many they go through owners.
    assert found[1].sent_bytes == pytest.approx(3 * found[0].sent_bytes, rel=1e-3)
    assert found[-1].sent_bytes < 7 * found[1].sent_bytes


def test_a_slower_network_is_worth_more():
    networks = [Network(bandwidth, 1e-5, 4) for bandwidth in (1e8, 1e9, 1e10, 1e11)]
    speedups = [rows(network, topk(0.001))[1].speedup for network in networks]
    assert speedups == sorted(speedups, reverse=True)
    assert speedups[0] > 20
    assert speedups[-1] < 1.05


def test_all_systems_have_a_row():
    table = forecast(MEGA, SECOND, NETWORK, candidates([0.5, 0.25]))
    assert {system.name for system in systems()} - {row.name for row in table} == {"sparse_auto"}
    assert [row.density for row in table if row.name == "sparse_topk"] == [0.5, 0.25]
    assert all(row.step_seconds > SECOND and row.sent_bytes > 0 for row in table)


# Four workers on two nodes, a second for each 2 MB of a link, a tenth of it inside a node.
NODES = Network(bandwidth=16e6, latency=0.0, workers=4, node_ranks=2, node_bandwidth=160e6, node_latency=0.0)


def test_a_ring_crosses_a_link_once_and_messages_to_each_share_it():
    assert NODES.seconds("all_gather", 2 * MEGA) == pytest.approx(3.0)
    assert NODES.seconds("all_to_all", 2 * MEGA) == pytest.approx(2 * (4 - 2) / 4)
    assert NODES._replace(workers=2).seconds("all_gather", 2 * MEGA) == pytest.approx(0.1)
    assert NODES.between == Network(8e6, 0.0, 2)


def test_two_levels_send_a_share_between_nodes_and_everything_inside():
    two, one = settings("topk", 0.01), settings("exdyna", 0.01)
    assert [levels(each, NODES)[0] for each in (two, one)] == [2, 1]
    assert levels(two, NODES._replace(workers=2))[0] == 1
    late = topk(overlaps_backward=False)  # in one message, after backward
    ours, flat = (rows(network, late, elements=MEGA)[1] for network in (NODES, NODES._replace(node_ranks=1)))
    # Of half as much, to one other node in place of three other workers.
    assert ours.sent_bytes == pytest.approx(flat.sent_bytes / 6, rel=0.01)
    # Shares, of MEGA / 2 elements: two workers send them over one link. Inside, all but the own share of 4 bytes each,
    # when a gradient is ready and when all groups have arrived.
    selected = transfers(two, [MEGA // 2], 2)[0].nbytes
    assert ours.sent_bytes == selected
    assert ours.exposed_seconds == pytest.approx(selected * 8 / 8e6 + 2 * (4 * MEGA / 2 * 8 / 160e6))


def test_rounds_take_what_their_exchange_takes_once_in_a_round():
    late, rounds = rows(NETWORK, topk(overlaps_backward=False), topk(local_steps=LocalSteps(10)))[1:]
    assert rounds.sent_bytes == pytest.approx(late.sent_bytes / 10)
    assert rounds.exposed_seconds == pytest.approx(late.exposed_seconds / 10)
    assert rounds.step_seconds == SECOND + rounds.exposed_seconds
