"""A rank that waits in vain says so in our words wherever it waits, and says what is known of the others."""

import re
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from lightning_sparse import LocalSteps, SparseDDPStrategy
from lightning_sparse.strategy.signals import Signals
from tests.helpers.devices import DEVICE
from tests.helpers.faults import strike
from tests.helpers.trainers import Quiet, Rows, Small, make_trainer, run_fit

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="processes are forked, which a GPU does not allow")
BUFFERS = "_distributed_broadcast_coalesced"
ADVICE = ("Look at the other ranks' output for the first error", "longer timeout=...", "ckpt_path=...", "gloo")
FIRST_DDPS = LocalSteps(4, synchronous_steps=8)


class Busy(Small):
    """A model whose ranks meet in all that Lightning and DDP exchange: buffers, metrics, barriers, validation."""

    def __init__(self):
        super().__init__()
        self.network.insert(1, nn.BatchNorm1d(64))

    def on_train_batch_end(self, *batch):
        self.trainer.strategy.barrier()


class Arming(Callback):
    """Arm a fault at a batch, counted from the start; ``None`` for before the first."""

    def __init__(self, batch):
        self.batch = batch

    def on_train_batch_start(self, trainer, *batch):
        if trainer.fit_loop.total_batch_idx == self.batch:
            self.batch = None


def saving(folder):
    return ModelCheckpoint(folder, filename="last", save_on_exception=True)


def end_of(trainer, model, *loaders):
    try:
        trainer.fit(model, *loaders)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def fit_struck(rank, owner, name, victim, how, arguments, batch=3, model=Busy, folder=None):
    """Fit, with a fault before a rank's call of a function in a batch; return what was raised."""
    arming, original = Arming(batch), getattr(owner, name)

    def struck(*args, **kwargs):
        if arming.batch is None and rank == victim:
            if how == "raises":
                raise RuntimeError("Connection reset by peer")
            strike(how)
        return original(*args, **kwargs)

    strategy = SparseDDPStrategy("topk", 0.1, **arguments)
    callbacks = [arming, *([] if folder is None else [saving(folder)])]
    more = {"callbacks": callbacks, "enable_checkpointing": folder is not None, "val_check_interval": 4}
    trainer = make_trainer(rank, strategy, **more)
    with mock.patch.object(owner, name, struck):
        return end_of(trainer, model())


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("owner", "name", "victim", "more", "where"),
    [
        (DistributedDataParallel, "_sync_buffers", 0, {}, BUFFERS),
        (DistributedDataParallel, "_sync_buffers", 1, {}, f"{BUFFERS}|all_gather of the group of"),
        (Busy, "log", 1, {}, "barrier"),
        (Busy, "validation_step", 1, {}, "barrier"),
        (SparseDDPStrategy, "barrier", 1, {}, "barrier"),
        (SparseDDPStrategy, "barrier", 1, {"saves": True}, "broadcast"),  # by a callback, after the error
        (SparseDDPStrategy, "on_train_start", 1, {"batch": None, "timeout": timedelta(seconds=3)}, ""),
        (Signals, "tell", 0, {}, f"{BUFFERS}|barrier|all_to_all_single"),
        (SparseDDPStrategy, "pre_backward", 1, {"local_steps": FIRST_DDPS}, "all_reduce"),
    ],
)
def test_a_rank_that_dies_is_told_of_wherever_others_wait(forked, tmp_path, owner, name, victim, more, where):
    arguments = {key: value for key, value in more.items() if key in ("timeout", "local_steps")}
    folder = str(tmp_path) if "saves" in more else None
    struck = (fit_struck, owner, name, victim, "dies", arguments, more.get("batch", 3), Busy, folder)
    _, (kind, message) = forked[2].answers(*struck)[1 - victim]
    assert kind == "ExchangeError", message
    assert re.search(rf"rank {1 - victim} of 2 waited in vain in ({where})", message), message
    if arguments.get("timeout") is None and folder is None:
        assert ": another rank has died" in message
        assert [each for each in ADVICE if each not in message] == []


@pytest.mark.parametrize("victim", [0, 1])
def test_a_ranks_own_error_stays_what_it_is_and_is_told_to_the_others(forked, victim):
    ends = forked[2].run(fit_struck, Quiet, "training_step", victim, "raises", {}, 3, Quiet)
    forked[2].stop()
    assert ends[victim] == ("RuntimeError", "Connection reset by peer")
    kind, message = ends[1 - victim]
    assert kind == "ExchangeError", message
    assert f": rank {victim} has failed with RuntimeError: Connection reset by peer. To go on, start" in message
    assert "another rank has died" not in message


class Stream(IterableDataset[Tensor]):
    def __init__(self, batches):
        self.rows = Rows(4 * batches)

    def __iter__(self):
        return (self.rows[index] for index in range(len(self.rows)))


def fit_uneven(rank, batches, folder=None):
    """Fit two epochs of a stream, of another length on each rank; return what was raised.

    With a folder they are saved, and rank 1 writes there instead what it raised, and ends its process.
    """
    strategy = SparseDDPStrategy("topk", 0.1, timeout=timedelta(seconds=4))
    more = {} if folder is None else {"callbacks": [ModelCheckpoint(folder)], "enable_checkpointing": True}
    trainer = make_trainer(rank, strategy, max_epochs=2, limit_val_batches=0, **more)
    end = end_of(trainer, Quiet(), DataLoader(Stream(batches[rank]), 4))
    if folder is not None and rank == 1:
        Path(folder, "raised").write_text(": ".join(end))
        strike("dies")
    return end


@pytest.mark.parametrize("shorter", [0, 1])
def test_a_rank_that_has_finished_is_told_from_one_that_died(forked, shorter):
    batches = (10, 15) if shorter == 0 else (15, 10)
    ends = forked[2].run(fit_uneven, batches)
    forked[2].stop()
    assert ends[shorter] == ("nothing", "")
    kind, message = ends[1 - shorter]
    assert kind == "ExchangeError", message
    assert f"rank {shorter} has finished its training, after 20 batches. This rank is in its batch 21: ranks" in message
    assert "limit_train_batches" in message
    assert "has died" not in message


class Skipping(Small):
    """Steps by hand; rank 1 leaves out a batch."""

    automatic_optimization = False

    def __init__(self, skipped):
        super().__init__()
        self.skipped = skipped

    def training_step(self, batch, batch_index):
        if (self.global_rank, batch_index) != (1, self.skipped):
            self.optimizers().zero_grad()
            self.manual_backward(self.network(batch).square().mean())
            self.optimizers().step()


def fit_skipping(rank, skipped):
    strategy = SparseDDPStrategy("topk", 0.1, timeout=timedelta(seconds=4))
    return end_of(make_trainer(rank, strategy, limit_train_batches=6, limit_val_batches=0), Skipping(skipped))


def skip(forked, batch):
    ends = forked[2].run(fit_skipping, batch)
    forked[2].stop()
    assert "from 0 * next(self.parameters()).sum()" in ends[0][1]
    assert "has died" not in ends[0][1]
    return ends


class Cured(Small):
    def training_step(self, batch, batch_index):
        loss = super().training_step(batch, batch_index)
        return 0 * next(self.parameters()).sum() if (self.global_rank, batch_index) == (1, 2) else loss


def fit_cured(rank):
    return run_fit(rank, SparseDDPStrategy("topk", 0.1), Cured(), limit_train_batches=6).global_step


def test_a_rank_may_leave_out_a_batch_by_a_loss_of_zero(forked):
    assert forked[2].run(fit_cured) == [6, 6]


def test_a_rank_that_leaves_out_a_backward_is_told_soon(forked):
    (kind, message), (other, reason) = skip(forked, 2)
    assert (other, kind) == ("RuntimeError", "ExchangeError")
    assert "rank 1 had made 1 fewer exchanges than rank 0: it has left out a backward" in reason
    assert f"rank 1 has failed with RuntimeError: {reason}" in message


def test_a_rank_that_leaves_out_its_last_backward_is_told_from_one_that_died(forked):
    (kind, message), end = skip(forked, 5)
    assert (kind, end) == ("ExchangeError", ("nothing", ""))
    assert "rank 1 has finished its training, after 6 batches, as many as this rank has begun: it has left" in message


@pytest.mark.exhaustive
def test_a_rank_that_waits_at_the_end_of_its_epoch_is_told_from_one_that_died(forked, tmp_path):
    (_, (kind, message)), _ = forked[2].answers(fit_uneven, (3, 5), str(tmp_path))
    assert kind == "ExchangeError", message
    assert "or has finished, where ranks have different numbers of batches" in message
    raised = (tmp_path / "raised").read_text()
    assert raised.startswith("ExchangeError: rank 1 of 2 waited in vain in all_gather of the group of")
    assert "rank 0 has had all batches of epoch 0, 3 since the start. This rank is in its batch 4: ranks" in raised


def fit_after_another(rank):
    """Fit to the end, and then longer, until rank 1 dies; return what was raised."""
    make_trainer(rank, SparseDDPStrategy("topk", 0.1), limit_train_batches=2).fit(Small())
    return fit_struck(rank, Busy, "training_step", 1, "dies", {})


def test_the_end_of_another_training_is_not_told(forked):
    (_, (kind, message)), _ = forked[2].answers(fit_after_another)
    assert kind == "ExchangeError", message
    assert "another rank has died" in message
    assert "has finished its training" not in message
