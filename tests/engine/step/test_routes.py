"""Exchanges through owners, on two levels and with changing densities have the invariants of a plain exchange."""

from unittest import mock

import pytest
import torch
from torch import nn

from lightning_sparse.compressors import DGC, LAGS, OMGS, TopK
from lightning_sparse.engine.step import topology
from lightning_sparse.schedule import FixedSize
from lightning_sparse.testing.invariants import (
    assert_applied_and_kept,
    assert_mass_is_conserved,
    balance,
    edges_of,
    exchange_given,
    outcomes_of,
    train_both,
    train_with_gaps,
)
from lightning_sparse.testing.tensors import assert_same
from tests.helpers.sparse_ddp import (
    SCHEDULE_NAMES,
    WIRES,
    Edges,
    backpropagate,
    batch,
    density_for,
    sparse_ddp,
    train_branches,
)


class Wavering:
    """Densities that change in each step, so that parameters alternate between sparse and dense messages."""

    step = 0
    names = ()

    def begin(self, layout):
        super().begin(layout)
        self.names = layout.names

    @property
    def densities(self):
        """Send every second name dense, the others in the next step, and sometimes all or none."""
        turns = {name: (len(name) + self.step) % 2 for name in self.names}
        return {name: 1.0 for name, turn in turns.items() if {0: turn, 1: turn, 2: 1, 3: 0}[self.step % 4]}

    def finish_step(self, names, means, finite, all_gather):
        self.step += 1
        super().finish_step(names, means, finite, all_gather)


class WaveringTopK(Wavering, TopK):
    """Top-k that wavers."""


class WaveringOMGS(Wavering, OMGS):
    """OMGS that wavers."""


class WaveringDGC(Wavering, DGC):
    def __init__(self):
        super().__init__(momentum=0.9)


class MaskedDGC(DGC):
    def __init__(self):
        super().__init__(momentum=0.9, masks_momentum=True)


def route(compressor, wire="float32", **settings):
    return {"compressor": compressor, "density": density_for(compressor), "wire": wire, **settings}


OWNERS = {"exchange": "owners", "density": 0.08}
NODES = {"local_world_size": 2}
ROUTES = {
    "owners": route("topk", **OWNERS),
    "owners, bfloat16": route("topk", "bfloat16", **OWNERS),
    "owners, LAGS": route("lags", "bfloat16", **OWNERS),
    "owners, OMGS": route("omgs", "bfloat16", **OWNERS),
    "owners, SDAGC": route("sdagc", "bfloat16", **OWNERS),
    "owners, DGC": route(MaskedDGC, "bfloat16", **OWNERS),
    "two levels": route("topk", **NODES),
    "two levels, float16": route("topk", "float16", **NODES),
    "two levels, owners": route("topk", "bfloat16", exchange="owners", **NODES),
    "two levels, LAGS": route("lags", "bfloat16", **NODES),
    "two levels, DGC": route("dgc", **NODES),
    "two levels, dense": route("dense", **NODES),
    "two levels, dense, float16": route("dense", "float16", **NODES),
    **{f"changing, {wire}": route(WaveringTopK, wire) for wire in WIRES},
    "changing, OMGS": route(WaveringOMGS, "4bit"),
    "changing, DGC": route(WaveringDGC, "bfloat16"),
}
CONSERVING = [name for name in ROUTES if "DGC" not in name]  # momentum adds to the mass
each_route = pytest.mark.parametrize("name", ROUTES)


def pool_of(pools, name):
    return pools[4 if "two levels" in name else 3]


def run(pools, name, act, *arguments, **more):
    return pool_of(pools, name).run(act, {**ROUTES[name], **more}, *arguments)


def whole(share, like, rank):
    """Return a rank's half of a residual in the full size. A mean of the results over ranks is a mean over nodes."""
    halves = torch.zeros(2, share.numel(), dtype=share.dtype)
    halves[rank % 2] = 2 * share
    return halves.flatten()[: like.numel()].view_as(like)


def assert_conserved(name, books):
    for rank, book in enumerate(books if "two levels" in name else ()):
        for entry in book:
            for when in ("before", "after"):
                entry[when] = {key: whole(each, entry["gradient"][key], rank) for key, each in entry[when].items()}
    assert_mass_is_conserved(books)


@pytest.mark.sampled
@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
@pytest.mark.parametrize("name", CONSERVING)
def test_mass_is_conserved(pools, name, schedule):
    assert_conserved(name, run(pools, name, balance, 8, schedule=schedule))


@pytest.mark.sampled(9)
@each_route
def test_replicas_are_identical_and_no_schedule_changes_a_bit(pools, name):
    schedules = ("layerwise", "single", FixedSize(1000), FixedSize(2600))
    first, *others = outcomes_of(pool_of(pools, name), ROUTES[name], schedules, steps=6)
    for outcome in others if "OMGS" not in name else ():  # the selection of OMGS depends on the bucket
        assert_same(outcome, first)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("gap_rank", [0, -1])
@each_route
def test_a_gradient_that_is_not_finite_moves_nothing_anywhere(pools, name, gap_rank):
    run(pools, name, train_with_gaps, gap_rank % pool_of(pools, name).ranks, schedule="single")


@pytest.mark.sampled(6)
@each_route
def test_what_one_rank_uses_is_written_on_all_and_what_none_uses_is_left_alone(pools, name):
    books = run(pools, name, train_branches, pool_of(pools, name).ranks - 1)  # the last of its node
    for book in books:
        for entry, first in zip(book[1:], books[0][1:]):
            assert_same(entry["applied"], first["applied"])
            assert entry["applied"]["sometimes"].any()
            assert not entry["applied"]["never"].any()
            assert_same(entry["before"]["never"], entry["after"]["never"])
    if name in CONSERVING:
        assert_conserved(name, books)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [name for name in ROUTES if "two levels" in name and "16" not in name])
def test_density_one_equals_ddp(pools, name):
    density = None if ROUTES[name]["density"] is None else 1.0
    run(pools, name, train_both, 2, density=density, wire="float32")


@pytest.mark.sampled
@pytest.mark.parametrize("schedule", ["layerwise", "single"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["two levels", "two levels, dense"])
def test_edges(pools, name, dtype, schedule):
    gradients = edges_of(dtype)
    answers = run(pools, name, exchange_given, [gradients], schedule=schedule)
    for rank, answer in enumerate(answers):
        for edge, (applied, share) in answer.items():
            answer[edge] = applied, whole(share, applied, rank)
    assert_applied_and_kept(ROUTES[name]["compressor"], gradients, answers)


def momentum_where_nothing_was_sent(rank, wire):
    torch.manual_seed(0)
    with sparse_ddp(Edges(), **{**ROUTES["owners, DGC"], "wire": wire}) as (ddp, engine):
        backpropagate(ddp, engine, ddp(batch(rank, 0)))
        state = engine.memory.state_dict()
        momentum, residual = (state[kind]["matrix"] for kind in ("momentum", "residual"))
        was_sent = momentum == 0
        return bool(was_sent.any()), bool((residual[~was_sent].abs() >= momentum[~was_sent].abs() * 0.9).all())


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_only_the_momentum_of_what_was_sent_is_masked(pair, wire):
    for some_are_sent, others_stay in pair.run(momentum_where_nothing_was_sent, wire):
        assert some_are_sent
        assert others_stay


def test_densities_do_change(pools):
    applied = [each for entry in run(pools, "changing, float32", balance, 8)[0] for each in entry["applied"].values()]
    # Three ranks select at most 0.15 of a large tensor.
    are_whole = [bool(each.count_nonzero() > 0.2 * each.numel()) for each in applied]
    assert min(sum(are_whole), len(are_whole) - sum(are_whole)) > 10


def stats_of(rank, settings, model=Edges):
    """Return the statistics of the second step, and the bytes of the residual."""
    torch.manual_seed(0)
    with sparse_ddp(model(), **settings) as (ddp, engine):
        for step in range(2):
            engine.begin_backward()
            backpropagate(ddp, engine, ddp(batch(rank, step)).square().mean())
            engine.end_step()
        residuals = engine.memory.state_dict().get("residual", {})
        return engine.compression_stats(), sum(each.nbytes for each in residuals.values())


@pytest.mark.parametrize("name", [name for name in ROUTES if "owners" in name])
def test_the_model_here_does_travel_through_owners(pools, name):
    with_owners, gathered = (
        run(pools, name, stats_of, exchange=exchange)[0][0]["wire_bytes"] for exchange in ("owners", "gather")
    )
    assert with_owners != gathered


@pytest.mark.parametrize("compressor", ["topk", "lags", "dgc", "omgs"])
def test_density_one_costs_what_dense_costs(pools, compressor):
    stats, dense = (
        pools[4].run(stats_of, settings)[0][0]
        for settings in ({"compressor": compressor, "density": 1.0}, {"compressor": "dense"})
    )
    assert stats["wire_bytes"] == dense["wire_bytes"]
    assert stats["density"] == 1.0


def test_a_whole_layer_among_others_leaves_nothing_out(pair):
    (stats, _), _ = pair.run(stats_of, {"compressor": LAGS({"matrix": 1.0}), "density": 0.05})
    sent = {"scale": 1, "pair": 1, "prime": 50, "matrix": 64 * 40, "encoder": 80, "decoder": 2}
    numel = sum(parameter.numel() for parameter in Edges().parameters())
    assert stats["density"] == sum(sent.values()) / numel


@pytest.mark.parametrize("density", [1.0, 0.05])
def test_the_mean_gradient_of_a_node_is_clipped_as_one(pools, density):
    settings = route(DGC(momentum=None, clip_norm=1e-3), density=density, **NODES)
    entries = [book[0]["applied"] for book in pools[4].run(balance, settings, 1)]
    for applied in entries:
        assert_same(applied, entries[0])
    norm = torch.stack([gradient.norm() for gradient in entries[0].values()]).norm()
    assert (0.3e-3 if density == 1 else 0) < norm <= 1e-3


def balance_in_messages(rank, settings, elements):
    with mock.patch.object(topology, "_MESSAGE_ELEMENTS", elements):
        return balance(rank, settings, 3)


def test_messages_inside_a_node_are_bounded_and_change_no_bit(pools):
    settings = route("topk", schedule="single", **NODES)
    assert_same(*(pools[4].run(balance_in_messages, settings, elements) for elements in (64, 1 << 22)))


def wide():
    return nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 512))


@pytest.mark.parametrize("exchange", ["gather", "owners"])
def test_bytes_between_nodes_and_memory_fall_by_the_ranks_of_a_node(pools, exchange):
    (flat, flat_kept), (stats, kept) = (
        pools[4].run(stats_of, route("topk", exchange=exchange, local_world_size=size), wide)[0] for size in (1, 2)
    )
    assert stats["inter_node_bytes"] <= 1.1 / 2 * flat["wire_bytes"]
    assert stats["inter_node_bytes"] < stats["wire_bytes"]
    assert stats["dense_bytes"] == flat["dense_bytes"]
    assert kept == flat_kept / 2
    assert "inter_node_bytes" not in flat
