from functools import partial

import pytest
import torch
from pytorch_lightning import Callback
from torch import nn
from torch.nn.utils import prune

from lightning_sparse.testing.tensors import assert_same
from tests.helpers.fits import assert_goes_on, fits
from tests.helpers.random_trainings import AverageAtValidation, write
from tests.helpers.resuming import ROUNDS, Local, Numbered, Overflowing, scaling
from tests.helpers.trainers import Small, weights


class Teaching(Local):
    def __init__(self, save_after=None, path=""):
        super().__init__(save_after, path)
        self.teacher = nn.Linear(32, 64)
        self.teacher.requires_grad_(False)

    def on_before_zero_grad(self, *args):
        for followed, teacher in zip(self.network[0].parameters(), self.teacher.parameters()):
            teacher.data = 0.5 * (teacher.data + followed.data)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("kind", "module", "save_after"),
    [
        *((kind, Local, after) for kind in ROUNDS for after in (2, 4, 5, 8)),
        *((kind, Teaching, after) for kind, after in zip(ROUNDS, (2, 5, 3))),
    ],
)
def test_a_round_goes_on_to_the_bit(pair, tmp_path, kind, module, save_after):
    assert_goes_on(pair, tmp_path, ROUNDS[kind], module, save_after, limit_val_batches=1)


class Starting(Teaching):
    def on_train_start(self):
        self.notes = weights(self)


def test_other_numbers_of_ranks_take_up_the_mean(pools, tmp_path):
    path = str(tmp_path / "middle.ckpt")
    saved = fits(pools[3], partial(Starting, 2, path), ROUNDS["diloco"], max_epochs=1)
    for taken_up in fits(pools[2], Starting, ROUNDS["diloco"], path):
        for name, tensor in taken_up.notes.items():
            mean = sum(each.batches[1][name].double() for each in saved) / 3
            torch.testing.assert_close(tensor.double(), mean, rtol=0, atol=1e-6)


class Validated(Local):
    def __init__(self):
        super().__init__()
        self.notes = []

    def validation_step(self, batch, batch_index):
        self.notes.append({name: each.detach().clone() for name, each in self.state_dict().items()})


class Loads(Callback):
    def __init__(self, hook):
        setattr(self, hook, self._load)

    def _load(self, trainer, pl_module, *args):
        if trainer.global_step == 0:
            scale_weights(pl_module, 1.0 + trainer.global_rank / 2)


@torch.no_grad()
def scale_weights(module, factor):
    for parameter in module.parameters():
        parameter.mul_(64).round_().mul_(factor / 16)


class Scaled(Validated):
    def __init__(self):
        super().__init__()
        scale_weights(self, 1.25)  # the mean over ranks


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", list(ROUNDS))
def test_training_starts_from_what_callbacks_load(pair, kind):
    checks = {"num_sanity_val_steps": 1, "limit_val_batches": 1}
    expected = fits(pair, Scaled, ROUNDS[kind], **checks)
    for hook in ("on_fit_start", "on_train_start", "on_train_epoch_start"):
        for loaded, known in zip(fits(pair, Validated, ROUNDS[kind], callbacks=[Loads(hook)], **checks), expected):
            assert_same(loaded.batches, known.batches)
            assert_same(loaded.notes[1:], known.notes[1:])  # the first note is of the sanity check, on each rank


class Unseen(Small):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_index):
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward((self.network(batch) - batch).square().mean())
        optimizer.step()


def test_a_step_past_lightning_trains_one_model(pair):
    first, second = fits(pair, Unseen, ROUNDS["sparse"], limit_train_batches=8, max_epochs=1)
    assert_same(first.end, second.end)
    assert all(not torch.equal(first.end[name], first.start[name]) for name in first.start)
    assert first.total["total_wire_bytes"] > 0


class OverflowingFirst(Overflowing):
    overflows_in = range(4)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.mark.parametrize("module", [Overflowing, OverflowingFirst])
def test_ranks_may_skip_different_steps(pair, tmp_path, module):
    path = str(tmp_path / "middle.ckpt")
    first, second = fits(pair, partial(module, 6, path), ROUNDS["diloco"], plugins=scaling())
    assert_same(first.end, second.end)
    assert all(tensor.isfinite().all() for tensor in first.end.values())
    assert first.notes > second.notes
    for resumed, expected in zip(fits(pair, module, ROUNDS["diloco"], path, plugins=scaling()), (first, second)):
        assert resumed.notes == expected.notes
        assert_same(resumed.batches, expected.batches[6:])


class Averages(AverageAtValidation):
    def on_train_end(self, trainer, pl_module):
        write(pl_module, self.average)
        pl_module.notes = weights(pl_module)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "batches"), [*((kind, 5) for kind in ROUNDS), ("sparse", 4)])
def test_weights_that_callbacks_average_are_there_at_the_end(pair, kind, batches):
    more = {"callbacks": [Averages()], "limit_train_batches": batches, "limit_val_batches": 2}
    one, other = fits(pair, Local, ROUNDS[kind], **more)
    own = ("num_batches_tracked",)
    assert not [name for name in one.end if not name.endswith(own) and not torch.equal(one.end[name], other.end[name])]
    for name in one.notes:
        torch.testing.assert_close(one.end[name], (one.notes[name] + other.notes[name]) / 2, rtol=1e-5, atol=1e-6)


class Renaming(Numbered):
    def __init__(self, thaws):
        super().__init__()
        self.network[2].requires_grad_(not thaws)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            prune.identity(self.network[0], "weight")
            self.network[2].requires_grad_(True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("thaws", [True, False])
@pytest.mark.parametrize("kind", ["diloco", "sparse"])
def test_a_parameter_that_gets_another_name_in_a_round_is_exchanged(pair, kind, thaws):
    answers = fits(pair, partial(Renaming, thaws), ROUNDS[kind])
    assert_same(answers[0].end, answers[1].end)
    name = "network.0.weight_orig"
    assert not torch.equal(answers[0].end[name], answers[0].batches[6][name])
