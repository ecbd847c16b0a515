"""Gradients at the border of the engine, for any use and any time of arrival."""

import re
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_sparse.compressors import DGC, TopK
from lightning_sparse.testing.tensors import differences
from tests.helpers.devices import DEVICE
from tests.helpers.sparse_ddp import Edges, batch, parameters_of, sgd_steps, sparse_ddp


class Tabled(nn.Module):
    def __init__(self):
        super().__init__()
        self.edges = Edges()
        self.table = nn.Embedding(20, 8)
        self.unused = nn.Linear(2, 2)

    def forward(self, inputs):
        return self.edges(inputs) + self.table(inputs[:, :3].abs().long().clamp(max=19)).square().sum()


def train_either_way(rank, settings):
    trained, told = [], []

    def note(event, call):
        return lambda *given: (events.append(event), call(*given))[1]

    for overlaps_backward in (True, False):
        torch.manual_seed(0)
        events = list[str]()
        with ExitStack() as stack:
            ddp, engine = stack.enter_context(
                sparse_ddp(Tabled(), schedule="layerwise", overlaps_backward=overlaps_backward, **settings)
            )
            noted = note("exchange", engine.pipeline.exchange)
            stack.enter_context(mock.patch.object(engine.pipeline, "exchange", noted))
            for parameter in ddp.parameters():
                parameter.register_hook(note("gradient", lambda gradient: gradient))
            for _ in sgd_steps(ddp, engine, (ddp(batch(rank, step)) for step in range(4)), lr=0.01):
                events.append("step")
            trained.append(parameters_of(ddp))
        told.append(" ".join(events).split("step")[:-1])
    return trained, told


CLIPS = {"compressor": DGC(momentum=0.9, clip_norm=0.5)}


@pytest.mark.parametrize("settings", [{}, CLIPS], ids=["", "clipped by the norm of all"])
def test_what_waits_for_backwards_end_goes_in_one_message_and_no_bit_is_another(pair, settings):
    for trained, (overlapping, waiting) in pair.run(train_either_way, settings):
        assert differences(*trained) == []
        late, early = r" *(gradient )+exchange ", r" *(gradient )+(exchange (gradient )*)+"
        assert all(re.fullmatch(late, step) for step in waiting)
        assert all(re.fullmatch(late if settings else early, step) for step in overlapping)
        assert len(waiting) == len(overlapping) == 4
        if not settings:
            assert all(step.count("exchange") > 1 for step in overlapping)


class Unseen(nn.Linear):
    """A layer with a sparse gradient that no attribute announces."""

    def forward(self, rows):
        return functional.embedding(rows, self.weight, sparse=True).sum() + self.bias.sum()


def refused_in_backward(rank):
    with sparse_ddp(Unseen(3, 4)) as (ddp, _), pytest.raises(ValueError, match=r"'weight'.*sparse=False"):
        ddp(torch.tensor([rank], device=DEVICE)).backward()


def test_a_gradient_with_a_sparse_layout_is_refused_when_it_comes(pair):
    pair.run(refused_in_backward)


class Returning(TopK):
    def finish_step(self, names, means, finite, all_gather):
        return means[::-1]


def refused_after_backward(rank):
    with sparse_ddp(nn.Linear(3, 4), Returning()) as (ddp, _), pytest.raises(TypeError, match="means in place"):
        ddp(torch.ones(2, 3, device=DEVICE)).sum().backward()


def test_other_means_of_a_compressor_are_refused(pair):
    pair.run(refused_after_backward)


class Mixed(nn.Module):
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
