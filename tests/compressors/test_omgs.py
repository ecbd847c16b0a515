import pytest
import torch
from torch import nn

from lightning_sparse.compressors import OMGS
from lightning_sparse.schedule import FixedSize, Schedule
from tests.compressors.virtual import DENSITY, VirtualTopK, assert_same_as_virtual
from tests.helpers.devices import DEVICE
from tests.helpers.sparse_ddp import (
    WIRES,
    Edges,
    backpropagate,
    batch,
    sparse_ddp,
    watch_gradients,
)

LAYERS = [["first.weight", "first.bias"], ["second.weight", "second.bias"]]


class LayerByLayer(Schedule):
    def closes_bucket(self, newest, numel):
        return numel in (64 * 48 + 48, 48 * 20 + 20)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("schedule", "groups"),
    [
        (LayerByLayer(), LAYERS),
        ("single", [LAYERS[0] + LAYERS[1]]),
        ("layerwise", [[name] for layer in LAYERS for name in layer]),
    ],
    ids=["two groups", "single", "layerwise"],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_omgs_equals_its_reference(pools, ranks, schedule, groups):
    settings = {"compressor": OMGS(), "density": DENSITY, "schedule": schedule}
    assert_same_as_virtual(pools[ranks], settings, VirtualTopK(groups))


class ManyTypes(Edges):
    def __init__(self):
        super().__init__()
        self.doubles = nn.Parameter(torch.ones(40, dtype=torch.float64))
        self.brains = nn.Parameter(torch.ones(40, dtype=torch.bfloat16))
        self.halves = nn.Parameter(torch.ones(40, dtype=torch.float16))

    def forward(self, inputs):
        extra = self.doubles.sum() + self.brains.double().square().sum() + self.halves.double().square().sum()
        return super().forward(inputs) + extra * inputs[0, 0]


def balance_while_replanned(rank, wire):
    torch.manual_seed(0)
    book = []
    schedule = FixedSize(1)
    with sparse_ddp(ManyTypes(), "omgs", DENSITY, schedule, wire) as (ddp, engine):
        gradients = watch_gradients(ddp.module)
        waiting = {name: torch.zeros_like(gradient) for name, gradient in gradients.items()}
        for step, min_elements in enumerate([1, 10**9, 1000, 10**9, 2600, 1]):
            schedule.min_elements = min_elements
            backpropagate(ddp, engine, ddp(batch(rank, step)))
            owed = {name: waiting[name].double() + gradient.double() for name, gradient in gradients.items()}
            applied = {name: parameter.grad.double().clone() for name, parameter in ddp.module.named_parameters()}
            residuals = engine.state_dict()["memory"]["residual"]
            waiting = {name: residuals[name].view_as(gradient).clone() for name, gradient in gradients.items()}
            book.append((owed, applied, waiting))
    return book


@pytest.mark.parametrize("wire", WIRES)
def test_new_groups_lose_nothing(pools, wire):
    coarse = {"brains": 1e-2, "halves": 1e-3}
    for entries in zip(*pools[3].run(balance_while_replanned, wire)):
        for name, applied in entries[0][1].items():
            assert all(torch.equal(applied, other[name]) for _, other, _ in entries[1:])
            owed = sum(owed[name] for owed, _, _ in entries) / 3
            kept = sum(waiting[name].double() for _, _, waiting in entries) / 3
            scale = owed.abs().max().item()
            torch.testing.assert_close(applied + kept, owed, rtol=coarse.get(name, 2e-6), atol=1e-6 * scale + 1e-12)


class Rare(nn.Module):
    def __init__(self):
        super().__init__()
        self.common = nn.Parameter(torch.zeros(1000))
        self.rare = nn.Parameter(torch.zeros(1000))

    def forward(self, inputs, uses_rare):
        loss = (self.common * inputs).sum()
        return loss + (self.rare * inputs).sum() * 1000 if uses_rare else loss


def count_sent(rank):
    counts = []
    inputs = torch.linspace(1, 2, 1000, device=DEVICE)
    with sparse_ddp(Rare(), "omgs", 0.01, "single", find_unused_parameters=True) as (ddp, engine):
        for uses_rare in (True, False, False):
            backpropagate(ddp, engine, ddp(inputs, uses_rare))
            counts.append(int(ddp.module.common.grad.count_nonzero()))
        waits = engine.state_dict()["memory"]["residual"]["rare"]
        assert int(waits.count_nonzero()) == 980
    return counts


def test_what_nobody_uses_wins_no_places(pair):
    for counts in pair.run(count_sent):
        assert counts == [0, 20, 20]
