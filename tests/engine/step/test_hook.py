"""What the hook keeps of the buckets that DDP hands it."""

import re
import weakref
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_sparse.engine.step.hook import GradientStream
from lightning_sparse.testing.tensors import differences
from tests.helpers.sparse_ddp import Edges, backpropagate, batch, parameters_of, sgd_steps, sparse_ddp


class Tabled(nn.Module):
    """Layers, one of them unused, and an embedding whose gradient has a sparse layout."""

    def __init__(self):
        super().__init__()
        self.edges = Edges()
        self.table = nn.Embedding(20, 8, sparse=True)
        self.unused = nn.Linear(2, 2)

    def forward(self, inputs):
        return self.edges(inputs) + self.table(inputs[:, :3].abs().long().clamp(max=19)).square().sum()


def train_either_way(rank, arguments):
    """Train with and without overlap; return the parameters of each, and what happened in which order without."""
    trained, events = [], list[str]()

    def note(event, call):
        return lambda *given: (events.append(event), call(*given))[1]

    for overlaps_backward in (True, False):
        torch.manual_seed(0)
        settings = {"schedule": "layerwise", "overlaps_backward": overlaps_backward, **arguments}
        with ExitStack() as stack:
            ddp, engine = stack.enter_context(sparse_ddp(Tabled(), **settings))
            if not overlaps_backward:
                for name in ("exchange", "reduce_sparse_layout"):
                    noted = note("exchange", getattr(engine.pipeline, name))
                    stack.enter_context(mock.patch.object(engine.pipeline, name, noted))
                for parameter in ddp.parameters():
                    parameter.register_hook(note("gradient", lambda gradient: gradient))
            for _ in sgd_steps(ddp, engine, (ddp(batch(rank, step)) for step in range(4)), lr=0.01):
                events.append("step")
            trained.append(parameters_of(ddp))
    return trained[0], trained[1], events


@pytest.mark.parametrize("arguments", [{"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_without_overlap_the_bits_are_the_same_and_nothing_travels_in_backward(pair, arguments):
    for overlapping, waiting, events in pair.run(train_either_way, arguments):
        assert differences(overlapping, waiting) == []
        steps = " ".join(events).removeprefix("step " * 4).split("step")[:-1]
        assert len(steps) == 4
        assert all(re.fullmatch(r" *(gradient )+(exchange )+", step) for step in steps)


class Mixed(nn.Module):
    """Parameters of two types, in buckets of their own, and one that DDP is told to leave alone."""

    def __init__(self):
        super().__init__()
        self.edges, self.alone = Edges(), nn.Linear(3, 1)
        self.precise = nn.Linear(3, 4, dtype=torch.float64)
        self._ddp_params_and_buffers_to_ignore = ["alone.weight"]

    def forward(self, inputs):
        seen = inputs[:, :3]
        return self.edges(inputs) + self.precise(seen.double()).square().sum() + self.alone(seen).sum()


def train_mixed(rank, is_static):
    torch.manual_seed(0)
    with sparse_ddp(Mixed(), static_graph=is_static) as (ddp, engine):
        for _ in sgd_steps(ddp, engine, (ddp(batch(rank, step)) for step in range(3)), lr=0.01):
            pass
        return {name: tensor for name, tensor in parameters_of(ddp).items() if name != "alone.weight"}


def test_the_first_step_of_a_static_graph_ends_with_its_last_bucket(pair):
    static, expected = pair.run(train_mixed, True), pair.run(train_mixed, False)
    assert differences(static[0], static[1]) == []
    assert differences(static[0], expected[0]) == []


def train_watched(rank):
    """Make three steps; return how many buckets the first had, and those alive in the second and in the last."""
    torch.manual_seed(0)
    seen = []
    receive = GradientStream.receive

    def receive_watched(stream, bucket):
        seen.append(weakref.ref(bucket.buffer()))
        return receive(stream, bucket)

    with mock.patch.object(GradientStream, "receive", receive_watched), sparse_ddp(Edges()) as (ddp, engine):
        alive = []
        first = []
        ddp.module.register_forward_pre_hook(lambda *_: alive.append(sum(each() is not None for each in first)))
        for step in range(3):
            backpropagate(ddp, engine, ddp(batch(rank, step)))
            engine.worker.settle()
            first[:] = first or seen
    return len(first), alive[1], alive[2]


def test_the_memory_of_the_first_buckets_is_given_back(pair):
    for buckets, in_second_step, in_third_step in pair.run(train_watched):
        assert buckets > 0
        assert in_second_step == in_third_step == 0
