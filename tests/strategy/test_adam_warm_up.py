"""The first steps of a corrected AdamW: they are DDP's, end when the second moment is known, and never come back."""

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Optional

import pytest
import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sparse import AdamCorrection, SparseDDPStrategy
from lightning_sparse.testing.equality import assert_same
from lightning_sparse.testing.pool import Pool
from tests.helpers.resuming import Numbered, fit_numbered, resume_exactly
from tests.helpers.trainers import Rows, Small, make_trainer, weights

DENSITY = 0.05


class Watched(Numbered):
    """A model that takes a note of the density of every step."""

    def __init__(
        self, save_after: Optional[int] = None, path: str = "", growth: float = 1.0, stop_after: Optional[int] = None
    ) -> None:
        super().__init__(save_after, path)
        self.growth, self.stop_after = growth, stop_after
        self.densities: list[float] = []
        self.seen = 0

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        return super().training_step(batch, batch_index) * self.growth**self.trainer.global_step

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if isinstance(self.trainer.strategy, SparseDDPStrategy):
            self.densities.append(self.trainer.strategy.compression_stats()["density"])
        self.seen += 1
        self.trainer.should_stop = self.seen == self.stop_after

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Outcome(NamedTuple):
    """What a training did: densities by step, parameters at the end, and batches in which it was left to DDP."""

    densities: list[float]
    weights: dict[str, Tensor]
    history: dict[int, dict[str, Tensor]]


def sparse(**arguments: Any) -> SparseDDPStrategy:
    """Build the strategy as users do: nothing is said about Adam."""
    return SparseDDPStrategy(**{"compressor": "lags", "density": DENSITY, **arguments})


def fit(
    rank: int,
    strategy: Any,
    model: dict[str, Any],
    trainer: dict[str, Any],
    ckpt_path: Optional[str] = None,
) -> Outcome:
    """Fit."""
    watched = Watched(**model)
    fit_numbered(rank, strategy, watched, ckpt_path, **trainer)
    return Outcome(watched.densities, weights(watched), watched.history)


LONG = {"max_epochs": 1000}  # Lightning's own default, which EarlyStopping is to end


def test_the_first_steps_are_ddps_to_the_bit(pools: dict[int, Pool]) -> None:
    stopped = {"stop_after": 10}
    for ours, theirs in zip(
        pools[3].run(fit, sparse(), stopped, LONG), pools[3].run(fit, DDPStrategy(), stopped, LONG)
    ):
        assert ours.densities == [1.0] * 10
        assert_same(ours.history, theirs.history)


def test_a_training_that_stops_early_is_compressed_soon(pair: Pool) -> None:
    one, other = pair.run(fit, sparse(), {"stop_after": 130}, LONG)
    assert one.densities == other.densities
    assert_same(one.weights, other.weights)
    assert one.densities[:10] == [1.0] * 10
    falling = one.densities[10:110]
    assert all(later <= earlier + 1e-9 for earlier, later in pairwise(falling))
    assert falling[20] < 0.8
    assert max(one.densities[110:]) < 1.2 * DENSITY


def test_gradients_that_grow_are_sent_whole_for_longer_but_not_for_ever(pair: Pool) -> None:
    for found in pair.run(fit, sparse(), {"growth": 1.2, "stop_after": 105}, LONG):
        assert found.densities[:100] == [1.0] * 100
        assert found.densities[104] <= 1.0
    for found in pair.run(fit, sparse(), {"growth": 1.2}, {"max_epochs": 4}):
        assert found.densities[9] == 1.0  # 24 steps in all: a hundredth is less than the least
        assert found.densities[14] < 0.1


def test_a_resume_with_more_epochs_does_not_go_back(pair: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "adam.ckpt")
    pair.run(fit, sparse(), {"save_after": 36, "path": path}, {"max_epochs": 6})
    for epochs in (200, 100_000):
        resumed = {"max_epochs": epochs}
        for found in pair.run(fit, sparse(), {"stop_after": 6}, resumed, path):
            assert max(found.densities) < 1.2 * DENSITY


def resume(rank: int, path: str, save_after: int) -> Any:
    """Save and go on."""
    return resume_exactly(rank, sparse, path, save_after, {"max_epochs": 4}, Watched)


@pytest.mark.parametrize("save_after", [3, 7, 10, 11, 14])
def test_resumed_in_the_midst_of_it_goes_on_to_the_bit(pair: Pool, tmp_path: Path, save_after: int) -> None:
    for _, found in pair.run(resume, str(tmp_path / "adam.ckpt"), save_after):
        assert found == []


def test_max_steps_beside_max_epochs_is_no_length(pair: Pool) -> None:
    correction = AdamCorrection(fall_steps=0)
    for found in pair.run(fit, sparse(optimizer_correction=correction), {}, {"max_epochs": 3, "max_steps": 100_000}):
        assert found.densities[9] == 1.0
        assert max(found.densities[10:]) < 1.2 * DENSITY


class LateData(Small):
    """A model that makes its data when training begins."""

    rows: Rows

    def on_fit_start(self) -> None:
        self.rows = Rows(32)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.rows, batch_size=4)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def fit_late(rank: int) -> int:
    """Fit; return the steps made."""
    trainer = make_trainer(rank, sparse(), limit_val_batches=0)
    trainer.fit(LateData())
    return trainer.global_step


def test_data_may_be_made_in_on_fit_start(pair: Pool) -> None:
    assert pair.run(fit_late) == [4, 4]


class TwoKinds(LightningModule):
    """One network trained by AdamW, one by SGD."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.densities: list[float] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.first.parameters()), torch.optim.SGD(self.second.parameters(), lr=0.1)

    def training_step(self, batch: Tensor, batch_index: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward((self.second(self.first(batch)) - batch).square().mean())
        for optimizer in self.optimizers():
            optimizer.step()
        self.densities.append(self.trainer.strategy.compression_stats()["density"])

    train_dataloader = Small.train_dataloader


def fit_two_kinds(rank: int) -> tuple[list[float], dict[str, Tensor]]:
    """Fit."""
    model = TwoKinds()
    make_trainer(rank, sparse(), max_epochs=2).fit(model)
    return model.densities[1:], weights(model)  # in the first training_step, statistics are of no step yet


def test_beside_an_optimizer_that_is_not_corrected(pair: Pool) -> None:
    (densities, one), (_, other) = pair.run(fit_two_kinds)
    assert_same(one, other)
    assert densities[:9] == [1.0] * 9
    assert densities[-1] < 1.2 * DENSITY
