"""Ranks with different numbers of batches train together, in rounds of local steps."""

import os
import signal
from copy import deepcopy
from functools import partial
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import EarlyStopping, LearningRateFinder, ModelCheckpoint, Timer
from pytorch_lightning.loggers.logger import DummyLogger
from pytorch_lightning.plugins.environments import SLURMEnvironment
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_sparse import LocalSteps, SparseDDPStrategy
from lightning_sparse.callbacks import CompressionMonitor, RequeueAtStepEnd
from lightning_sparse.testing.tensors import assert_same
from tests.helpers.fits import refusals, refuse
from tests.helpers.jobs import JOB, SignalAt, put_scontrol
from tests.helpers.trainers import Rows, Small, expect, make_trainer, weights

ROWS = 4  # of a batch
IN_TENSOR = partial(torch.tensor, dtype=torch.float64)
MONITORED = {"callbacks": [CompressionMonitor(by_parameter=True)], "logger": DummyLogger(), "log_every_n_steps": 1}


class Endless(IterableDataset[Tensor]):
    """As many rows as are asked for, of a number that nobody is told."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        yield from Rows(self.count)


class Uneven(Small):
    def __init__(
        self,
        batches,
        is_known=True,
        by_hand=False,
        teaches=False,
        steps_bare=False,
        has_cycle=False,
        later=None,
        rate_of=float,
    ):
        super().__init__()
        if teaches:
            self.teacher = deepcopy(self.network).requires_grad_(False)
        self.batches = batches
        self.later = later  # batches of an epoch, after the first
        self.is_known = is_known
        self.rate_of = rate_of
        self.automatic_optimization = not by_hand
        self.steps_bare = steps_bare  # without Lightning's wrapper, which counts steps
        self.has_cycle = has_cycle  # of the learning rate, as long as the training of each rank
        self.validated = []
        self.trained = []

    def training_step(self, batch, batch_index):
        self.trained.append(self.current_epoch)
        loss = (self.network(batch) - batch).square().mean() * (1 + self.global_rank)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        self.manual_backward(loss)
        (optimizer.optimizer if self.steps_bare else optimizer).step()
        optimizer.zero_grad()
        if self.steps_bare:
            self.lr_schedulers().step()
        return None

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_index):
        for taught, own in zip(self.teacher.parameters() if "teacher" in self._modules else (), self.parameters()):
            taught.lerp_(own, 0.1)

    def validation_step(self, batch, batch_index):
        super().validation_step(batch, batch_index)
        if batch_index == 0 and not self.trainer.sanity_checking:
            self.validated.append((self.global_step, float(sum(each.double().sum() for each in self.parameters()))))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.rate_of(1e-3))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        if self.has_cycle:
            total = int(self.trainer.estimated_stepping_batches)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_train_epoch_start(self):
        if self.later and self.current_epoch:  # has the loader been made anew or not
            self.trainer.train_dataloader.dataset.rows = self.train_dataloader().dataset.rows

    def train_dataloader(self):
        batches = self.later if self.later and self.current_epoch else self.batches
        count = ROWS * batches[self.global_rank]
        return DataLoader(Rows(count) if self.is_known else Endless(count), batch_size=ROWS)


class End(NamedTuple):
    weights: dict[str, Tensor]
    step: int
    rate: float
    trained: list[int]  # epoch of each batch
    validated: list[tuple[int, float]]  # step, and sum of weights


def fit(rank, batches, local, how, trainer, path=None, saved=None):
    expect(".*is left out: some.*", ".*your dataloader is not resumable.*")
    how, settings = {**how}, {"compressor": "topk", "density": 0.1, "local_steps": local}
    strategy = SparseDDPStrategy(**{**settings, **how.pop("strategy", {})})
    module = Uneven(batches, **how)
    arguments = {"use_distributed_sampler": False, "max_epochs": 2, "num_sanity_val_steps": 0, **trainer}
    fitted = make_trainer(rank, strategy, **arguments)
    fitted.fit(module, ckpt_path=path)
    if saved is not None:
        fitted.save_checkpoint(saved)
    rate = float(fitted.optimizers[0].param_groups[0]["lr"])
    return End(weights(module), fitted.global_step, rate, module.trained, module.validated)


def assert_one_model(ends):
    for end in ends[1:]:
        assert_same(end.weights, ends[0].weights)
        assert (end.step, end.rate, end.validated) == (ends[0].step, ends[0].rate, ends[0].validated)


class NewAtTheEnd(Callback):
    """Assign a new optimizer after the last batch of all, with the rate that this rank's has by then."""

    def on_train_batch_end(self, trainer, pl_module, *rest):
        if trainer.is_last_batch and trainer.current_epoch == 1:
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            trainer.optimizers = [torch.optim.AdamW(pl_module.parameters(), lr=rate)]


FITS = {
    "at once": ((13, 8, 3), 4, {}, {}, 26),
    "midst": ((4, 8, 13), 4, {}, {"val_check_interval": 0.5, "limit_val_batches": 2}, 26),
    "late": ((13, 8, 3), LocalSteps(4, overlap_steps=2), {}, {}, 26),
    "late at the end": ((12, 8, 3), LocalSteps(4, overlap_steps=2), {}, {}, 24),
    "synchronous": ((13, 8, 4), LocalSteps(4, synchronous_steps=3), {}, {}, 26),
    "few rounds": ((13, 8, 3), 50, {}, {}, 26),
    "auto": ((13, 8, 3), "auto", {}, {}, 26),
    "iterable": ((13, 8, 3), 4, {"is_known": False}, {}, 26),
    "by hand": ((13, 8, 3), 4, {"by_hand": True}, {}, 26),
    "a teacher, late": ((13, 8, 3), LocalSteps(4, overlap_steps=2), {"teaches": True}, {}, 26),
    "a teacher, in bfloat16": ((13, 8, 3), 4, {"teaches": True, "by_hand": True}, {"precision": "bf16-true"}, 26),
    "bare": ((3, 8, 13), 4, {"by_hand": True, "steps_bare": True}, {}, 0),
    "a new optimizer": ((3, 8, 13), 4, {"by_hand": True, "steps_bare": True}, {"callbacks": [NewAtTheEnd()]}, 0),
    "in a tensor": ((3, 8, 13), 4, {"by_hand": True, "steps_bare": True, "rate_of": IN_TENSOR}, {}, 0),
    "cycle": ((3, 8, 13), 4, {"has_cycle": True}, {"max_epochs": 1}, 13),
    "reloaded": ((13, 8, 3), 4, {"later": (3, 8, 13)}, {"reload_dataloaders_every_n_epochs": 1}, 26),
    "cut": ((4, 4, 4), LocalSteps(4, synchronous_steps=4), {"later": (4, 2, 1)}, {"limit_val_batches": 0}, 8),
    "accumulating": ((13, 8, 3), 2, {}, {"accumulate_grad_batches": 2}, 14),
    "max_steps": ((13, 8, 3), 4, {}, {"max_steps": 18, "max_epochs": -1}, 18),
    "limited": ((13, 8, 3), 4, {}, {"limit_train_batches": 5}, 10),
    "monitored": ((13, 8, 3), 4, {}, MONITORED, 26),
    "monitored iterable": ((13, 8, 3), 4, {"is_known": False}, MONITORED, 26),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("batches", "local", "how", "arguments", "steps"), FITS.values(), ids=FITS)
def test_ranks_with_fewer_batches_wait_in_rounds(pools, batches, local, how, arguments, steps):
    ends = pools[3].run(fit, batches, local, how, arguments)
    assert_one_model(ends)
    assert ends[0].step == steps
    limit = arguments.get("limit_train_batches", 13)
    for end, number in zip(ends, batches):
        assert end.trained.count(0) == min(number, limit)
    for end, number in zip(ends, how.get("later", ())):
        assert end.trained.count(1) == number
    if not (how.get("by_hand") or how.get("has_cycle")) or how.get("steps_bare"):
        assert ends[0].rate == pytest.approx(1e-3 * 0.95 ** (steps or 2 * 13))


def share_by_share(epochs, every):
    """Train ranks one after the other, each its share of every round, as a page says it."""
    ranks, longest = len(epochs[0]), max(epochs[0])
    shared = Uneven(epochs[0])
    copies = [deepcopy(shared) for _ in range(ranks)]
    optimizers = [torch.optim.AdamW(copy.parameters(), lr=1e-3) for copy in copies]
    seen = [0] * ranks  # batches since the last exchange

    def exchange():
        with torch.no_grad():
            for parameter, *theirs in zip(shared.parameters(), *(copy.parameters() for copy in copies)):
                changes = [own - parameter for own in theirs]
                parameter += sum(count * change for count, change in zip(seen, changes)) / sum(seen)
                for own in theirs:
                    own.copy_(parameter)
        seen[:] = [0] * ranks

    for epoch, batches in enumerate(epochs):
        made = [0] * ranks
        for step in range(epoch * longest + 1, (epoch + 1) * longest + 1):  # of the rank with the most
            for rank, copy in enumerate(copies):
                place = epoch * longest + made[rank] * longest // batches[rank]  # after the steps that it has made
                if place >= step or made[rank] == batches[rank]:
                    continue
                rows = Rows(ROWS * batches[rank]).rows[ROWS * made[rank] : ROWS * (made[rank] + 1)]
                optimizers[rank].param_groups[0]["lr"] = 1e-3 * 0.95**place
                optimizers[rank].zero_grad()
                ((copy.network(rows) - rows).square().mean() * (1 + rank)).backward()
                optimizers[rank].step()
                made[rank] += 1
                seen[rank] += 1
            if step % every == 0:
                exchange()
    if any(seen):
        exchange()
    return weights(shared)


@pytest.mark.parametrize(
    ("batches", "later", "reloads"),
    [
        ((12, 6, 3), None, 0),
        ((13, 8, 3), None, 0),
        ((2, 9, 1), None, 0),
        ((13, 8, 3), (3, 8, 13), 1),
        ((8, 8, 8), (8, 4, 2), 0),
    ],
)
def test_a_rank_with_fewer_batches_makes_its_share_of_each_round(pools, batches, later, reloads):
    dense = {"strategy": {"compressor": "dense", "density": None}, "later": later}
    arguments = {"limit_val_batches": 0, "reload_dataloaders_every_n_epochs": reloads}
    ends = pools[3].run(fit, batches, 4, dense, arguments)
    assert_one_model(ends)
    for name, expected in share_by_share((batches, later or batches), every=4).items():
        torch.testing.assert_close(ends[0].weights[name], expected, rtol=1e-4, atol=1e-6)


def fit_share(rank, shares):
    return fit(rank, (24, 24), 4, {}, {"use_distributed_sampler": True, "limit_train_batches": shares[rank]})


def test_a_share_of_the_batches_is_one_argument(pair):
    ends = pair.run(fit_share, (1.0, 0.5))
    assert_one_model(ends)
    assert [len(end.trained) for end in ends] == [24, 12]
    assert ends[0].step == 24


def test_the_end_of_an_epoch_begins_no_rounds_in_synchronous_steps(pools):
    ends = [
        pools[3].run(fit, (4, 4, 4), LocalSteps(4, synchronous_steps=count), {}, {"val_check_interval": 0.5})
        for count in (8, 100)
    ]
    for one, other in zip(*ends):
        assert_same(one.weights, other.weights)


class SaveAt(Callback):
    def __init__(self, path, after, is_epoch):
        self.path = path
        self.after = after
        self.is_epoch = is_epoch

    def _save(self, trainer, is_epoch):
        if is_epoch == self.is_epoch:
            self.after -= 1
            if self.after == 0:
                trainer.save_checkpoint(self.path)

    def on_validation_end(self, trainer, pl_module):
        self._save(trainer, is_epoch=False)

    def on_train_epoch_end(self, trainer, pl_module):
        self._save(trainer, is_epoch=True)


BATCHES, HALVES = (4, 8, 14), {"val_check_interval": 0.5, "limit_val_batches": 2}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_epoch", [True, False], ids=["epoch", "validation"])
def test_training_goes_on_from_the_end_of_an_epoch(pools, tmp_path, is_epoch):
    path, more = str(tmp_path / "end.ckpt"), HALVES
    whole = pools[3].run(fit, BATCHES, 4, {}, {**more, "callbacks": [SaveAt(path, 1 if is_epoch else 2, is_epoch)]})
    ends = pools[3].run(fit, BATCHES, 4, {}, more, path)
    assert_one_model(ends)
    for one, other, batches in zip(whole, ends, BATCHES):
        assert_same(one.weights, other.weights)
        assert other.trained == [1] * batches


def test_a_resume_with_nothing_left_makes_one_of_what_was_written_last(pair, tmp_path):
    path, how, more = str(tmp_path / "end.ckpt"), {"teaches": True}, {"max_epochs": 1}
    whole = pair.run(fit, (8, 5), 4, how, {**more, "callbacks": [SaveAt(path, 1, is_epoch=True)]})
    for one, other in zip(whole, pair.run(fit, (8, 5), 4, how, more, path)):
        assert_same(one.weights, other.weights)


def test_training_goes_on_from_a_validation_in_the_midst_of_an_epoch(pools, tmp_path):
    path = str(tmp_path / "midst.ckpt")
    pools[3].run(fit, BATCHES, 4, {}, {**HALVES, "callbacks": [SaveAt(path, 1, is_epoch=False)]})
    ends = pools[3].run(fit, BATCHES, 4, {}, HALVES, path)
    assert_one_model(ends)
    assert [end.trained.count(0) for end in ends] == [2, 4, 7]
    assert [end.trained.count(1) for end in ends] == list(BATCHES)


def test_other_ranks_go_on_from_the_end_of_an_epoch_only(pools, tmp_path):
    end, midst = str(tmp_path / "end.ckpt"), str(tmp_path / "midst.ckpt")
    saving = [SaveAt(end, 1, is_epoch=True), SaveAt(midst, 1, is_epoch=False)]
    pools[3].run(fit, BATCHES, 4, {}, {**HALVES, "callbacks": saving})
    ends = pools[2].run(fit, BATCHES[1:], 4, {}, HALVES, end)
    assert_one_model(ends)
    assert [each.trained for each in ends] == [[1] * 8, [1] * 14]
    for told in pools[2].run(refuse, fit, BATCHES[1:], 4, {}, HALVES, midst):
        assert "in the midst of an epoch" in told


def test_nothing_goes_on_from_where_only_some_have_ended(pools, tmp_path):
    midst, end, batches = str(tmp_path / "midst.ckpt"), str(tmp_path / "end.ckpt"), (4, 8, 13)
    # The last validates after 6 and 12.
    pools[3].run(fit, batches, 4, {}, {**HALVES, "callbacks": [SaveAt(midst, 2, is_epoch=False)]})
    pools[3].run(fit, batches, 4, {}, {"limit_val_batches": 0, "max_steps": 11}, None, end)  # saved after fit
    for ranks, those, path in ((3, batches, midst), (2, (8, 8), midst), (2, (8, 8), end)):
        for told in pools[ranks].run(refuse, fit, those, 4, {}, HALVES, path):
            assert "had ended their epoch" in told


class StopAlone(Callback):
    """Stop one rank alone, in the midst of an epoch or at its end."""

    def __init__(self, hook):
        setattr(self, hook, self._stop)

    def _stop(self, trainer, *rest):
        if trainer.global_rank == 1 and trainer.current_epoch == 1 and trainer.global_step >= 13:
            trainer.should_stop = True


@pytest.mark.parametrize(
    ("hook", "batches"), [("on_train_batch_end", 4), ("on_validation_end", 6), ("on_train_epoch_end", 9)]
)
def test_what_stops_one_rank_stops_all_at_the_end_of_the_epoch(pair, hook, batches):
    ends = pair.run(fit, (9, 9), 4, {}, {"max_epochs": 8, "val_check_interval": 3, "callbacks": [StopAlone(hook)]})
    assert_one_model(ends)
    assert [end.trained.count(1) for end in ends] == [9, batches]
    assert not any(end.trained.count(2) for end in ends)


def test_early_stopping_stops_all_ranks(pair):
    stopping = EarlyStopping("val_loss", mode="max", patience=1)
    ends = pair.run(fit, (9, 5), 4, {}, {"max_epochs": 8, "callbacks": [stopping]})
    assert_one_model(ends)
    assert ends[0].step == 2 * 9


def fit_signalled(rank):
    """Fit; return whether SIGTERM of the first rank has ended it, when others have run out of batches."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        fit(rank, (13, 8, 3), 4, {}, {"max_epochs": 1, "callbacks": [SignalAt(9)] if rank == 0 else []})
    except SIGTERMException:
        return True
    finally:
        signal.signal(signal.SIGTERM, before)
    return False


def test_a_signal_ends_those_that_wait(pools):
    assert pools[3].run(fit_signalled) == [True] * 3


def fit_requeued(rank, batches, how, folder, batch):
    """Fit in a job of SLURM that rank 0 is told to leave in a batch; return the epoch of each that was trained."""
    job = {
        **JOB,
        "SLURM_NTASKS": "3",
        "SLURM_NTASKS_PER_NODE": "3",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "PATH": folder,
    }
    module, before = Uneven(batches, **how), signal.getsignal(signal.SIGUSR1)
    callbacks = [RequeueAtStepEnd(), *([SignalAt(batch, signal.SIGUSR1)] if rank == 0 else [])]
    strategy = SparseDDPStrategy("topk", 0.1, local_steps=4)
    settings = {"use_distributed_sampler": False, "max_epochs": 2, "limit_val_batches": 0, "callbacks": callbacks}
    with mock.patch.dict(os.environ, job):
        trainer = make_trainer(rank, strategy, plugins=[SLURMEnvironment()], default_root_dir=folder, **settings)
        try:
            trainer.fit(module)
        except SystemExit:
            return module.trained
        finally:
            signal.signal(signal.SIGUSR1, before)
    return None


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("is_known", "batch", "begun"),
    [(True, 1, 4), (True, 13, 14), (False, 1, 14), (False, 9, 14)],
    ids=["midst", "last", "some have ended", "most have ended"],
)
def test_a_job_goes_back_from_where_all_ranks_can_go_on(pools, tmp_path, is_known, batch, begun):
    put_scontrol(tmp_path)
    how, batches, more = {"is_known": is_known}, (14, 8, 3), {"limit_val_batches": 0}
    trained = pools[3].run(fit_requeued, batches, how, str(tmp_path), batch)
    assert len(trained[0]) == begun
    ends = pools[3].run(fit, batches, 4, how, more, str(tmp_path / "hpc_ckpt_1.ckpt"))
    assert_one_model(ends)
    assert [len(before) + len(end.trained) for before, end in zip(trained, ends)] == [2 * each for each in batches]
    if begun == batches[0]:
        for one, other in zip(pools[3].run(fit, batches, 4, how, more), ends):
            assert_same(one.weights, other.weights)


class Logging(Uneven):
    def training_step(self, batch, batch_index):
        self.log("often", 1.0, on_step=True, on_epoch=False, sync_dist=True)
        return super().training_step(batch, batch_index)


class Rated(Uneven):
    learning_rate = 0.1  # that a search is for


class Allowing(Uneven):
    """A model that tells Lightning that a rank may have nothing."""

    def __init__(self, batches):
        super().__init__(batches)
        self.allow_zero_length_dataloader_with_multiple_devices = True


SAVES = {"callbacks": [ModelCheckpoint(every_n_train_steps=2)], "enable_checkpointing": True}
LATE_ROUNDS = LocalSteps(4, synchronous_steps=3)
REFUSED = {
    "validations": (Uneven, 2, {"val_check_interval": 2}, "val_check_interval=2"),
    "across epochs": (Uneven, 2, {"val_check_interval": 2, "check_val_every_n_epoch": None}, "fractions"),
    "synchronous": (Uneven, LocalSteps(2, synchronous_steps=3), {}, "synchronous_steps"),
    "halves, synchronous": (partial(Uneven, (9, 5)), LATE_ROUNDS, {"val_check_interval": 0.5}, "val_check_interval"),
    "timer": (Uneven, 2, {"callbacks": [Timer("00:01:00:00")]}, "interval='epoch'"),
    "search": (Rated, 2, {"callbacks": [LearningRateFinder(num_training_steps=4)]}, "search for a learning rate"),
    "saves": (Uneven, 2, SAVES, "every_n_epochs"),
    "logs": (Logging, 2, {}, "'often'"),
    "no batch": (partial(Allowing, (5, 0)), 2, {}, "none"),
    "no batch, iterable": (partial(Uneven, (5, 0), is_known=False), 2, {"limit_val_batches": 0}, "rank 1 had no batch"),
}


@pytest.mark.parametrize(("module", "local", "arguments", "named"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_go_with_different_numbers_is_refused(pair, module, local, arguments, named):
    build = module if isinstance(module, partial) else partial(module, (5, 3))
    more = {"use_distributed_sampler": False, "limit_train_batches": 1.0, "limit_val_batches": 2, **arguments}
    for answer in refusals(pair, build, {"local_steps": local}, **more):
        assert named in answer
