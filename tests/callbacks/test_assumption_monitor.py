"""AssumptionMonitor: what it logs, and when it warns."""

import pytest
from pytorch_lightning.loggers import CSVLogger

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.callbacks import AssumptionMonitor
from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.selection import Selection
from tests.helpers.loggers import rows_of
from tests.helpers.trainers import Adversaries, Small, run_fit

NAMES = [name for name, _ in Small().named_parameters()]


class Smallest(Compressor):
    """Send the smallest magnitudes, which leaves more over than chance would."""

    default_density = 0.1
    wire_format = "gather"

    def select(self, names, accumulated, counts):
        indices = [
            tensor.abs().topk(count, largest=False).indices.sort().values for tensor, count in zip(accumulated, counts)
        ]
        return [Selection(tensor[where], where, tensor.numel()) for tensor, where in zip(accumulated, indices)]


def fit_watched(rank, directory, compressor, every):
    monitor, logger = AssumptionMonitor(every), CSVLogger(directory, name="", version="")
    run_fit(rank, SparseDDPStrategy(compressor, density=0.1), logger=logger, callbacks=[monitor])
    return {name: float(mean.compute()) for name, mean in monitor.means.items()}


def test_delta_of_every_layer_is_logged_every_few_steps(pair, tmp_path):
    averages, same = pair.run(fit_watched, str(tmp_path), "lags", 5)
    rows = rows_of(tmp_path, "sparse/delta")
    assert [int(row["step"]) for row in rows] == [4, 9, 14]
    for row in rows:
        deltas = [float(row[f"sparse_parameters/delta/{name}"]) for name in NAMES]
        assert all(0 < delta <= 1 for delta in deltas)
        assert float(row["sparse/delta"]) == max(deltas)
    assert averages == same  # of what each rank knows by itself
    for name in NAMES:
        assert averages[name] == pytest.approx(
            sum(float(row[f"sparse_parameters/delta/{name}"]) for row in rows) / 3, rel=1e-5
        )


class Freezing(Small):
    """A model whose first layer is frozen after some batches."""

    def on_train_batch_start(self, batch, batch_idx):
        self.network[0].requires_grad_(batch_idx < 6)


def fit_freezing(rank):
    """Fit, with a look after each step; return of how many steps the mean of each layer is."""
    monitor = AssumptionMonitor(1)
    run_fit(rank, SparseDDPStrategy("lags", density=0.1), Freezing(), callbacks=[monitor])
    return {name: mean.update_count for name, mean in monitor.means.items()}


def test_layers_that_are_frozen_later_are_left_out_from_then_on(pair):
    for counts in pair.run(fit_freezing):
        assert counts == {name: 16 if name.startswith("network.2") else 6 for name in NAMES}


def fit_adversaries(rank):
    monitor = AssumptionMonitor(4)
    model = Adversaries(losses=2)
    run_fit(rank, SparseDDPStrategy("lags", density=0.1), model, callbacks=[monitor])
    return {name: (mean.update_count, float(mean.compute())) for name, mean in monitor.means.items()}, [
        name for name, _ in model.named_parameters()
    ]


def test_layers_of_all_optimizers_of_a_batch_are_looked_at(pair):
    for means, names in pair.run(fit_adversaries):
        assert sorted(means) == sorted(names)
        assert all(count == 4 and 0 < mean <= 1 for count, mean in means.values())


def fit_badly(rank, directory):
    """Fit with a selection worse than chance; return the warnings."""
    if rank > 0:
        fit_watched(rank, directory, Smallest(), 4)
        return []
    with pytest.warns(UserWarning, match="delta > 1") as caught:
        fit_watched(rank, directory, Smallest(), 4)
    return [str(each.message) for each in caught if "delta > 1" in str(each.message)]


def test_a_layer_that_exceeds_one_is_named_once(pair, tmp_path):
    warnings, _ = pair.run(fit_badly, str(tmp_path))
    assert "in step 3" in warnings[0]
    assert "network.2.weight" in warnings[0]
    assert all(sum(f"{name} (" in warning for warning in warnings) <= 1 for name in NAMES)
