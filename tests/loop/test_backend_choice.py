from itertools import groupby
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.loop import backend_choice
from tests.helpers.trainers import Rows, Small, make_trainer, weights

pytestmark = pytest.mark.clock
SETTLED = 300  # steps, or three epochs, after which the first choice is made
_ALL_ELSE = 5e-3  # seconds of a step outside of the exchange


def nothing(step):
    return 0.0


def much(step):
    return 30e-3


class Priced(Small):
    def __init__(self, plain_cost, engine_cost):
        super().__init__()
        self.plain_cost, self.engine_cost = plain_cost, engine_cost
        self.were_plain = []
        self.waiting = []
        self.seconds = 0.0

    def train_dataloader(self):
        return DataLoader(Rows(800), batch_size=4)

    def training_step(self, batch, batch_index):
        strategy = self.trainer.strategy
        self.were_plain.append(strategy.engine.reducer.is_dense)
        cost = self.plain_cost if strategy.engine.reducer.is_dense else self.engine_cost
        self.seconds += _ALL_ELSE + cost(self.global_step)
        residuals = strategy.engine.state_dict()["memory"]["residual"].values()
        self.waiting.append(sum(float(residual.abs().sum()) for residual in residuals))
        return super().training_step(batch, batch_index)

    def fit(self, trainer, **arguments):
        with mock.patch.object(backend_choice, "perf_counter", self.clock):
            trainer.fit(self, **arguments)

    def clock(self):
        return self.seconds


def fit_priced(rank, costs, steps):
    model = Priced(*costs)
    strategy = SparseDDPStrategy("lags", 0.05, schedule="auto")
    trainer = make_trainer(rank, strategy, max_epochs=-1, max_steps=steps, limit_val_batches=0)
    model.fit(trainer)
    return weights(model), model.were_plain, model.waiting, strategy.compression_stats()


def assert_one_model(answers):
    (first, plain, *_), (second, other_plain, *_) = answers
    assert plain == other_plain
    assert all(torch.equal(first[name], second[name]) and first[name].isfinite().all() for name in first)


def test_a_fast_network_is_left_to_ddp_with_nothing_waiting(pair):
    answers = pair.run(fit_priced, (nothing, much), SETTLED)
    assert_one_model(answers)
    for _, were_plain, waiting, stats in answers:
        turns = [len(list(run)) for was_plain, run in groupby(were_plain) if was_plain]
        assert turns[0] == turns[1] < 20
        assert all(were_plain[-60:])
        assert any(waiting)
        assert waiting[-1] == 0
        assert stats["density"] == stats["compression_ratio"] == 1.0


@pytest.mark.exhaustive
def test_a_slow_network_is_not_left_to_ddp(pair):
    answers = pair.run(fit_priced, (much, nothing), SETTLED)
    assert_one_model(answers)
    for _, were_plain, waiting, _ in answers:
        assert 0 < sum(were_plain) < 40
        assert not were_plain[-1]
        assert waiting[-1] > 0
