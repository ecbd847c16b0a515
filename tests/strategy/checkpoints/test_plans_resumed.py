"""What was measured is not measured again: a resumed run follows the plan, and the choice, of the run before."""

from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from pytorch_lightning import Callback

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.strategy.checkpoints import CheckpointError
from lightning_sparse.testing.pool import Pool
from tests.helpers.pricing import SETTLED, Priced, much, nothing
from tests.helpers.resuming import Numbered, fit_numbered, heard
from tests.helpers.trainers import make_trainer, weights

_PLANNED = 100  # steps after which there is a plan


class Plans(Callback):
    """Write down what is followed after every step."""

    def __init__(self) -> None:
        self.groups: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *batch: Any) -> None:
        plan = trainer.strategy.exchange_plan()
        self.groups.append(None if plan is None else plan.groups)


class Steady(Numbered):
    """Batches that follow from the number of the step alone."""

    def __init__(self) -> None:
        super().__init__(learning_rate_factor=1.0)


def fit_on(
    rank: int, path: str, steps: int, schedule: str, freezes: bool = False, is_resumed: bool = True
) -> tuple[list[Any], list[str], Any]:
    """Fit until so many steps have been made, and save; return what was followed, what was said, and the weights."""
    plans, model = Plans(), Steady()
    model.network[0].requires_grad_(not freezes)
    strategy = SparseDDPStrategy("topk", 0.05, schedule=schedule)
    limits = {"max_epochs": -1, "max_steps": steps, "limit_val_batches": 0}
    with heard() as lines:
        source = path if is_resumed else None
        trainer = fit_numbered(rank, strategy, model, ckpt_path=source, callbacks=[plans], **limits)
    trainer.save_checkpoint(path)
    return plans.groups, lines, weights(model)


def fit_twice(rank: int, path: str, schedule: str, freezes: bool) -> Any:
    """Fit until there is a plan, and go on."""
    before, _, _ = fit_on(rank, path, _PLANNED, "merged", is_resumed=False)
    after, lines, _ = fit_on(rank, path, _PLANNED + 8, schedule, freezes)
    return before, after, lines


def test_a_resumed_run_follows_the_plan_as_soon_as_gradients_come_in_its_order(pair: Pool, tmp_path: Path) -> None:
    for before, after, lines in pair.run(fit_twice, str(tmp_path / "planned.ckpt"), "merged", False):
        assert before[40] is None
        assert before[-1] is not None
        assert after[4:] == [before[-1]] * 4
        assert not any("plan" in line for line in lines)


@pytest.mark.parametrize(("schedule", "freezes"), [("auto", False), ("single", False), ("merged", True)])
def test_a_plan_for_something_else_is_left_aside_with_a_word(
    pair: Pool, tmp_path: Path, schedule: str, freezes: bool
) -> None:
    (_, after, lines), (_, other, _) = pair.run(fit_twice, str(tmp_path / "planned.ckpt"), schedule, freezes)
    assert after == other == [None] * 8
    assert any("not used" in line and "its plan, which is for another number of ranks" in line for line in lines)


def test_another_number_of_ranks_plans_anew(pools: dict[int, Pool], tmp_path: Path) -> None:
    path = str(tmp_path / "planned.ckpt")
    pools[2].run(fit_on, path, _PLANNED, "merged", False, False)
    answers = pools[3].run(fit_on, path, _PLANNED + 8, "merged")
    assert [groups for groups, _, _ in answers] == [[None] * 8] * 3
    assert any("its plan" in line for line in answers[0][1])


def fit_priced(rank: int, path: str, costs: Any, steps: int, source: Optional[str]) -> list[bool]:
    """Fit with ``sparse_auto`` and save before the end; return which steps were left to DDP."""
    model = Priced(*costs)
    saving = Saving(path, steps)
    strategy = SparseDDPStrategy("lags", 0.05, schedule="auto")
    trainer = make_trainer(rank, strategy, max_epochs=-1, max_steps=steps, limit_val_batches=0, callbacks=[saving])
    model.fit(trainer, ckpt_path=source)
    return model.were_plain


class Saving(Callback):
    """Save after the last step, while the strategy still knows what it has chosen."""

    def __init__(self, path: str, steps: int) -> None:
        self.path = path
        self.steps = steps

    def on_train_batch_end(self, trainer: Any, *batch: Any) -> None:
        if trainer.global_step == self.steps:
            trainer.save_checkpoint(self.path)


def choose_twice(rank: int, path: str, costs: Any) -> tuple[list[bool], list[bool]]:
    """Fit until a choice has been made, and go on."""
    before = fit_priced(rank, path, costs, SETTLED, None)
    return before, fit_priced(rank, f"{path}2", costs, SETTLED + 16, path)


@pytest.mark.clock
@pytest.mark.parametrize(("costs", "is_plain"), [((nothing, much), True), ((much, nothing), False)])
def test_a_choice_is_not_made_again(pair: Pool, tmp_path: Path, costs: Any, is_plain: bool) -> None:
    for before, after in pair.run(choose_twice, str(tmp_path / "chosen.ckpt"), costs):
        assert before[-60:] == [is_plain] * 60
        assert after == [is_plain] * 16


def damage(rank: int, path: str) -> str:
    """Go on from a part whose plan is none."""
    for part in Path(path).parent.rglob(f"rank_{rank:05d}.*.pt"):
        shard = torch.load(part, weights_only=True)
        shard["engine"]["plan"]["groups"] = 3
        torch.save(shard, part)
    torch.distributed.barrier()
    with pytest.raises(CheckpointError) as raised:
        fit_on(rank, path, _PLANNED + 8, "merged")
    return str(raised.value)


def test_a_damaged_plan_is_refused_with_a_cure(pair: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "planned.ckpt")
    pair.run(fit_on, path, _PLANNED, "merged", False, False)
    for message in pair.run(damage, path):
        assert "resume_compression=False" in message
