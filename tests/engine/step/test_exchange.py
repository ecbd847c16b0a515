"""The exchange through owners has the invariants of the gather, in real processes, for all supported compressors."""

import pytest
import torch

from lightning_sparse.compressors.dgc import DGC
from lightning_sparse.schedule import FixedSize
from lightning_sparse.testing.invariants import (
    assert_mass_is_conserved,
    balance,
    outcomes_of,
    train_with_gaps,
)
from lightning_sparse.testing.tensors import assert_same
from tests.helpers.sparse_ddp import Edges, backpropagate, batch, sparse_ddp, train_branches

COMPRESSORS = {
    "topk": "topk",
    "lags": "lags",
    "omgs": "omgs",
    "sdagc": "sdagc",
    "dgc": DGC(momentum=0.9, masks_momentum=True),
}
each_compressor = pytest.mark.parametrize("name", COMPRESSORS)
each_wire = pytest.mark.parametrize("wire", ["float32", "bfloat16"])


def settings_of(name, wire="float32", **more):
    return {"compressor": COMPRESSORS[name], "density": 0.08, "wire": wire, "exchange": "owners", **more}


def wire_bytes(rank, settings):
    with sparse_ddp(Edges(), **settings) as (ddp, engine):
        backpropagate(ddp, engine, ddp(batch(rank, 0)))
        return engine.compression_stats()["wire_bytes"]


def test_the_models_here_do_travel_through_owners(pools):
    for name in COMPRESSORS:
        with_owners = pools[3].run(wire_bytes, settings_of(name))
        gathered = pools[3].run(wire_bytes, settings_of(name, exchange="gather"))
        assert with_owners != gathered


@pytest.mark.parametrize(
    ("name", "wire"), [("topk", "float32"), *((name, "bfloat16") for name in ("topk", "omgs", "sdagc"))]
)
def test_mass_is_conserved(pools, name, wire):
    assert_mass_is_conserved(pools[3].run(balance, settings_of(name, wire), 4))


@pytest.mark.sampled(3)
@each_compressor
def test_replicas_are_identical_and_no_schedule_changes_a_bit(pools, name):
    schedules = ("layerwise", "single", FixedSize(2600))
    outcomes = outcomes_of(pools[3], settings_of(name, "bfloat16"), schedules)
    if name != "omgs":  # the selection of OMGS depends on the bucket
        for outcome in outcomes[1:]:
            assert_same(outcome, outcomes[0])


@pytest.mark.sampled(3)
@each_compressor
def test_a_gradient_that_is_not_finite_moves_nothing_that_is_kept(pair, name):
    pair.run(train_with_gaps, settings_of(name), 1)


@each_wire
def test_the_residual_of_an_unused_parameter_is_neither_spent_nor_lost(pair, wire):
    assert_mass_is_conserved(pair.run(train_branches, settings_of("topk", wire) | {"density": 0.5}))


def momentum_where_nothing_was_sent(rank, wire):
    torch.manual_seed(0)
    with sparse_ddp(Edges(), **settings_of("dgc", wire)) as (ddp, engine):
        backpropagate(ddp, engine, ddp(batch(rank, 0)))
        state = engine.memory.state_dict()
        momentum, residual = (state[kind]["matrix"] for kind in ("momentum", "residual"))
        was_sent = momentum == 0
        return bool(was_sent.any()), bool((residual[~was_sent].abs() >= momentum[~was_sent].abs() * 0.9).all())


@each_wire
def test_only_the_momentum_of_what_was_sent_is_masked(pair, wire):
    for some_are_sent, others_stay in pair.run(momentum_where_nothing_was_sent, wire):
        assert some_are_sent
        assert others_stay
