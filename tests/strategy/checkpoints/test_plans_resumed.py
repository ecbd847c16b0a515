"""What was measured is not measured again: a resumed run follows the plan, and the choice, of the run before."""

import shutil
from functools import partial

import pytest
import torch
from pytorch_lightning import Callback

from lightning_sparse import SparseDDPStrategy
from tests.helpers.fits import fits, refusals
from tests.helpers.pricing import SETTLED, Priced, much, nothing
from tests.helpers.resuming import Numbered
from tests.helpers.trainers import make_trainer

TOPK = {"compressor": "topk", "density": 0.05, "schedule": "merged"}
PLANNED = {"max_epochs": -1, "max_steps": 100}  # after which there is a plan
LONGER = {"max_epochs": -1, "max_steps": 108}


class Steady(Numbered):
    """Batches that follow from the number of the step alone; notes of what is followed after every step."""

    def __init__(self, path="", freezes=False):
        super().__init__(None, path, learning_rate_factor=1.0)
        self.network[0].requires_grad_(not freezes)
        self.notes = []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        plan = self.trainer.strategy.exchange_plan()
        self.notes.append(None if plan is None else plan.groups)

    def on_fit_end(self):
        if self.path:
            self.trainer.save_checkpoint(self.path)


@pytest.fixture(scope="module")
def planned(pools, tmp_path_factory):
    path = tmp_path_factory.mktemp("planned") / "planned.ckpt"
    return path, fits(pools[2], partial(Steady, str(path)), TOPK, **PLANNED)[0]


def test_a_resumed_run_follows_the_plan_as_soon_as_gradients_come_in_its_order(pair, planned):
    path, before = planned
    assert before.notes[10] is None
    assert before.notes[-1] is not None
    answers = fits(pair, Steady, TOPK, str(path), **LONGER)
    assert [each.notes[4:] for each in answers] == [[before.notes[-1]] * 4] * 2
    assert not any("plan" in line for line in answers[0].said if "ckpt" in line)


@pytest.mark.parametrize(
    ("ranks", "schedule", "freezes"),
    [(2, "auto", False), (2, "single", False), (2, "merged", True), (3, "merged", False)],
)
def test_a_plan_for_something_else_is_left_aside_with_a_word(pools, planned, ranks, schedule, freezes):
    module, settings = partial(Steady, freezes=freezes), {**TOPK, "schedule": schedule}
    answers = fits(pools[ranks], module, settings, str(planned[0]), **LONGER)
    assert [each.notes for each in answers] == [[None] * 8] * ranks
    assert any("not used" in line and "its plan" in line for line in answers[0].said)


def test_a_damaged_plan_is_refused_with_a_cure(pair, planned, tmp_path):
    shutil.copytree(planned[0].parent, tmp_path / "copy")
    for part in tmp_path.rglob("rank_*.pt"):
        shard = torch.load(part, weights_only=True)
        shard["models"]["model"]["everywhere"]["plan"]["groups"] = 3
        torch.save(shard, part)
    for message in refusals(pair, Steady, TOPK, str(tmp_path / "copy" / planned[0].name), **LONGER):
        assert message.startswith("CheckpointError")
        assert "resume_compression=False" in message


def fit_priced(rank, path, costs, steps, source):
    """Fit with ``sparse_auto`` and save before the end; return which steps were left to DDP."""
    model = Priced(*costs)
    saving = Saving(path, steps)
    strategy = SparseDDPStrategy("lags", 0.05, schedule="auto")
    trainer = make_trainer(rank, strategy, max_epochs=-1, max_steps=steps, limit_val_batches=0, callbacks=[saving])
    model.fit(trainer, ckpt_path=source)
    return model.were_plain


class Saving(Callback):
    """Save after the last step, while the strategy still knows what it has chosen."""

    def __init__(self, path, steps):
        self.path = path
        self.steps = steps

    def on_train_batch_end(self, trainer, *batch):
        if trainer.global_step == self.steps:
            trainer.save_checkpoint(self.path)


def choose_twice(rank, path, costs):
    before = fit_priced(rank, path, costs, SETTLED, None)
    return before, fit_priced(rank, f"{path}2", costs, SETTLED + 16, path)


@pytest.mark.exhaustive
@pytest.mark.clock
@pytest.mark.parametrize(("costs", "is_dense"), [((nothing, much), True), ((much, nothing), False)])
def test_a_choice_is_not_made_again(pair, tmp_path, costs, is_dense):
    for before, after in pair.run(choose_twice, str(tmp_path / "chosen.ckpt"), costs):
        assert before[-60:] == [is_dense] * 60
        assert after == [is_dense] * 16
