"""One level or two: what is taken, what is refused, and a fit on two nodes that four processes play."""

import math
from typing import Any

import pytest
import torch
from pytorch_lightning.loggers.logger import DummyLogger

from lightning_sparse import AdamCorrection, SparseDDPStrategy
from lightning_sparse.callbacks import (
    AdaptiveDensity,
    AssumptionMonitor,
    CompressionMonitor,
    ErrorBudget,
    ReplicaSentinel,
)
from lightning_sparse.compressors import DGC
from lightning_sparse.engine.settings import Settings
from lightning_sparse.strategy import trainer as strategy_module
from lightning_sparse.strategy.levels import ranks_of_node
from lightning_sparse.testing.equality import assert_same
from lightning_sparse.testing.pool import Pool
from tests.helpers.trainers import Small, run_fit, weights

CHOICES = {
    "two nodes of two": ("topk", [0, 0, 1, 1], 2),
    "four nodes of eight": ("lags", [rank // 8 for rank in range(32)], 8),
    "one node": ("topk", [0, 0, 0, 0], 1),
    "nodes of one": ("topk", [0, 1, 2], 1),
    "ragged": ("topk", [0, 0, 1], 1),
    "in turns": ("topk", [0, 1, 0, 1], 1),
    "a method that looks at all": ("exdyna", [0, 0, 1, 1], 1),
    "replicas that drift apart": ("a2sgd", [0, 0, 1, 1], 1),
}


@pytest.mark.parametrize(("compressor", "nodes", "expected"), CHOICES.values(), ids=CHOICES)
def test_auto_takes_two_levels_where_there_are(compressor: str, nodes: list[int], expected: int) -> None:
    assert ranks_of_node(Settings(compressor, None, "merged", "float32"), nodes) == expected
    assert ranks_of_node(Settings(compressor, None, "merged", "float32", levels=1), nodes) == 1


REFUSALS = {
    "one node": ([0, 0], "all ranks are on one node"),
    "nodes of one": ([0, 1], "each node has one rank"),
    "ragged": ([0, 0, 1], r"different numbers of ranks \(2, 1\): start equally many"),
    "in turns": ([0, 1] * 8, r"do not follow one another .* 0, 1, 0, 1, 0, 1, 0, 1, \.\.\.\).*distribution=block"),
}


@pytest.mark.parametrize(("nodes", "message"), REFUSALS.values(), ids=REFUSALS)
def test_two_levels_are_refused_where_there_are_none(nodes: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=f"levels=2 was given, but .*{message}"):
        ranks_of_node(Settings("topk", 0.01, "merged", "float32", levels=2), nodes)


@pytest.mark.parametrize("compressor", ["exdyna", "micro", "a2sgd", "sdagc"])
def test_two_levels_are_refused_to_methods_that_cannot_work_on_shares(compressor: str) -> None:
    with pytest.raises(ValueError, match=r"levels=2 was given, but .*: leave it out, or choose .*'topk', 'lags'"):
        SparseDDPStrategy(compressor, levels=2)
    SparseDDPStrategy(compressor, levels="auto")


@pytest.mark.parametrize("levels", [0, 3, "two", None])
def test_other_numbers_of_levels_are_refused(levels: Any) -> None:
    with pytest.raises(ValueError, match=f"levels={levels!r} must be 'auto' .* 1 .* or 2"):
        SparseDDPStrategy(levels=levels)


class Trained(Small):
    """A model trained by an optimizer of a kind, with its loss at the start and at the end."""

    def __init__(self, kind: type, **arguments: Any) -> None:
        super().__init__()
        self.kind, self.arguments = kind, arguments
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_index: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_index)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.kind(self.parameters(), **self.arguments)


def fit(rank: int, settings: dict[str, Any], kind: type, trainer: dict[str, Any]) -> tuple[Any, Any, Any, list[str]]:
    """Fit on two nodes; return weights, statistics, losses and what was said."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategy_module, "rank_zero_info", said.append)
        model = Trained(kind, lr=1e-2 if kind is torch.optim.AdamW else 0.1)
        strategy = SparseDDPStrategy(**settings)
        run_fit(rank, strategy, model, **{"node_ranks": 2, "max_epochs": 4, **trainer})
    return weights(model), strategy.compression_stats(), model.losses, said


CORRECTION = AdamCorrection(dense_steps=4, fall_steps=4, refresh_steps=2)
FITS: dict[str, tuple[dict[str, Any], type, dict[str, Any]]] = {
    "AdamW": ({"optimizer_correction": CORRECTION}, torch.optim.AdamW, {}),
    "AdamW, clipped": ({"optimizer_correction": CORRECTION}, torch.optim.AdamW, {"gradient_clip_val": 0.1}),
    "AdamW, owners": ({"optimizer_correction": CORRECTION, "exchange": "owners"}, torch.optim.AdamW, {}),
    "SGD, accumulated": ({}, torch.optim.SGD, {"accumulate_grad_batches": 2, "max_epochs": 10}),
    "momentum": ({"compressor": "dgc", "warmup_epochs": 1}, torch.optim.SGD, {}),
    "clipped before": ({"compressor": DGC(clip_norm=0.5), "warmup_epochs": 0}, torch.optim.SGD, {}),
    "bf16": ({"wire": "bfloat16"}, torch.optim.SGD, {"precision": "bf16-mixed"}),
    "auto": ({"schedule": "auto"}, torch.optim.SGD, {}),
}


@pytest.mark.parametrize(("settings", "kind", "trainer"), FITS.values(), ids=FITS)
def test_a_fit_on_two_nodes(
    pools: dict[int, Pool], settings: dict[str, Any], kind: type, trainer: dict[str, Any]
) -> None:
    answers = pools[4].run(fit, {"density": 0.05, **settings}, kind, trainer)
    for parameters, stats, losses, _ in answers:
        assert_same(parameters, answers[0][0])
        assert sum(losses[-8:]) < sum(losses[:8])  # of an epoch each
        assert stats["link_bytes"] < stats["wire_bytes"] or math.isnan(stats["select_seconds"])
        assert 0 < stats["total_link_bytes"] < stats["total_wire_bytes"]
    assert any("two levels, the 2 ranks of each of 2 nodes" in line for line in answers[0][3])
    assert "to other nodes) where DDP sends" in answers[0][3][-1]


def test_one_level_on_two_nodes_if_it_is_asked_for(pools: dict[int, Pool]) -> None:
    for _, stats, _, said in pools[4].run(fit, {"levels": 1, "density": 0.05}, torch.optim.SGD, {}):
        assert "link_bytes" not in stats
        assert not any("two levels" in line for line in said)


class Noting(DummyLogger):
    """A logger that keeps the latest of all that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: dict[str, float] = {}

    def log_metrics(self, metrics: dict[str, float], *args: Any, **kwargs: Any) -> None:
        self.logged.update(metrics)


def fit_freezing(rank: int) -> tuple[Any, bool]:
    """Fit on two nodes while a layer is frozen for an epoch; return weights, and whether more waited of it then."""
    model = Freezing(torch.optim.SGD, lr=0.1)
    run_fit(rank, SparseDDPStrategy("topk", density=0.05), model, node_ranks=2, max_epochs=3)
    return weights(model), model.has_waited


def test_what_waits_of_a_frozen_layer_waits(pools: dict[int, Pool]) -> None:
    for parameters, has_waited in (answers := pools[4].run(fit_freezing)):
        assert_same(parameters, answers[0][0])
        assert has_waited


class Freezing(Trained):
    """A model whose first layer is frozen for an epoch."""

    def on_train_epoch_start(self) -> None:
        self.network[0].requires_grad_(self.current_epoch != 1)
        if self.current_epoch:
            strategy: Any = self.trainer.strategy
            strategy.engine.worker.settle()
            waiting = strategy.engine.memory.state_dict()["residual"]["network.0.weight"].clone()
            self.has_waited = self.current_epoch == 1 or torch.equal(waiting, self.waiting)
            self.waiting = waiting


def fit_watched(rank: int, compressor: str) -> tuple[Any, dict[str, float]]:
    """Fit on two nodes with what looks on; return weights, and what was logged."""
    callbacks = [
        CompressionMonitor(by_parameter=True),
        AssumptionMonitor(every_n_steps=1),
        AdaptiveDensity([ErrorBudget(budget=2.0)], every_n_steps=1),
        ReplicaSentinel(every_n_steps=1),
    ]
    model = Trained(torch.optim.SGD, lr=0.1)
    logger = Noting()
    strategy = SparseDDPStrategy(compressor, density=0.05)
    settings = {"node_ranks": 2, "max_epochs": 1, "callbacks": callbacks, "logger": logger, "log_every_n_steps": 1}
    run_fit(rank, strategy, model, **settings)
    return weights(model), logger.logged


@pytest.mark.parametrize("compressor", ["topk", "lags"])
def test_whoever_looks_on_sees_shares(pools: dict[int, Pool], compressor: str) -> None:
    answers = pools[4].run(fit_watched, compressor)
    for parameters, _ in answers:
        assert_same(parameters, answers[0][0])
    logged = answers[0][1]
    assert 0 < logged["sparse/link_bytes"] < logged["sparse/wire_bytes"]
    assert 0 <= logged["sparse_parameters/delta/network.0.weight"] <= 1
    assert 0.04 <= logged["sparse/density"] <= 1
