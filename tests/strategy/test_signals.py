"""SIGTERM ends training on all ranks at one batch, and nobody waits for news of it."""

import signal
from contextlib import ExitStack
from threading import Thread
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities.exceptions import SIGTERMException

from lightning_sparse import LocalSteps, SparseDDPStrategy
from lightning_sparse.engine.collectives import Collectives
from lightning_sparse.strategy.signals import Signals
from tests.helpers.devices import DEVICE
from tests.helpers.jobs import SignalAt
from tests.helpers.trainers import Quiet, Small, make_trainer

STEPS = 16
SENDING = ("all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all_single", "barrier", "broadcast")


def fit_signalled(rank, signalled, step, folder, in_validation, arguments):
    """Fit; return whether SIGTERM ended it, after which step, what Lightning and a user's handler saw, and the rest."""
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    users = signal.getsignal(signal.SIGTERM)
    watching = SignalAt(step if rank in signalled else None, in_validation=in_validation)
    saving = ModelCheckpoint(folder, filename="last", save_on_exception=True, every_n_train_steps=1000)
    has_ended = False
    try:
        more = {"callbacks": [watching, saving], "enable_checkpointing": True, "val_check_interval": 4}
        trainer = make_trainer(rank, SparseDDPStrategy("topk", density=0.1, **arguments), **more)
        try:
            trainer.fit(Small())
        except SIGTERMException:
            has_ended = True
        is_restored = signal.getsignal(signal.SIGTERM) is users
        is_restored &= "_broadcast_sigterm_tensor" not in vars(trainer.fit_loop.epoch_loop)
    finally:
        signal.signal(signal.SIGTERM, before)
    return has_ended, trainer.global_step, trainer.received_sigterm, len(seen), is_restored


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("signalled", "arguments", "stop"),
    [
        ((0,), {}, 7),
        ((0, 1, 2), {}, 7),
        ((2,), {"local_steps": 4}, 8),
        ((0, 1, 2), {"local_steps": 4}, 8),
        ((0,), {"local_steps": LocalSteps(4, synchronous_steps=8)}, 7),
    ],
)
def test_all_ranks_end_and_save_after_the_same_step(signalled, arguments, stop, pools, tmp_path):
    ends = pools[3].run(fit_signalled, signalled, 5, str(tmp_path), False, arguments)
    assert ends == [(True, stop, True, 1, True)] * 3
    assert [path.name for path in tmp_path.glob("*.ckpt")] != []


@pytest.mark.parametrize(
    ("signalled", "step", "in_validation", "end"),
    [
        ((1,), 4, True, (True, 5, True, 1, True)),  # after the validation
        ((1,), STEPS - 1, False, (False, STEPS, True, 1, True)),  # by Lightning, when training has ended
        ((), 0, False, (False, STEPS, False, 0, True)),
    ],
)
def test_a_signal_is_answered_where_training_could_go_on(signalled, step, in_validation, end, pair, tmp_path):
    assert pair.run(fit_signalled, signalled, step, str(tmp_path), in_validation, {}) == [end] * 2


def fit_in_a_thread(rank):
    """Fit, on rank 1 in another thread, until SIGTERM to rank 0; return whether its handler is back, and the step."""
    watching, ended = SignalAt(5 if rank == 0 else None), []

    def fit():
        try:
            trainer.fit(Small())
        except SIGTERMException:
            ended.append(trainer.global_step)

    before = signal.getsignal(signal.SIGTERM)
    trainer = make_trainer(rank, SparseDDPStrategy("topk", density=0.1), callbacks=[watching])
    if rank == 0:
        fit()
    else:
        thread = Thread(target=fit)
        thread.start()
        thread.join()
    return signal.getsignal(signal.SIGTERM) == before, ended[0]


def test_a_rank_that_can_have_no_handler_ends_with_the_others(pair):
    assert pair.run(fit_in_a_thread) == [(True, 7)] * 2


class Counting(Callback):
    """Count what is sent in each batch, from its end to the end of the next."""

    def __init__(self):
        self.sent = []
        self.batches = []

    def on_train_batch_end(self, *batch):
        self.batches.append(self.sent[:])
        self.sent.clear()


def fit_counted(rank, arguments):
    counting = Counting()
    trainer = make_trainer(rank, SparseDDPStrategy("topk", density=0.1, **arguments), callbacks=[counting])

    def counted(name, call):
        def sending(*args, **named):
            counting.sent.append(name)
            return call(*args, **named)

        return sending

    with ExitStack() as stack:
        for name in SENDING:
            stack.enter_context(mock.patch.object(dist, name, counted(name, getattr(dist, name))))
        stack.enter_context(mock.patch.object(Collectives, "run", counted("exchange", Collectives.run)))
        trainer.fit(Quiet())
    return counting.batches


def test_not_a_word_between_rounds(pair):
    for batches in pair.run(fit_counted, {"local_steps": 4}):
        assert [step for step, sent in enumerate(batches[1:], 2) if sent] == [4, 8, 12, 16]


def test_nobody_waits_for_rank_0_in_every_batch(pair):
    for batches in pair.run(fit_counted, {"schedule": "single"}):
        assert all(sorted(sent) == ["all_to_all_single", "exchange"] for sent in batches[1:])


def heard_by(rank, device):
    """Tell of a signal to rank 1 where tensors are made on another device; return what is heard."""
    signals = Signals(signal.SIGTERM)
    try:
        with torch.device(device):
            signals.connect(mock.Mock(strategy=mock.Mock(root_device=DEVICE, rounds=None, _timeout=None)), list)
            signals.is_noted = rank == 1
            signals.send()
            return signals.heard()
    finally:
        signals.close()


def test_news_are_the_hosts_whatever_the_default_device(pair):
    assert pair.run(heard_by, "meta") == [True, True]


def told_of_exchanges(rank, backend, made):
    """Tell of a signal to rank 1, and of exchanges made; return what is heard, and who is behind."""
    signals = Signals(signal.SIGTERM)
    signals.exchanges = lambda: made[rank]
    try:
        with mock.patch("lightning_sparse.strategy.signals.backend_of", return_value=backend):
            signals.connect(mock.Mock(strategy=mock.Mock(root_device=DEVICE, rounds=None, _timeout=None)), list)
            signals.is_noted = rank == 1
            signals.send()
            return signals.heard(), signals.behind
    finally:
        signals.close()


@pytest.mark.parametrize("backend", ["gloo", "another"])
@pytest.mark.parametrize(
    ("made", "behind"),
    [((7, 7), None), ((128, 127), "rank 1 had made 1 fewer exchanges than rank 0"), ((255, 257), "rank 0 had made 2")],
)
def test_ranks_hear_who_has_made_fewer_exchanges_beside_signals(pair, backend, made, behind):
    for heard, found in pair.run(told_of_exchanges, backend, made):
        assert heard
        assert found is behind if behind is None else behind in found
