"""Islands: ranks of a node train in step, and rounds of local steps go between nodes; four ranks play two of two."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_sparse import LocalSteps
from lightning_sparse.testing.tensors import assert_same
from tests.helpers.fits import are_alike, assert_goes_on, fits, refusals
from tests.helpers.resuming import Numbered
from tests.helpers.rounds import ROUNDS, Local, Overflowing, Steady, Worker, average, scaling
from tests.helpers.trainers import Rows, weights

NODES = {"node_ranks": 2}
ISLANDS = {kind: {**settings, "levels": 2} for kind, settings in ROUNDS.items()}


@pytest.fixture
def nodes(pools):
    return pools[4]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ISLANDS)
def test_ranks_of_a_node_are_one_after_each_step_and_all_are_after_a_round(nodes, kind):
    answers = fits(nodes, Local, ISLANDS[kind], val_check_interval=5, limit_val_batches=1, **NODES)
    assert all(are_alike(answers[0], answers[1]) + are_alike(answers[2], answers[3]))
    before, overlap = (getattr(ROUNDS[kind]["local_steps"], name) for name in ("synchronous_steps", "overlap_steps"))
    between = are_alike(answers[0], answers[2])
    if overlap:  # what is applied late leaves the steps since then
        assert sum(between) == before
    else:
        assert between == [step in (4, 9) for step in range(1, 13)]  # validations end rounds after 5 and 11
    for answer in answers[1:]:
        assert_same(
            {name: answer.end[name] for name in answer.start}, {name: answers[0].end[name] for name in answer.start}
        )
    assert any("train in step, and rounds of local steps go between nodes" in line for line in answers[0].said)


@pytest.mark.parametrize("local", [LocalSteps(3), LocalSteps(3, 0.7, 0.9, nesterov=True)], ids=["averages", "outer"])
def test_all_that_is_sent_is_the_reference(nodes, local):
    answers = fits(nodes, Numbered, {"compressor": "dense", "local_steps": local, "levels": 2}, **NODES)
    workers = [Worker(rank) for rank in range(4)]
    shared = [each.detach().double() for each in workers[0].parameters()]
    momenta = [torch.zeros_like(each) for each in shared]
    for seen in range(11):  # the last round is closed after the last batch's note
        for worker in workers:
            worker.backward_on(seen)
        for island in (workers[:2], workers[2:]):
            average([[each.grad for each in worker.parameters()] for worker in island])
        for worker in workers:
            worker.optimizer.step()
            worker.schedule["scheduler"].step()
        if (seen + 1) % local.every == 0:
            for place, everybody in enumerate(zip(*(worker.parameters() for worker in workers))):
                change = shared[place] - sum(each.detach().double() for each in everybody) / 4
                momenta[place] = local.outer_momentum * momenta[place] + change
                ahead = local.outer_momentum * momenta[place] + change if local.nesterov else momenta[place]
                shared[place] = shared[place] - local.outer_lr * ahead
                for each in everybody:
                    each.data.copy_(shared[place])
        for worker, answer in zip(workers, answers):
            torch.testing.assert_close(answer.batches[seen], weights(worker), rtol=0, atol=1e-5)


class Learning(Steady):
    """It learns from batches of other sizes on the first rank."""

    def train_dataloader(self):
        size = 2 if self.global_rank else 6
        return DataLoader(Rows(4 * size), batch_size=size)


@pytest.mark.parametrize(
    "settings",
    [
        {"compressor": "dense"},
        {"density": 0.1},
        {"density": 0.1, "wire": "2bit"},
        {"compressor": "dense", "wire": "4bit"},
    ],
    ids=["all", "a part", "2 bits", "4 bits"],
)
def test_what_islands_have_learned_arrives_or_waits(nodes, settings):
    answers = fits(nodes, Learning, {**settings, "local_steps": 2, "levels": 2}, use_distributed_sampler=False, **NODES)
    learned = 0.01 * 8 * (8 * 1.5 + 4 * 3.5) / 12  # eight steps, of 8 and of 4 samples
    kept = [answer.kept["memory"].get("residual", {}) for answer in answers]
    for name, start in answers[0].start.items():
        shares = [each[name].double().cpu() for each in kept if name in each]
        waits = sum(torch.cat(each)[: start.numel()] for each in (shares[:2], shares[2:])) / 2 if shares else 0.0
        moved = (start - answers[0].end[name]).double().cpu().flatten()
        torch.testing.assert_close(moved + waits, torch.full_like(moved, learned), rtol=0, atol=1e-5)
        assert answers[0].batches[-1][name].isfinite().all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "module", "save_after"),
    [*((kind, Local, 6) for kind in ISLANDS), ("diloco", Local, 3), ("sparse", Local, 9), ("late", Local, 5)],
)
def test_it_goes_on_to_the_bit(nodes, tmp_path, kind, module, save_after):
    assert_goes_on(nodes, tmp_path, ISLANDS[kind], module, save_after, limit_val_batches=1, **NODES)


class Noting(Numbered):
    """A model that notes what it starts with, and what it has when it saves."""

    def note(self):
        state = self.trainer.strategy.engine.state_dict()["rounds"]
        return weights(self), {name: each.clone() for name, each in state["momentum"].items()}

    def on_train_start(self):
        self.notes = [self.note()]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.notes.append(self.note())


def whole(answers, is_shared, place):
    """Return weights and outer momentum that each rank had noted, the momentum put together in each node."""
    notes = [answer.notes[place] for answer in answers]
    if not is_shared:
        return notes
    pairs = [notes[rank - rank % 2 : rank - rank % 2 + 2] for rank in range(len(notes))]
    return [
        (own[0], {name: torch.cat([each[1][name] for each in pair])[: own[0][name].numel()] for name in own[1]})
        for own, pair in zip(notes, pairs)
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("diloco", (4, 2), (2, None)),
        ("sparse", (4, 2), (2, None)),
        ("diloco", (4, 2), (4, "auto")),
        ("sparse", (4, "auto"), (4, 2)),
        ("diloco", (3, None), (4, 2)),
        ("sparse", (3, None), (4, 2)),
    ],
    ids=str,
)
def test_on_others_the_mean_of_what_waits_stays(pools, tmp_path, kind, before, after):
    path = str(tmp_path / "middle.ckpt")

    def fitted(who, module, source=None):
        ranks, levels = who
        more = {} if levels is None else {"levels": levels}
        how = NODES if levels is not None else {}
        return fits(pools[ranks], module, {**ROUNDS[kind], **more}, source, **how)

    saved = whole(fitted(before, partial(Noting, 6, path)), before[1] == 2, place=6)
    answers = fitted(after, Noting, path)
    for taken_up in whole(answers, after[1] == 2, place=0):
        for part in (0, 1):
            assert taken_up[part].keys() == saved[0][part].keys()
            for name, tensor in taken_up[part].items():
                mean = sum(each[part][name].double() for each in saved) / len(saved)
                torch.testing.assert_close(tensor.double(), mean, rtol=0, atol=1e-6)
    if after[1] == 2:
        assert all(are_alike(answers[0], answers[1]) + are_alike(answers[2], answers[3]))


def test_ranks_of_a_node_skip_the_same_steps(nodes):
    answers = fits(nodes, Overflowing, ISLANDS["diloco"], plugins=scaling(), **NODES)
    assert [answer.notes for answer in answers] == [answers[0].notes] * 2 + [answers[2].notes] * 2
    assert answers[0].notes < answers[2].notes
    assert all(are_alike(answers[0], answers[1]) + are_alike(answers[2], answers[3]))
    assert all(tensor.isfinite().all() for answer in answers for tensor in answer.end.values())


class Broken(Numbered):
    """A model whose loss is no number on the last rank, in one step of the second round."""

    def training_step(self, batch, batch_index):
        loss = super().training_step(batch, batch_index)
        return loss * (float("nan") if self.global_rank == 3 and self.current_epoch == 1 and batch_index == 0 else 1)


def test_what_is_not_finite_is_told_and_not_kept(nodes):
    for answer in fits(nodes, Broken, {"density": 0.1, "local_steps": 4, "levels": 2}, **NODES):
        assert not all(tensor.isfinite().all() for tensor in answer.end.values())
        kept = answer.kept["memory"]["residual"]
        assert all(tensor.isfinite().all() for tensor in kept.values())
        assert any(tensor.any() for tensor in kept.values())


def test_bytes_between_nodes_and_what_is_kept_fall_by_the_ranks_of_a_node(nodes):
    outer = {"density": 0.1, "local_steps": LocalSteps(4, outer_momentum=0.5)}
    islands, alone = (fits(nodes, Numbered, {**outer, "levels": levels}, **NODES)[0] for levels in (2, 1))
    assert islands.total["total_link_bytes"] <= 1.1 / 2 * alone.total["total_wire_bytes"]

    def kept(answer):
        parts = answer.kept["memory"]["residual"], answer.kept["momentum"]
        return [sum(each.nbytes for each in part.values()) for part in parts]

    assert [2 * each for each in kept(islands)] == kept(alone)


class Given(Numbered):
    def __init__(self, *batches):
        super().__init__()
        self.own = batches

    def train_dataloader(self):
        return DataLoader(Rows(4 * self.own[self.global_rank]), batch_size=4)


UNEVEN: dict[str, Any] = {"use_distributed_sampler": False, "limit_train_batches": 1.0, **NODES}


@pytest.mark.parametrize("batches", [(9, 9, 4, 4), (3, 3, 8, 8)])
def test_nodes_may_have_different_numbers_of_batches(nodes, batches):
    answers = fits(nodes, partial(Given, *batches), ISLANDS["diloco"], val_check_interval=1.0, **UNEVEN)
    for answer, count in zip(answers, batches):
        assert len(answer.batches) == 2 * count
        assert_same(answer.end, answers[0].end)
    assert all(are_alike(answers[0], answers[1]) + are_alike(answers[2], answers[3]))


def test_ranks_of_a_node_may_not(nodes):
    for answer in refusals(nodes, partial(Given, 9, 8, 4, 4), ISLANDS["diloco"], **UNEVEN):
        assert "2 ranks train in step, those of a node with levels=2" in answer
