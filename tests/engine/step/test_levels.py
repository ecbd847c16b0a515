from unittest import mock

import pytest
import torch

import lightning_sparse.engine.step.topology as levels_module
from lightning_sparse.compressors import DGC
from lightning_sparse.schedule import FixedSize
from lightning_sparse.testing.invariants import (
    GivenGradients,
    balance,
    edges_of,
    outcomes_of,
    train_both,
    train_with_gaps,
)
from lightning_sparse.testing.tensors import assert_same
from lightning_sparse.testing.wrapping import gradients_of, residuals_like
from tests.helpers.devices import DEVICE, moved
from tests.helpers.sparse_ddp import Edges, backpropagate, batch, density_for, sparse_ddp, train_branches

NODE = {"local_world_size": 2}
WAYS = [
    pytest.param("topk", "gather", id="topk-gather"),
    pytest.param("topk", "owners", id="topk-owners"),
    pytest.param("lags", "auto", id="lags"),
    pytest.param("dgc", "gather", id="dgc"),
    pytest.param("dense", "auto", id="dense"),
]
each_way = pytest.mark.parametrize(("compressor", "exchange"), WAYS)


@pytest.fixture
def nodes(pools):
    return pools[4]


def settings_of(compressor, exchange="auto", **others):
    return {"compressor": compressor, "density": density_for(compressor), "exchange": exchange, **NODE, **others}


def whole(shares, name, like):
    """Return the state of a full parameter: the mean over two nodes of the joined shares."""
    nodes = [torch.cat([each[name].double() for each in shares[first : first + 2]]) for first in (0, 2)]
    return (sum(nodes) / 2)[: like.numel()].view_as(like)


def assert_balanced(books):
    for entries in zip(*books):
        gradients, before, applied, after = (
            [entry[key] for entry in entries] for key in ("gradient", "before", "applied", "after")
        )
        for name, first in gradients[0].items():
            came = sum(each[name].double() for each in gradients) / len(entries)
            owed = whole(before, name, first) + came
            found = applied[0][name].double() + whole(after, name, first)
            torch.testing.assert_close(found, owed, rtol=2e-6, atol=1e-6 * owed.abs().max().item() + 1e-12)


@pytest.mark.parametrize(
    ("compressor", "exchange", "wire"),
    [
        ("topk", "gather", "float32"),
        ("topk", "gather", "float16"),
        ("topk", "owners", "bfloat16"),
        ("lags", "auto", "bfloat16"),
        ("dense", "auto", "float32"),
        ("dense", "auto", "float16"),
    ],
)
def test_mass_is_conserved(nodes, compressor, exchange, wire):
    assert_balanced(nodes.run(balance, settings_of(compressor, exchange, wire=wire), 4))


@pytest.mark.sampled(2)
@each_way
def test_density_one_equals_ddp(nodes, compressor, exchange):
    density = None if density_for(compressor) is None else 1.0
    nodes.run(train_both, {**settings_of(compressor, exchange), "density": density}, 2)


@pytest.mark.sampled(2)
@each_way
def test_replicas_are_identical_and_no_schedule_changes_a_bit(nodes, compressor, exchange):
    schedules = ("layerwise", "single", FixedSize(1000))
    first, *others = outcomes_of(nodes, settings_of(compressor, exchange), schedules, steps=4)
    for outcome in others:
        assert_same(outcome, first)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("compressor", "exchange", "gap_rank"),
    [("topk", "gather", 0), ("topk", "owners", 3), ("lags", "auto", 0), ("dgc", "gather", 3), ("dense", "auto", 0)],
)
def test_a_gradient_that_is_not_finite_moves_nothing_anywhere(nodes, compressor, exchange, gap_rank):
    nodes.run(train_with_gaps, settings_of(compressor, exchange), gap_rank)


@pytest.mark.sampled(2)
@each_way
def test_what_one_rank_uses_is_written_on_all_and_what_none_uses_is_left_alone(nodes, compressor, exchange):
    books = nodes.run(train_branches, settings_of(compressor, exchange), 3)  # the last of its node
    for book in books:
        for entry, first in zip(book[1:], books[0][1:]):
            assert_same(entry["applied"], first["applied"])
            assert entry["applied"]["sometimes"].any()
            assert not entry["applied"]["never"].any()
            assert_same(entry["before"]["never"], entry["after"]["never"])
    if compressor != "dgc":
        assert_balanced(books)


def exchange_edges(rank, settings, gradients):
    gradients = moved(gradients, DEVICE)
    with sparse_ddp(model := GivenGradients(gradients), **settings) as (ddp, engine):
        backpropagate(ddp, engine, ddp(gradients))
        waiting = residuals_like(engine, dict(model.named_parameters()))
        applied = gradients_of(ddp)
    return tuple({name.removeprefix("weights."): each for name, each in of.items()} for of in (applied, waiting))


@pytest.mark.sampled
@pytest.mark.parametrize("schedule", ["layerwise", "single"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("compressor", ["topk", "dense"])
def test_edges(nodes, compressor, dtype, schedule):
    gradients = edges_of(dtype)
    answers = nodes.run(exchange_edges, settings_of(compressor, schedule=schedule), gradients)
    for edge, gradient in gradients.items():
        for applied, _ in answers:
            assert torch.equal(applied[edge], answers[0][0][edge]), edge
            assert applied[edge].dtype == dtype
            assert applied[edge].isfinite().all(), edge
            assert not applied[edge][gradient == 0].any(), edge
        mass = answers[0][0][edge].double() + whole([waiting for _, waiting in answers], edge, gradient)
        rtol = max(torch.finfo(dtype).eps, 1e-6)
        torch.testing.assert_close(mass, gradient.double(), rtol=rtol, atol=1e-8, msg=edge)


def train_steps(rank, model, settings, steps=3):
    history = []
    with sparse_ddp(model, **settings) as (ddp, engine):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        for step in range(steps):
            backpropagate(ddp, engine, ddp(batch(rank, step)))
            history.append(gradients_of(ddp))
            optimizer.step()
    return history


def train_clipped(rank, settings, clip_norm):
    torch.manual_seed(0)
    return train_steps(rank, Edges(), {**settings, "compressor": DGC(momentum=None, clip_norm=clip_norm)})


@pytest.mark.parametrize("density", [1.0, 0.05])
def test_the_mean_gradient_of_a_node_is_clipped_as_one(nodes, density):
    settings = {**settings_of("dgc"), "density": density}
    histories = nodes.run(train_clipped, settings, 1e-3)
    for history in histories:
        assert_same(history, histories[0])
    applied = torch.stack([gradient.norm() for gradient in histories[0][0].values()]).norm()
    assert (0.3e-3 if density == 1 else 0) < applied <= 1e-3


def count_bytes(rank, settings):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))
    with sparse_ddp(model, **settings) as (ddp, engine):
        for _ in range(2):
            backpropagate(ddp, engine, ddp(torch.randn(4, 512)).square().mean())
            engine.end_step()
        return engine.compression_stats(), sum(each.nbytes for each in engine.memory.state_dict()["residual"].values())


@pytest.mark.parametrize("exchange", ["gather", "owners"])
def test_bytes_between_nodes_and_memory_fall_by_the_ranks_of_a_node(nodes, exchange):
    two = {"compressor": "topk", "density": 0.05, "exchange": exchange, **NODE}
    one = {**two, "local_world_size": 1}
    (flat, flat_kept), (stats, kept_bytes) = nodes.run(count_bytes, one)[0], nodes.run(count_bytes, two)[0]
    assert stats["inter_node_bytes"] <= 1.1 / 2 * flat["wire_bytes"]
    assert stats["inter_node_bytes"] < stats["wire_bytes"]
    assert stats["dense_bytes"] == flat["dense_bytes"]
    assert kept_bytes == flat_kept / 2
    assert "inter_node_bytes" not in flat


def test_messages_inside_a_node_are_bounded_and_change_no_bit(nodes):
    settings = settings_of("topk", schedule="single")
    assert_same(nodes.run(train_in_messages, settings, 64), nodes.run(train_in_messages, settings, 1 << 22))


def train_in_messages(rank, settings, elements):
    torch.manual_seed(0)
    with mock.patch.object(levels_module, "_MESSAGE_ELEMENTS", elements):
        return train_steps(rank, Edges(), settings)


def follow_a_plan(rank, settings, steps):
    torch.manual_seed(0)
    history = []
    with sparse_ddp(Edges(), **settings) as (ddp, engine):
        for step in range(steps):
            engine.begin_backward()
            backpropagate(ddp, engine, ddp(batch(rank, step)))
            history.append(gradients_of(ddp))
        engine.worker.drain()
        return None if engine.plan is None else engine.plan.buckets, history[-3:]


@pytest.mark.exhaustive
def test_all_ranks_of_all_nodes_follow_one_plan_and_it_changes_no_bit(nodes):
    (groups, applied), *others = nodes.run(follow_a_plan, settings_of("topk", schedule="merged"), 72)
    assert groups is not None
    assert all(theirs == groups for theirs, _ in others)
    for _, theirs in (*others, *nodes.run(follow_a_plan, settings_of("topk", schedule="layerwise"), 72)):
        assert_same(theirs, applied)
