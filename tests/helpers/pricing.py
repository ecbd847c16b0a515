"""Models whose steps take, by their clock, what a test decides."""

import weakref
from unittest import mock

from torch.utils.data import DataLoader

from lightning_sparse.loop import backend_choice
from tests.helpers.trainers import Rows, Small

SETTLED = 300  # steps, and three epochs, after which the first choice has been made, with room to spare
_ALL_ELSE = 5e-3  # seconds of a step, whoever exchanges


def nothing(step):
    return 0.0


def much(step):
    return 30e-3


class Priced(Small):
    """A model with a price on each step that is left to DDP, and one on each of the engine's, for a clock to tell."""

    def __init__(self, plain_cost, engine_cost):
        super().__init__()
        self.plain_cost, self.engine_cost = plain_cost, engine_cost
        self.were_plain = []
        self.wrappers = []
        self.waiting = []
        self.seconds = 0.0

    def train_dataloader(self):
        return DataLoader(Rows(800), batch_size=4)

    def training_step(self, batch, batch_index):
        strategy = self.trainer.strategy
        self.were_plain.append(strategy.is_dense)
        if strategy.model not in [wrapper() for wrapper in self.wrappers]:
            self.wrappers.append(weakref.ref(strategy.model))
        cost = self.plain_cost if strategy.is_dense else self.engine_cost
        self.seconds += _ALL_ELSE + cost(self.global_step)
        residuals = strategy.engine.state_dict()["memory"]["residual"].values()
        self.waiting.append(sum(float(residual.abs().sum()) for residual in residuals))
        return super().training_step(batch, batch_index)

    def fit(self, trainer, **arguments):
        with mock.patch.object(backend_choice, "perf_counter", self.clock):
            trainer.fit(self, **arguments)

    def clock(self):
        return self.seconds
