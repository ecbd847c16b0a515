import random
from itertools import groupby
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_sparse import AdamCorrection, SparseDDPStrategy, sparsify_gradients
from lightning_sparse.loop import backend_choice
from lightning_sparse.loop.backend_choice import AutoBackend, compare
from lightning_sparse.testing.tensors import assert_same
from tests.helpers.devices import DEVICE
from tests.helpers.trainers import Line, Rows, Small, make_trainer, weights

SETTLED = 300  # steps, or three epochs, after which the first choice is made
STEPS = 160  # with a clock of 10 or 40 ms per step
_ALL_ELSE = 5e-3  # seconds of a step outside of the exchange


class Priced(Small):
    """A model with slow exchanges, by a clock of its own."""

    def __init__(self):
        super().__init__()
        self.were_plain = []
        self.waiting = []
        self.seconds = 0.0

    def train_dataloader(self):
        return DataLoader(Rows(800), batch_size=4)

    def training_step(self, batch, batch_index):
        strategy = self.trainer.strategy
        self.were_plain.append(strategy.engine.reducer.is_dense)
        self.seconds += _ALL_ELSE + (0.0 if strategy.engine.reducer.is_dense else 30e-3)
        residuals = strategy.engine.state_dict()["memory"]["residual"].values()
        self.waiting.append(sum(float(residual.abs().sum()) for residual in residuals))
        return super().training_step(batch, batch_index)


def fit_priced(rank):
    model, strategy = Priced(), SparseDDPStrategy("lags", 0.05, schedule="auto")
    trainer = make_trainer(rank, strategy, max_epochs=-1, max_steps=SETTLED, limit_val_batches=0)
    with mock.patch.object(backend_choice, "perf_counter", side_effect=lambda: model.seconds):
        trainer.fit(model)
    return weights(model), model.were_plain, model.waiting, strategy.compression_stats()


@pytest.mark.clock
def test_a_fast_network_is_left_to_ddp_with_nothing_waiting(pair):
    answers = pair.run(fit_priced)
    assert_same(answers[0][:2], answers[1][:2])
    for _, were_plain, waiting, stats in answers:
        turns = [len(list(run)) for was_plain, run in groupby(were_plain) if was_plain]
        assert turns[0] == turns[1] < 20
        assert all(were_plain[-60:])
        assert any(waiting)
        assert waiting[-1] == 0
        assert stats["density"] == stats["compression_ratio"] == 1.0


def losses_of_auto(rank):
    model, losses, were_plain, seconds = Line().to(DEVICE), [], [], [0.0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    correction = AdamCorrection(warmup_steps=10, density_decay_steps=10)
    with (
        mock.patch.object(backend_choice, "perf_counter", side_effect=lambda: seconds[0]),
        sparsify_gradients(
            model, optimizer, "lags", schedule="auto", warmup_steps=0, optimizer_correction=correction
        ) as handle,
    ):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(step, rank)
            loss.backward()
            were_plain.append(handle.engine.reducer.is_dense)
            seconds[0] += 0.01 if were_plain[-1] else 0.04
            optimizer.step()
            losses.append(loss.item())
    return losses, were_plain


@pytest.mark.exhaustive
@pytest.mark.clock
def test_a_change_to_plain_ddp_leaves_the_loss_alone(pair):
    """Late in training the residual has many updates, and a single step with all updates overshoots."""
    for losses, were_plain in pair.run(losses_of_auto):
        changes = len(were_plain) - were_plain[::-1].index(False) - 2  # after the trials
        assert changes < STEPS - 40
        assert max(losses[changes:]) < 2 * max(losses[changes - 20 : changes])


_PLANNING_STEPS = 80


class MadeUpEngine:
    """The part of the engine that the choice uses, without clocks and processes. A plan is ready after some steps."""

    seconds = mock.Mock()

    def __init__(self, density):
        self.densities = self.recorder = self.totals = self
        self.sends_all = False
        self.memory = SimpleNamespace(corrects_adam=False)
        self.plan = None
        self._density, self._steps = density, 0

    def make_step(self):
        self._steps += 1
        if self._steps == _PLANNING_STEPS:
            self.plan = SimpleNamespace()

    def mean_over_ranks(self, number):
        return number

    def compression_stats(self):
        return {"density": self._density}


def live(theirs, ours, steps, density=0.01, device="cpu"):
    """Simulate steps with given durations. Return the DDP steps and the log lines."""
    engine, said, were_plain = MadeUpEngine(density), list[str](), list[bool]()
    with mock.patch.object(backend_choice, "perf_counter", return_value=0.0) as clock:
        choice = AutoBackend(engine, torch.device(device), said.append)
        for step in range(steps):
            were_plain.append(choice.wants_dense)
            clock.return_value += (theirs if choice.wants_dense else ours)(step)
            if not choice.wants_dense:
                engine.make_step()
            choice.end_step()
    return were_plain, said


def test_it_says_what_it_does_and_what_came_of_it():
    were_plain, (chosen,) = live(lambda step: 0.1, lambda step: 0.04, 200)
    assert chosen == (
        "a step takes 100.0 ms with DDP and 40.0 ms with compression (the difference may be wrong by 0.0 ms); chosen:"
        " compression, because compression saves 60.0%."
    )
    assert sum(were_plain) == 32


@pytest.mark.parametrize(
    ("ours", "density", "why"),
    [
        (0.0965, 0.001, "because compression saves 3.5%, and has to save 17%."),
        (0.09, 0.01, "because compression saves 10.0%, and has to save 12%."),
        (0.12, 0.01, "because compression saves 0.0%, and has to save 12%."),
    ],
)
def test_what_is_not_worth_the_delay_is_left_to_ddp(ours, density, why):
    with mock.patch.object(MadeUpEngine, "seconds") as seconds:
        were_plain, said = live(lambda step: 0.1, lambda step: ours, 300, density)
    assert seconds.clear.called  # the trials' exposed time does not count for DDP
    assert all(were_plain[-100:])
    assert said[-1].endswith(f"; chosen: plain DDP, {why}")


def test_it_compares_again_after_some_thousand_steps():
    were_plain, said = live(lambda step: 0.1 if step < 400 else 1.0, lambda step: 0.12, 5400)
    assert all(were_plain[200:5000])
    assert not any(were_plain[-100:])
    assert said[-1].endswith("chosen: compression, because compression saves 88.0%.")


def test_timed_steps_end_when_the_models_device_has_done_them_whichever_is_the_callers():
    device, module = torch.device("cuda", 1), mock.Mock()
    with mock.patch.object(torch, "get_device_module", return_value=module):
        live(lambda step: 0.1, lambda step: 0.04, 200, device=device)
    assert module.synchronize.call_args_list == [mock.call(device)] * module.synchronize.call_count
    assert module.synchronize.called


def timed(seconds, noise, seed, count=24):
    draw = random.Random(seed)
    return [seconds * (1 + draw.gauss(0.0, noise)) for _ in range(count)]


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_noise_alone_is_seldom_taken_for_a_gain(noise):
    wrong = sum(compare(timed(1.0, noise, seed), timed(1.0, noise, 1000 + seed), 0.1)[0] for seed in range(400))
    assert wrong <= 8


def test_a_turn_that_was_disturbed_decides_nothing():
    for ours, theirs in ([5.0] * 6, [1.0] * 6), ([0.7] * 6, [9.0] * 6):
        pays, _, reason = compare([*timed(0.7, 0.01, 0, 18), *ours], [*timed(1.0, 0.01, 1, 18), *theirs], density=0.01)
        assert pays
        assert 27 < float(reason.split()[-1].rstrip("%")) < 33
    ours, theirs = [*timed(1.0, 0.01, 0, 18), *[1.0] * 6], [*timed(1.0, 0.01, 1, 18), *[9.0] * 6]
    assert not compare(ours, theirs, density=0.01)[0]
