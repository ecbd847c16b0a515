"""AssumptionMonitor: what it logs, and when it warns."""

import csv
import os
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.callbacks import AssumptionMonitor
from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.selection import Selection
from lightning_sparse.testing.pool import Pool
from tests.helpers.trainers import Small, run_fit, weights

NAMES = [name for name, _ in Small().named_parameters()]


class Smallest(Compressor):
    """Send the smallest magnitudes, which leaves more over than chance would."""

    default_density = 0.1
    wire_format = "gather"

    def select(self, names: Any, accumulated: Any, counts: Any) -> list[Selection]:
        """Choose them."""
        indices = [
            tensor.abs().topk(count, largest=False).indices.sort().values for tensor, count in zip(accumulated, counts)
        ]
        return [Selection(tensor[where], where, tensor.numel()) for tensor, where in zip(accumulated, indices)]


def fit_watched(
    rank: int, directory: str, compressor: Any, every: Optional[int]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Fit; return the weights and the averages."""
    monitor = AssumptionMonitor(every or 1)
    trainer = run_fit(
        rank,
        SparseDDPStrategy(compressor, density=0.1),
        logger=CSVLogger(directory, name="", version="") if every else False,
        callbacks=[monitor] if every else [],
    )
    averages = {name: float(mean.compute()) for name, mean in monitor.means.items()}
    return weights(trainer.lightning_module), averages


def test_delta_of_every_layer_is_logged_every_few_steps(pair: Pool, tmp_path: Path) -> None:
    (_, averages), (_, same) = pair.run(fit_watched, str(tmp_path), "lags", 5)
    with (tmp_path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["sparse/delta"]]
    assert [int(row["step"]) for row in rows] == [4, 9, 14]
    for row in rows:
        deltas = [float(row[f"sparse_parameters/delta/{name}"]) for name in NAMES]
        assert all(0 < delta <= 1 for delta in deltas)
        assert float(row["sparse/delta"]) == max(deltas)
    assert averages == same
    for name in NAMES:
        assert averages[name] == pytest.approx(
            sum(float(row[f"sparse_parameters/delta/{name}"]) for row in rows) / 3, rel=1e-5
        )


class Freezing(Small):
    """A model whose first layer is frozen after some batches."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Freeze it."""
        self.network[0].requires_grad_(batch_idx < 6)


def fit_freezing(rank: int) -> dict[str, int]:
    """Fit, with a look after each step; return of how many steps the mean of each layer is."""
    monitor = AssumptionMonitor(1)
    run_fit(rank, SparseDDPStrategy("lags", density=0.1), Freezing(), callbacks=[monitor])
    return {name: mean.update_count for name, mean in monitor.means.items()}


def test_layers_that_are_frozen_later_are_left_out_from_then_on(pair: Pool) -> None:
    for counts in pair.run(fit_freezing):
        assert counts == {name: 16 if name.startswith("network.2") else 6 for name in NAMES}


def leave_a_seed(rank: int) -> None:
    """Leave in the environment what ``seed_everything`` of Lightning does."""
    os.environ["PL_GLOBAL_SEED"] = "1"


def test_watching_changes_no_bit(pair: Pool, tmp_path: Path) -> None:
    pair.run(leave_a_seed)  # with which a layer exceeds one, so that this fails if it stays
    (watched, _), _ = pair.run(fit_watched, str(tmp_path), "lags", 2)
    (alone, _), _ = pair.run(fit_watched, str(tmp_path), "lags", None)
    assert all(torch.equal(watched[name], alone[name]) for name in alone)


def fit_badly(rank: int, directory: str) -> list[str]:
    """Fit with a selection worse than chance; return the warnings."""
    if rank > 0:
        fit_watched(rank, directory, Smallest(), 4)
        return []
    with pytest.warns(UserWarning, match="delta > 1") as caught:
        fit_watched(rank, directory, Smallest(), 4)
    return [str(each.message) for each in caught if "delta > 1" in str(each.message)]


def test_a_layer_that_exceeds_one_is_named_once(pair: Pool, tmp_path: Path) -> None:
    warnings, _ = pair.run(fit_badly, str(tmp_path))
    assert "in step 3" in warnings[0]
    assert "network.2.weight" in warnings[0]
    assert all(sum(f"{name} (" in warning for warning in warnings) <= 1 for name in NAMES)


def refused(rank: int, compressor: str) -> None:
    """Try a method that selects nothing."""
    with pytest.raises(ValueError, match="AssumptionMonitor"):
        run_fit(rank, SparseDDPStrategy(compressor), callbacks=[AssumptionMonitor()])


@pytest.mark.parametrize("compressor", ["a2sgd", "dense"])
def test_a_method_that_selects_nothing_is_refused(pair: Pool, compressor: str) -> None:
    pair.run(refused, compressor)
