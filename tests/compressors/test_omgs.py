"""OMGS-SGD against a slow reference, and what selecting across a group must not lose or waste."""

from unittest import mock

import pytest
import torch
from torch import nn

from lightning_sparse.compressors import DGC, OMGS, Compressor
from lightning_sparse.compressors.selection import Selection
from lightning_sparse.engine.step.selecting import GroupSelector, Workspace
from lightning_sparse.engine.wire import build_wires
from lightning_sparse.engine.wire.base import ExchangeResult
from lightning_sparse.schedule import FixedSize, Schedule
from tests.compressors.virtual import assert_same_as_virtual
from tests.helpers.devices import DEVICE
from tests.helpers.sparse_ddp import (
    WIRES,
    Edges,
    backpropagate,
    batch,
    sparse_ddp,
    watch_gradients,
)

WAYS = build_wires("gather", "reduce", torch.float32, 0, 2)

DENSITY = 0.05
LAYERS = [["first.weight", "first.bias"], ["second.weight", "second.bias"]]


class LayerByLayer(Schedule):
    """Close a group where the layers of the virtual workers' network end, in whatever order parameters come."""

    def closes_group(self, newest, numel):
        return numel in (64 * 48 + 48, 48 * 20 + 20)


class VirtualOMGS:
    """Top-k of every group for N workers, with groups that stay as they are."""

    def __init__(self, groups):
        self.groups = groups
        self.residuals = {}

    def __call__(self, gradients, rate):
        means = {name: torch.zeros_like(gradient) for name, gradient in gradients[0].items()}
        for rank, gradient in enumerate(gradients):
            for group in self.groups:
                accumulated = [self.residuals.get((rank, name), 0.0) + gradient[name] for name in group]
                flat = torch.cat(accumulated)
                sent = torch.zeros_like(flat)
                for position in flat.abs().argsort(descending=True)[: max(1, round(DENSITY * flat.numel()))]:
                    sent[position] = flat[position]
                pieces = sent.split([tensor.numel() for tensor in accumulated])
                for name, tensor, piece in zip(group, accumulated, pieces):
                    self.residuals[rank, name] = tensor - piece
                    means[name] += piece / len(gradients)
        return means


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
    assert_same_as_virtual(pools[ranks], settings, VirtualOMGS(groups))


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
    """Train with other groups in every step; return for each what was owed, what was applied, the residual after it."""
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
    """A common parameter, and one whose gradient is much larger where it is used."""

    def __init__(self):
        super().__init__()
        self.common = nn.Parameter(torch.zeros(1000))
        self.rare = nn.Parameter(torch.zeros(1000))

    def forward(self, inputs, uses_rare):
        loss = (self.common * inputs).sum()
        return loss + (self.rare * inputs).sum() * 1000 if uses_rare else loss


def count_sent(rank):
    """Use the rare parameter in the first step only; count what is applied of the common one."""
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


def sample(rank):
    """Exchange one step in one group; return how many elements it has, and statistics."""
    torch.manual_seed(0)
    with sparse_ddp(Edges(), "omgs", DENSITY, "single") as (ddp, engine):
        engine.begin_backward()
        backpropagate(ddp, engine, ddp(batch(rank, 0)))
        return sum(parameter.numel() for parameter in ddp.parameters()), engine.compression_stats()


def test_statistics_count_what_was_sent_of_the_group(pair):
    for numel, stats in pair.run(sample):
        assert stats["density"] == round(DENSITY * numel) / numel


class Everything(Compressor):
    default_density = 0.5
    wire_format = "gather"
    selects_across_group = True

    def select(self, names, accumulated, counts):
        self.names = names
        return [Selection(tensor, None, tensor.numel()) for tensor in accumulated]


def test_a_selection_without_indices_is_taken_apart_again():
    compressor = Everything()
    tensors = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0])]
    names = ["weight", "bias"]
    [part] = GroupSelector(compressor, WAYS).select(names, tensors, [0.5, 0.5], [None, False])
    assert compressor.names == names
    assert part.selection[0].values.tolist() == [1.0, 2.0, 3.0, 0.0]
    padded = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
    means, kept = ([Selection(values, None, 4)] for values in (padded, padded / 2))
    channel = mock.MagicMock(**{"recorder.samples": None})
    channel.run.return_value = ExchangeResult(torch.tensor(True), None, means, kept)
    result = part.exchange(channel, names, None)
    assert [mean.values.tolist() for mean in result.means] == [[1.0, 2.0, 3.0], [0.0]]
    # The bias was not used: all of it stays.
    assert [left.values.tolist() for left in result.kept] == [[0.5, 1.0, 1.5], [4.0]]


class MergedDGC(DGC):
    """Momentum before a selection across the group."""

    selects_across_group = True


def test_masking_the_momentum_of_what_a_group_sent_is_refused():
    with pytest.raises(
        ValueError, match=r"MergedDGC.feedback asks for masks_momentum=True, .*set masks_momentum=False"
    ):
        GroupSelector(MergedDGC(momentum=0.9, masks_momentum=True), WAYS)
    GroupSelector(MergedDGC(momentum=0.9), WAYS)


def test_working_memory_serves_again_in_the_next_step_and_no_longer_than_it_is_needed():
    workspace = Workspace()
    like = torch.empty(0)
    addresses = [workspace.take(10, like).data_ptr() for _ in range(3)]
    assert len(set(addresses)) == 3
    workspace.release()
    assert [workspace.take(10, like).data_ptr() for _ in range(2)] == addresses[:2]
    workspace.release()
    first, second = workspace.take(10, like), workspace.take(11, like.double())
    assert first.data_ptr() == addresses[0]
    assert (second.numel(), second.dtype) == (11, torch.float64)
    assert workspace.take(10, like).numel() == 10
