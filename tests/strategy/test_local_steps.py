import copy
from functools import partial
from itertools import pairwise

import pytest
import torch
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import ModelPruning, StochasticWeightAveraging
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_sparse import LocalSteps, SparseDDPStrategy
from lightning_sparse.callbacks import ReplicaSentinel
from lightning_sparse.compressors import DGC, LAGS, SDAGC
from lightning_sparse.testing.tensors import assert_same, differences
from tests.helpers.fits import assert_goes_on, fits, refusals
from tests.helpers.random_trainings import AverageAtValidation, write
from tests.helpers.resuming import Numbered
from tests.helpers.rounds import ROUNDS, Local, Overflowing, scaling
from tests.helpers.trainers import Small, weights


class Narrow(Local):
    def __init__(self, save_after=None, path=""):
        super().__init__(save_after, path)
        self.network = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).bfloat16()

    @property
    def dtype(self):
        return torch.bfloat16


class Teaching(Local):
    def __init__(self, save_after=None, path=""):
        super().__init__(save_after, path)
        self.teacher = nn.Linear(32, 64)
        self.teacher.requires_grad_(False)

    def on_before_zero_grad(self, *args):
        for followed, teacher in zip(self.network[0].parameters(), self.teacher.parameters()):
            teacher.data = 0.5 * (teacher.data + followed.data)


class Observing(Local):
    def __init__(self, save_after=None, path=""):
        super().__init__(save_after, path)
        self.register_buffer("largest", torch.zeros(0))

    def rows(self, batch_index):
        rows = super().rows(batch_index)
        seen = rows.abs().amax(dim=0)
        self.largest = seen if not self.largest.numel() else 0.9 * self.largest + 0.1 * seen
        return rows - 0.01 * self.largest

    def on_load_checkpoint(self, checkpoint):
        self.largest = torch.zeros(32)


def test_a_buffer_that_took_its_shape_in_training_goes_on_to_the_bit(pair, tmp_path):
    assert_goes_on(pair, tmp_path, ROUNDS["diloco"], Observing, 3)


class LateAverage(Local):
    def on_train_batch_start(self, *batch):
        if self.current_epoch == 1 and not hasattr(self, "average"):
            self.average = copy.deepcopy(self.network)

    def on_train_batch_end(self, *batch):
        super().on_train_batch_end(*batch)
        if hasattr(self, "average"):
            with torch.no_grad():
                for mine, trained in zip(self.average.parameters(), self.network.parameters()):
                    mine.lerp_(trained, 0.5)


def test_an_average_that_begins_late_is_no_part_of_rounds(pair):
    averaged, plain = (fits(pair, module, ROUNDS["diloco"]) for module in (LateAverage, Local))
    for one, other in zip(averaged, plain):
        assert {name: each for name, each in one.end.items() if "average" not in name}.keys() == other.end.keys()
        for name, each in other.end.items():
            assert torch.equal(one.end[name], each), name
    assert any("average" in name for name in averaged[0].end)


class TeachingOnOne(Teaching):
    def on_before_zero_grad(self, *args):
        if self.global_rank == 0:
            super().on_before_zero_grad(*args)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("kind", "module", "save_after"),
    [
        *((kind, Local, after) for kind in ROUNDS for after in (2, 4, 5, 8)),
        *((kind, Narrow, 3) for kind in ROUNDS),
        *((kind, Teaching, after) for kind, after in zip(ROUNDS, (2, 5, 3))),
        *((kind, TeachingOnOne, 2) for kind in ("diloco", "sparse")),
    ],
)
def test_a_round_goes_on_to_the_bit(pair, tmp_path, kind, module, save_after):
    assert_goes_on(pair, tmp_path, ROUNDS[kind], module, save_after, limit_val_batches=1)


class SavedLast(Numbered):
    def on_train_epoch_end(self):
        if self.path:
            self.trainer.save_checkpoint(self.path)


def test_a_resume_with_nothing_left_to_train_ends_with_the_shared_model(pair, tmp_path):
    path, settings = str(tmp_path / "end.ckpt"), {"compressor": "topk", "density": 0.1, "local_steps": 4}
    first, *_ = fits(pair, partial(SavedLast, None, path), settings, max_epochs=1)
    for resumed in fits(pair, SavedLast, settings, path, max_epochs=1):
        assert_same(resumed.end, first.end)


class Starting(Local):
    def on_train_start(self):
        self.notes = weights(self)


class StartingTeaching(Teaching, Starting):
    """The same with a teacher."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "module", "save_after"),
    [("diloco", Starting, 6), ("diloco", StartingTeaching, 2)],
)
def test_other_numbers_of_ranks_take_up_the_mean(pools, tmp_path, kind, module, save_after):
    path = str(tmp_path / "middle.ckpt")
    saved = fits(pools[3], partial(module, save_after, path), ROUNDS[kind], max_epochs=1)
    for taken_up in fits(pools[2], module, ROUNDS[kind], path):
        for name, tensor in taken_up.notes.items():
            mean = sum(each.batches[save_after - 1][name].double() for each in saved) / 3
            torch.testing.assert_close(tensor.double(), mean, rtol=0, atol=1e-6)


def test_rounds_and_gradients_keep_different_things(pair, tmp_path):
    path, gradients = str(tmp_path / "middle.ckpt"), {"density": 0.1}
    rounds = {**gradients, "local_steps": 4}
    for before, after, told in (
        (rounds, gradients, "the changes of the last round"),
        (gradients, rounds, "this training stores other tensors"),
    ):
        fits(pair, partial(Local, 6, path), before, max_epochs=1)
        first, other = fits(pair, Local, after, path)
        assert any(told in line for line in first.said)
        assert len(first.batches) == len(other.batches) == 6


class Validated(Local):
    def __init__(self):
        super().__init__()
        self.notes = []

    def validation_step(self, batch, batch_index):
        self.notes.append({name: each.detach().clone() for name, each in self.state_dict().items()})


class Swaps(AverageAtValidation):
    def on_train_end(self, trainer, pl_module):
        pl_module.notes = self.failures


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [*ROUNDS, "a2sgd"])
def test_a_validation_ends_a_round_whatever_is_validated(pair, kind):
    settings, often = ROUNDS.get(kind, {"compressor": kind}), {"val_check_interval": 3, "limit_val_batches": 1}
    validated = fits(pair, Validated, settings, **often)
    swapped = fits(pair, Local, settings, callbacks=[Swaps()], **often)
    for of_model, of_average in zip(validated, swapped):
        assert_same(of_average.batches, of_model.batches)
        assert of_average.notes == 0
        assert of_average.total["total_wire_bytes"] == of_model.total["total_wire_bytes"]
    ours, theirs = (each.notes for each in validated)
    assert_same(ours, theirs)
    assert len(ours) == 5  # one sanity check before training
    assert all(differences(one, other) for one, other in pairwise(ours))  # the weights have moved


class Averaging(Validated):
    def __init__(self, asks, path=""):
        super().__init__()
        self.path, self.save_after = path, 8 if path else None
        self.average = AveragedModel(self.network, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        self.average.requires_grad_(asks)

    def on_train_batch_end(self, *args):
        self.average.update_parameters(self.network)
        super().on_train_batch_end(*args)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.network.parameters(), lr=1e-2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", list(ROUNDS))
def test_what_no_optimizer_has_is_left_to_whoever_writes_it(pair, tmp_path, kind):
    path, more = str(tmp_path / "middle.ckpt"), {"val_check_interval": 3, "limit_val_batches": 1}
    averages, frozen = (fits(pair, partial(Averaging, *of), ROUNDS[kind], **more) for of in ((True, path), (False,)))
    resumed = fits(pair, partial(Averaging, True), ROUNDS[kind], path, **more)
    for ours, theirs, later in zip(averages, frozen, resumed):
        assert_same(ours.batches, theirs.batches)
        assert_same(ours.notes, theirs.notes)
        assert_same(ours.end, theirs.end)
        assert ours.total["total_wire_bytes"] == theirs.total["total_wire_bytes"]
        assert_same(later.batches, ours.batches[8:])
        assert_same(later.end, ours.end)


class Loads(Callback):
    def __init__(self, hook, by_rank):
        setattr(self, hook, self._load)
        self.by_rank = by_rank

    def _load(self, trainer, pl_module, *args):
        if trainer.global_step == 0:
            scale_weights(pl_module, 1.0 + self.by_rank * trainer.global_rank)


@torch.no_grad()
def scale_weights(module, factor):
    for parameter in module.parameters():
        parameter.mul_(64).round_().mul_(factor / 16)


class Scaled(Validated):
    def __init__(self, by_rank):
        super().__init__()
        scale_weights(self, 1.0 + by_rank / 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", list(ROUNDS))
def test_training_starts_from_what_callbacks_load(pair, kind):
    by_rank = 0.5
    checks = {"num_sanity_val_steps": 1, "limit_val_batches": 1}
    expected = fits(pair, partial(Scaled, by_rank), ROUNDS[kind], **checks)
    for hook in ("on_fit_start", "on_train_start", "on_train_epoch_start"):
        for loaded, known in zip(
            fits(pair, Validated, ROUNDS[kind], callbacks=[Loads(hook, by_rank)], **checks), expected
        ):
            assert_same(loaded.batches, known.batches)
            assert_same(loaded.notes[1:], known.notes[1:])  # the first note is of the sanity check, on each rank


class SavedTwice(Local):
    def on_fit_end(self):
        self.trainer.save_checkpoint(f"{self.path}.end")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", list(ROUNDS))
def test_what_is_saved_and_there_at_the_end_is_the_shared_model(pair, tmp_path, kind):
    path = str(tmp_path / "middle.ckpt")
    first, second = fits(pair, partial(SavedTwice, 5, path), ROUNDS[kind])
    assert_same(first.end, second.end)
    middle, end = (torch.load(name, weights_only=True)["state_dict"] for name in (path, f"{path}.end"))
    assert_same({name: tensor.cpu() for name, tensor in end.items()}, first.end)
    assert differences(middle, end)


class Adversaries(Small):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.judge = nn.Linear(32, 1)

    def training_step(self, batch, batch_index):
        rows = torch.randn(4, 32, generator=torch.Generator().manual_seed(self.global_rank)).to(self.device)
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = self.judge(self.network(rows)).square().mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        if batch_index % 2:
            loss = (1 - self.judge(self.network(rows).detach())).square().mean()
            second.zero_grad()
            self.manual_backward(loss)
            second.step()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.network.parameters()), torch.optim.SGD(self.judge.parameters(), lr=0.1)


class Partial(Local):
    def __init__(self):
        super().__init__()
        self.side = nn.Linear(32, 32)
        self.late = nn.Linear(32, 32)
        self.late.requires_grad_(False)

    def training_step(self, batch, batch_index):
        rows = self.rows(batch_index)
        out = self.late(self.network(rows))
        return ((out + self.side(rows) if self.global_rank % 2 else out) - rows).square().mean()

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            self.network[0].requires_grad_(False)
            self.late.requires_grad_(True)


class Unseen(Small):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_index):
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward((self.network(batch) - batch).square().mean())
        optimizer.step()


LOOPS = {
    "by hand": (Adversaries, {}, {}),
    "past Lightning": (Unseen, {}, {}),
    "accumulated": (Local, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, {}),
    "frozen": (Partial, {}, {}),
    "unused": (Partial, {}, {"find_unused_parameters": True}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("module", "arguments", "more"), LOOPS.values(), ids=LOOPS)
def test_any_loop_trains_one_model(pair, module, arguments, more):
    first, second = fits(pair, module, {**ROUNDS["sparse"], **more}, limit_train_batches=8, max_epochs=1, **arguments)
    assert_same({name: first.end[name] for name in first.start}, {name: second.end[name] for name in first.start})
    assert all(not torch.equal(first.end[name], first.start[name]) for name in first.start if "network.1" not in name)
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


@pytest.mark.parametrize(
    ("module", "arguments", "named"),
    [
        (Local, {"sync_batchnorm": True}, "SyncBatchNorm"),
        (Local, {"val_check_interval": "00:00:00:01"}, "val_check_interval"),
        (Small, {"callbacks": [ReplicaSentinel()]}, "drift"),
        (Small, {"callbacks": [ModelPruning("l1_unstructured")]}, "ModelPruning"),
        (Small, {"callbacks": [StochasticWeightAveraging(0.01)]}, "StochasticWeightAveraging"),
    ],
    ids=["SyncBatchNorm", "clock", "compared", "pruned", "averaged"],
)
def test_what_would_drive_ranks_apart_is_refused(pair, module, arguments, named):
    for answer in refusals(pair, module, ROUNDS["diloco"], **arguments):
        assert named in answer


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"compressor": DGC(momentum=None, clip_norm=1.0)}, "clip_norm="),
        ({"compressor": LAGS(adaptive_density=True)}, "adaptive_density="),
        ({"local_steps": 0}, "local_steps="),
        ({"compressor": SDAGC(momentum=None), "wire": "2bit"}, "wire="),
        ({"compressor": "exdyna", "wire": "4bit"}, "wire="),
        ({"compressor": "dense", "local_steps": LocalSteps(5, residual_decay=0.9)}, "residual_decay="),
    ],
    ids=["clipping", "adapting", "none", "gaps", "union", "exact"],
)
def test_what_cannot_go_together_is_refused(arguments, named):
    with pytest.raises(ValueError, match=named):
        SparseDDPStrategy(**{"local_steps": 5, **arguments})
