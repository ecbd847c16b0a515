"""Models whose steps take, by their clock, what a test decides."""

import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sparse.strategy import backend_choice
from tests.helpers.trainers import Rows, Small

SETTLED = 300  # steps, and three epochs, after which the first choice has been made, with room to spare
_ALL_ELSE = 5e-3  # seconds of a step, whoever exchanges

Cost = Callable[[int], float]  # step -> seconds


def nothing(step: int) -> float:
    """Cost nothing."""
    return 0.0


def much(step: int) -> float:
    """Cost more than all else in a step."""
    return 30e-3


class Priced(Small):
    """A model with a price on each step that is left to DDP, and one on each of the engine's, for a clock to tell."""

    def __init__(self, plain_cost: Cost, engine_cost: Cost) -> None:
        super().__init__()
        self.plain_cost, self.engine_cost = plain_cost, engine_cost
        self.were_plain: list[bool] = []
        self.wrappers: list[weakref.ref[Any]] = []
        self.waiting: list[float] = []
        self.seconds = 0.0

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Rows(800), batch_size=4)

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        strategy = self.trainer.strategy
        self.were_plain.append(strategy.is_plain)
        if strategy.model not in [wrapper() for wrapper in self.wrappers]:
            self.wrappers.append(weakref.ref(strategy.model))
        cost = self.plain_cost if strategy.is_plain else self.engine_cost
        self.seconds += _ALL_ELSE + cost(self.global_step)
        residuals = strategy.engine.state_dict()["memory"]["residual"].values()
        self.waiting.append(sum(float(residual.abs().sum()) for residual in residuals))
        return super().training_step(batch, batch_index)

    def fit(self, trainer: Any, **arguments: Any) -> None:
        with mock.patch.object(backend_choice, "perf_counter", self.clock):
            trainer.fit(self, **arguments)

    def clock(self) -> float:
        return self.seconds
