"""Local steps: when and what they exchange, compared with slow references in float64."""

import time

import pytest
import torch
from torch import nn

from lightning_sparse.engine import local_steps
from lightning_sparse.engine.settings import LocalSteps
from tests.helpers.devices import DEVICE
from tests.helpers.fits import refuse
from tests.helpers.sparse_ddp import WIRES, Edges, batch, parameters_of, sparse_ddp

OUTER = LocalSteps(every=3, outer_lr=0.7, outer_momentum=0.9, nesterov=True)


def flat(tensors):
    return torch.cat([tensor.detach().double().flatten().cpu() for tensor in tensors])


def train(rank, steps, local, settings, closes=False):
    torch.manual_seed(0)
    seen = {"drift": [], "local": [], "shared": [], "residual": [], "wire_bytes": []}
    with sparse_ddp(Edges(), **{"compressor": "dense", "local_steps": local, **settings}) as (ddp, engine):
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        for step in range(steps):
            with ddp.no_sync():
                ddp.zero_grad()
                ddp(batch(rank, step)).backward()
            optimizer.step()
            seen["drift"].append(flat(ddp.parameters()))
            engine.end_step()
            if closes and step == steps - 1:
                engine.replicas.synchronize()
            seen["local"].append(flat(ddp.parameters()))
            with engine.rounds.shared_model():
                seen["shared"].append(flat(ddp.parameters()))
            residuals = engine.memory.state_dict().get("residual", {})
            seen["residual"].append(flat(residuals.get(name, torch.zeros(0)) for name in parameters_of(ddp)))
            seen["wire_bytes"].append(engine.recorder.totals.wire_bytes)
        engine.worker.drain()
        seen["stats"] = engine.compression_stats()
    return seen


class Reference:
    """DiLoCo for virtual workers on a flat vector in float64."""

    def __init__(self, ranks, local):
        self.local = local
        self.models = []
        for _ in range(ranks):
            torch.manual_seed(0)
            self.models.append(Edges().to(DEVICE))
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in self.models]
        self.shared = flat(self.models[0].parameters())
        self.momentum = torch.zeros_like(self.shared)
        self.steps = 0

    def step(self):
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers)):
            model.zero_grad()
            model(batch(rank, self.steps)).backward()
            optimizer.step()
        self.steps += 1
        if self.steps % self.local.every == 0:
            changes = [self.shared - flat(model.parameters()) for model in self.models]
            mean = sum(changes) / len(changes)
            self.momentum = self.local.outer_momentum * self.momentum + mean
            ahead = self.local.outer_momentum * self.momentum + mean if self.local.nesterov else self.momentum
            self.shared = self.shared - self.local.outer_lr * ahead
            for model in self.models:
                write(self.shared, model)
        return [flat(model.parameters()) for model in self.models]


@torch.no_grad()
def write(vector, model):
    parameters = list(model.parameters())
    for parameter, piece in zip(parameters, vector.split([parameter.numel() for parameter in parameters])):
        parameter.copy_(piece.view_as(parameter))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("local", [OUTER, LocalSteps(every=3), LocalSteps(every=3, outer_momentum=0.5)])
def test_rounds_go_as_their_formula_says(pools, ranks, local):
    reference, answers = Reference(ranks, local), pools[ranks].run(train, 9, local, {})
    for step in range(9):
        for answer, expected in zip(answers, reference.step()):
            torch.testing.assert_close(answer["local"][step], expected, rtol=0, atol=3e-5)
            torch.testing.assert_close(answer["shared"][step], reference.shared, rtol=0, atol=3e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("decay", [1.0, 0.5])
@pytest.mark.parametrize(
    "settings",
    [{"compressor": "topk", "density": 0.1}, {"wire": "4bit"}, {"wire": "2bit"}],
    ids=["sparse", "4bit", "2bit"],
)
def test_what_is_not_sent_waits_and_decays(pair, settings, decay):
    answers = pair.run(train, 6, LocalSteps(every=2, residual_decay=decay), settings)
    start = flat(Reference(1, OUTER).models[0].parameters())
    owed = [torch.zeros_like(start) for _ in answers]
    for step in (1, 3, 5):
        before = start if step == 1 else answers[0]["shared"][step - 2]
        sent = before - answers[0]["shared"][step]
        learned = [before - answer["drift"][step] for answer in answers]
        changes = [decay * each + change for each, change in zip(owed, learned)]
        kept = [answer["residual"][step] for answer in answers]
        torch.testing.assert_close(sent, sum(map(torch.sub, changes, kept)) / 2, rtol=0, atol=1e-6)
        assert all(each.any() for each in kept)
        owed = kept


@pytest.mark.sampled
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("local", [LocalSteps(every=3), OUTER])
def test_the_shared_model_is_one_to_the_bit(pools, local, wire):
    answers = pools[3].run(train, 9, local, {"compressor": "topk", "density": 0.05, "wire": wire}, True)
    for answer in answers[1:]:
        assert all(map(torch.equal, answer["shared"], answers[0]["shared"]))
        assert torch.equal(answer["local"][-1], answers[0]["local"][-1])
    assert torch.equal(answers[0]["local"][-1], answers[0]["shared"][-1])
    assert not torch.equal(answers[0]["local"][0], answers[1]["local"][0])


def test_bytes_travel_in_rounds_only(pair):
    answer = pair.run(train, 7, LocalSteps(every=3), {})[0]
    counts = answer["wire_bytes"]
    assert counts[0] == counts[1] == 0 < counts[2] == counts[4] < counts[5] == counts[6] == 2 * counts[2]
    assert answer["stats"]["local_steps"] == 3
    assert answer["stats"]["dense_bytes"] == 4 * len(answer["local"][0])  # per step, as all statistics of rounds


class Written(Edges):
    def __init__(self):
        super().__init__()
        self.bars = nn.Parameter(torch.tensor([0.0, -torch.inf]))
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        self.register_buffer("lowest", torch.tensor(torch.inf))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("grown", torch.zeros(2))
        self.register_buffer("late", None)
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("trained", self.matrix.detach())  # the same memory
        for name in ("teacher", "seldom", "scheduled", "backbone"):
            self.register_parameter(name, nn.Parameter(torch.full((2, 3), 0.1), requires_grad=False))


def train_with_slow_changes(rank):
    change = local_steps._change

    def slow(*tensors):
        time.sleep(0.01)
        return change(*tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_steps, "_change", slow)
        return train(rank, 3, OUTER, {})["stats"]


def test_the_time_to_compute_changes_is_exposed(pair):
    for stats in pair.run(train_with_slow_changes):
        assert stats["exposed_seconds"] * OUTER.every >= 0.01 * len(list(Edges().parameters()))


@torch.no_grad()
def write_a_step(model, rank, step, is_assigned):
    for parameter in model.parameters():
        if parameter.requires_grad:
            changed = parameter - 0.01 * (rank + 1) * (step + 1)
            if is_assigned:
                parameter.data = changed
            else:
                parameter.copy_(changed)
    if step == 0:
        model.lowest.fill_(rank + 1.0)
    mean = model.mean + (rank + 1)
    if is_assigned:
        model.mean = mean
    else:
        model.mean.copy_(mean)
    model.teacher.data.add_(rank + 1)  # no version counts this change
    model.scheduled.fill_(step)
    model.counts[rank] += 1
    model.seen.fill_(rank == 0)
    model.phase.add_((rank + 1) * 1j)
    if step == 4 and rank == 0:
        model.seldom.data.fill_(1.0)
    if step == 5:
        model.grown = torch.full((5,), float(rank), device=DEVICE)
        model.late = torch.full((2,), float(rank), device=DEVICE)


def write_everything(rank, local, is_assigned):
    torch.manual_seed(0)
    shared = []
    with sparse_ddp(Written(), "dense", local_steps=local) as (ddp, engine):
        for step in range(8):
            write_a_step(ddp.module, rank, step, is_assigned)
            engine.end_step()
            with engine.rounds.shared_model():
                shared.append({name: each.clone() for name, each in ddp.module.state_dict().items()})
        engine.replicas.synchronize()
        shared.append({name: each.clone() for name, each in ddp.module.state_dict().items()})
        return shared


@pytest.mark.parametrize("is_assigned", [False, True], ids=["in place", "assigned"])
def test_whatever_training_writes_is_one_model(pair, is_assigned):
    first, second = pair.run(write_everything, LocalSteps(every=3), is_assigned)
    torch.manual_seed(0)
    start = Written().state_dict()
    for step, (one, two) in enumerate(zip(first, second)):
        own = ("teacher", "seldom", "lowest", "mean", "grown", "late", "counts", "seen", "phase")
        not_yet = dict.fromkeys(own, 8)
        assert all(torch.equal(one[name], two[name]) for name in one if step >= not_yet.get(name, 0)), step
        assert torch.equal(one["mask"].cpu(), start["mask"])
    end = {name: each.cpu() for name, each in first[-1].items()}
    torch.testing.assert_close(end["matrix"], start["matrix"] - 0.01 * 1.5 * 36, rtol=0, atol=1e-5)
    assert torch.equal(end["bars"][1], start["bars"][1])
    assert float(end["lowest"]) == 1.5
    torch.testing.assert_close(end["mean"], torch.full((3,), 12.0))
    torch.testing.assert_close(end["teacher"], torch.full((2, 3), 12.1))
    torch.testing.assert_close(end["seldom"], torch.full((2, 3), 0.55))
    assert torch.equal(end["scheduled"], torch.full((2, 3), 7.0))
    assert torch.equal(end["backbone"], start["backbone"])
    assert torch.equal(end["grown"], torch.full((5,), 0.5))
    assert torch.equal(end["late"], torch.full((2,), 0.5))
    assert end["counts"].tolist() == [8, 0, 0]  # rank 0's, as behind DDP
    assert end["seen"]
    torch.testing.assert_close(end["phase"], torch.full((2,), 12j))
    if DEVICE.type == "cpu" and not is_assigned:  # assignment gives trained tensors new memory
        assert torch.equal(end["trained"], end["matrix"])


def broken(rank):
    torch.manual_seed(0)
    with sparse_ddp(Edges(), "topk", 0.1, local_steps=LocalSteps(every=1, residual_decay=0.9)) as (ddp, engine):
        for step in range(3):
            before = [each.clone() for each in engine.memory.state_dict().get("residual", {}).values()]
            with torch.no_grad():
                for parameter in ddp.parameters():
                    parameter.add_(torch.randn_like(parameter))
                if rank == 1 and step == 2:
                    next(iter(ddp.parameters())).fill_(torch.nan)
            engine.end_step()
        return before, [each.clone() for each in engine.memory.state_dict()["residual"].values()]


def test_a_change_that_is_not_finite_leaves_what_waits_alone(pair):
    for before, after in pair.run(broken):
        assert before
        assert all(map(torch.equal, before, after))


def step_apart(rank, where):
    """Make more steps on one rank than on the other, which has ended or is in a later round."""
    with sparse_ddp(Edges(), "dense", local_steps=LocalSteps(2)) as (_, engine):
        engine.rounds.begin_round()
        for _ in range(2 + (rank if where == "the end" else 2 * rank)):
            engine.end_step()
        if where == "the end" or rank == 0:
            engine.replicas.synchronize()


@pytest.mark.parametrize("where", ["the end", "another round"])
def test_ranks_with_different_numbers_of_steps_are_refused(pair, where):
    for told in pair.run(refuse, step_apart, where):
        assert "rank 0 has made 2 optimizer steps and has reached a validation or the end, but rank 1" in told
        assert f"rank 1 has made {3 if where == 'the end' else 4}" in told


def test_nodes_of_several_ranks_go_the_same_way(pools):
    one_level, two_levels = (pools[4].run(train, 8, OUTER, {"local_world_size": ranks}, True) for ranks in (1, 2))
    for one, two in zip(one_level, two_levels):
        for ours, theirs in zip(two["shared"], one["shared"]):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
        assert torch.equal(two["shared"][-1], two_levels[0]["shared"][-1])
