from itertools import groupby
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_sparse import AdamCorrection, SparseDDPStrategy, sparsify_gradients
from lightning_sparse.loop import backend_choice
from lightning_sparse.testing.tensors import assert_same
from tests.helpers.devices import DEVICE
from tests.helpers.trainers import Line, Rows, Small, make_trainer, weights

pytestmark = pytest.mark.clock
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
def test_a_change_to_plain_ddp_leaves_the_loss_alone(pair):
    """Late in training the residual has many updates, and a single step with all updates overshoots."""
    for losses, were_plain in pair.run(losses_of_auto):
        changes = len(were_plain) - were_plain[::-1].index(False) - 2  # after the trials
        assert changes < STEPS - 40
        assert max(losses[changes:]) < 2 * max(losses[changes - 20 : changes])
