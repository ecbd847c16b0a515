import time

import pytest
import torch
from torch import nn

from lightning_sparse.compressors import LAGS
from tests.helpers.sparse_ddp import (
    AGREEING_NAMES,
    DENSITY,
    DIFFERENT_NAMES,
    GROUPING_FREE_NAMES,
    Edges,
    batch,
    parameters_of,
    sgd_steps,
    sparse_ddp,
)

LAYERS = 6
STEPS = 60  # 40 steps of trials and 16 of comparison


def costly_message(sent):
    return 30e-3


def costly_bytes(sent):
    """Bytes cost time and messages do not. A layer's bytes hide behind the next layer's backward."""
    return 2e-6 * sent


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(LAYERS))
        for layer in self.layers:
            layer.weight.register_hook(lambda gradient: time.sleep(4e-3))

    def forward(self, inputs):
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return inputs.square().mean()


def slow_down(engine, network):
    communicator = engine.pipeline.levels.inter

    def slowed(collective):
        def run(tensor):
            received = collective(tensor)
            time.sleep(network(tensor.nbytes))
            return received

        return run

    for name in ("all_gather", "all_to_all", "all_reduce"):
        setattr(communicator, name, slowed(getattr(communicator, name)))


def losses_of(rank, ddp, engine, steps):
    for step in range(steps):
        engine.begin_backward()
        yield ddp(batch(rank, step))


def train(rank, schedule, network, steps):
    torch.manual_seed(0)
    buckets, lines = [], []
    with sparse_ddp(Slow(), density=0.05, schedule=schedule, log=lines.append) as (ddp, engine):
        if network is not None:
            slow_down(engine, network)
        buckets += [
            () if engine.plan is None else engine.plan.buckets
            for _ in sgd_steps(ddp, engine, losses_of(rank, ddp, engine, steps), lr=0.01)
        ]
        return parameters_of(ddp), buckets, lines, engine.plan


def test_trials_and_plan_change_no_bit_and_are_the_same_on_all_ranks(pair):
    (single, *_), _ = pair.run(train, "single", None, STEPS)
    (first, buckets, lines, plan), (second, other_buckets, other_lines, _) = pair.run(train, "merged", None, STEPS)
    for name, parameter in single.items():
        assert torch.equal(first[name], parameter)
        assert torch.equal(second[name], parameter)
    assert buckets == other_buckets
    assert buckets[-1] != ()
    assert sorted(name for bucket in buckets[-1] for name in bucket) == sorted(single)
    assert lines
    assert not other_lines
    counts = [count for count, _ in plan.tried]
    assert counts == sorted(counts)


@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.clock
@pytest.mark.parametrize(("network", "is_single"), [(costly_message, True), (costly_bytes, False)])
def test_the_plan_suits_the_network(pair, network, is_single):
    for _, buckets, _, _ in pair.run(train, "merged", network, STEPS):
        assert (len(buckets[-1]) == 1) == is_single


def train_adaptively(rank, network, steps):
    torch.manual_seed(0)
    compressor = LAGS(adaptive_density=True)
    with sparse_ddp(Slow(), compressor, density=0.02, log=lambda line: None) as (ddp, engine):
        slow_down(engine, network)
        for _ in sgd_steps(ddp, engine, losses_of(rank, ddp, engine, steps), lr=0.01):
            engine.end_step()
        return parameters_of(ddp), engine.plan, engine.compression_stats()


@pytest.mark.exhaustive
@pytest.mark.clock
def test_lags_sends_more_of_what_hides_and_no_less_of_what_does_not(pair):
    for _ in range(3):  # on a busy machine a measurement may show no difference
        (first, plan, stats), (second, other_plan, other_stats) = pair.run(train_adaptively, costly_bytes, STEPS + 40)
        if len(plan.densities) > 1:
            break
    assert plan.densities == other_plan.densities
    assert len(plan.densities) > 1
    assert plan.densities[0] > 0.02
    assert plan.densities[-1] == pytest.approx(0.02, abs=2e-4)
    assert stats["density"] == other_stats["density"] > 0.02
    assert all(torch.equal(first[name], second[name]) for name in first)


def train_edges(rank, compressor, schedule, steps):
    torch.manual_seed(0)
    settings = {"density": DENSITY[compressor], "schedule": schedule, "log": lambda line: None}
    with sparse_ddp(Edges(), compressor, **settings) as (ddp, engine):
        for _ in sgd_steps(ddp, engine, losses_of(rank, ddp, engine, steps), lr=0.01):
            pass
        return parameters_of(ddp), engine.plan is not None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("compressor", DIFFERENT_NAMES)
def test_no_compressor_notices_the_trials(pair, compressor):
    planned = pair.run(train_edges, compressor, "merged", STEPS)
    assert all(has_plan for _, has_plan in planned)
    (single, _), (other, _) = pair.run(train_edges, compressor, "single", STEPS)
    if compressor in GROUPING_FREE_NAMES:
        for (ours, _), theirs in zip(planned, (single, other)):
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    if compressor in AGREEING_NAMES:
        assert all(torch.equal(tensor, planned[1][0][name]) for name, tensor in planned[0][0].items())
