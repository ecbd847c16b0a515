"""What the border does with gradients, whatever each rank used and whenever they come."""

import re
from contextlib import ExitStack
from unittest import mock

import torch
from torch import nn

from lightning_sparse.testing.tensors import differences
from tests.helpers.sparse_ddp import Edges, batch, parameters_of, sgd_steps, sparse_ddp


class Tabled(nn.Module):
    """Layers, one of them unused, and an embedding whose gradient has a sparse layout."""

    def __init__(self):
        super().__init__()
        self.edges = Edges()
        self.table = nn.Embedding(20, 8, sparse=True)
        self.unused = nn.Linear(2, 2)

    def forward(self, inputs):
        return self.edges(inputs) + self.table(inputs[:, :3].abs().long().clamp(max=19)).square().sum()


def train_either_way(rank):
    """Train with and without overlap; return the parameters of each, and what happened in which order without."""
    trained, events = [], list[str]()

    def note(event, call):
        return lambda *given: (events.append(event), call(*given))[1]

    for overlaps_backward in (True, False):
        torch.manual_seed(0)
        with ExitStack() as stack:
            ddp, engine = stack.enter_context(
                sparse_ddp(Tabled(), schedule="layerwise", overlaps_backward=overlaps_backward)
            )
            if not overlaps_backward:
                noted = note("exchange", engine.pipeline.exchange)
                stack.enter_context(mock.patch.object(engine.pipeline, "exchange", noted))
                for parameter in ddp.parameters():
                    parameter.register_hook(note("gradient", lambda gradient: gradient))
            for _ in sgd_steps(ddp, engine, (ddp(batch(rank, step)) for step in range(4)), lr=0.01):
                events.append("step")
            trained.append(parameters_of(ddp))
    return trained[0], trained[1], events


def test_without_overlap_the_bits_are_the_same_and_nothing_travels_in_backward(pair):
    for overlapping, waiting, events in pair.run(train_either_way):
        assert differences(overlapping, waiting) == []
        steps = " ".join(events).removeprefix("step " * 4).split("step")[:-1]
        assert len(steps) == 4
        assert all(re.fullmatch(r" *(gradient )+(exchange )+", step) for step in steps)


class Mixed(nn.Module):
    """Parameters of two types, and one that DDP is told to leave alone."""

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
        return parameters_of(ddp)


def test_what_ddp_is_told_to_leave_alone_is_each_ranks_own_and_a_static_graph_changes_nothing(pair):
    (one, other), plain = pair.run(train_mixed, True), pair.run(train_mixed, False)
    assert differences(one, plain[0]) == []
    assert differences(one, other) != []
    for each in (one, other):
        del each["alone.weight"]
    assert differences(one, other) == []
