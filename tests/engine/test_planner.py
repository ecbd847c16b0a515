import time
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from lightning_sparse.compressors import LAGS
from lightning_sparse.testing.tensors import assert_same
from lightning_sparse.testing.wrapping import settings_of
from tests.helpers.sparse_ddp import (
    AGREEING_NAMES,
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


class Trained(NamedTuple):
    parameters: dict[str, torch.Tensor]
    buckets: list[tuple[tuple[str, ...], ...]]  # planned buckets after each step
    lines: list[str]
    plan: Any
    stats: dict[str, float]


def train(rank, model, network, steps, settings):
    torch.manual_seed(0)
    buckets, lines = [], []
    with sparse_ddp(model(), log=lines.append, **settings) as (ddp, engine):
        if network is not None:
            slow_down(engine, network)

        def losses():
            for step in range(steps):
                engine.begin_backward()
                yield ddp(batch(rank, step))

        for _ in sgd_steps(ddp, engine, losses(), lr=0.01):
            engine.end_step()
            buckets.append(() if engine.plan is None else engine.plan.buckets)
        return Trained(parameters_of(ddp), buckets, lines, engine.plan, engine.compression_stats())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("compressor", "levels"), [*((name, 1) for name in DIFFERENT_NAMES), ("topk", 2)])
def test_trials_and_plan_change_no_bit_and_are_the_same_on_all_ranks(pools, compressor, levels):
    settings = {**settings_of(compressor), "local_world_size": levels}
    planned, single = (
        pools[2 * levels].run(train, Edges, None, STEPS, {**settings, "schedule": schedule})
        for schedule in ("merged", "single")
    )
    if compressor in GROUPING_FREE_NAMES:
        for ours, theirs in zip(planned, single):
            assert_same(ours.parameters, theirs.parameters)
    first, *others = planned
    for other in others:
        if compressor in AGREEING_NAMES:
            assert_same(first.parameters, other.parameters)
        assert first.buckets == other.buckets
        assert not other.lines
    assert sorted(name for bucket in first.buckets[-1] for name in bucket) == sorted(first.parameters)
    assert first.lines
    counts = [count for count, _ in first.plan.tried]
    assert counts == sorted(counts)


@pytest.mark.exhaustive
@pytest.mark.sampled(1)
@pytest.mark.clock
@pytest.mark.parametrize(("network", "is_single"), [(costly_message, True), (costly_bytes, False)])
def test_the_plan_suits_the_network(pair, network, is_single):
    for trained in pair.run(train, Slow, network, STEPS, {"density": 0.05}):
        assert (len(trained.buckets[-1]) == 1) == is_single


@pytest.mark.exhaustive
@pytest.mark.clock
def test_lags_sends_more_of_what_hides_and_no_less_of_what_does_not(pair):
    settings = {"compressor": LAGS(adaptive_density=True), "density": 0.02}
    for _ in range(3):  # on a busy machine a measurement may show no difference
        first, second = pair.run(train, Slow, costly_bytes, STEPS + 40, settings)
        if len(first.plan.densities) > 1:
            break
    densities = first.plan.densities
    assert densities == second.plan.densities
    assert len(densities) > 1
    assert densities[0] > 0.02
    assert densities[-1] == pytest.approx(0.02, abs=2e-4)
    assert first.stats["density"] == second.stats["density"] > 0.02
    assert_same(first.parameters, second.parameters)
