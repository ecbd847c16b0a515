"""The delta of LAGS' assumption, measured in training, against its definition."""

from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.callbacks import LayerDelta
from lightning_sparse.testing.pool import Pool
from tests.helpers.sparse_ddp import Edges, backpropagate, batch, sparse_ddp, watch_gradients
from tests.helpers.trainers import Small, make_trainer, weights


def sample(rank: int, density: float) -> list[tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]]:
    """Exchange three steps; return accumulated, applied and deltas of each."""
    torch.manual_seed(0)
    book = []
    with sparse_ddp(Edges(), density=density) as (ddp, engine):
        gradients = watch_gradients(ddp.module)
        residuals = {name: torch.zeros_like(gradient).flatten() for name, gradient in gradients.items()}
        for step in range(3):
            if step:
                engine.sample_layer_deltas()
            engine.begin_backward()
            backpropagate(ddp, engine, ddp(batch(rank, step)))
            accumulated = {name: residuals[name] + gradient.flatten() for name, gradient in gradients.items()}
            applied = {name: parameter.grad.flatten().clone() for name, parameter in ddp.module.named_parameters()}
            book.append((accumulated, applied, engine.layer_deltas()))
            residuals = {name: tensor.clone() for name, tensor in engine.memory.state_dict()["residual"].items()}
    return book


def test_delta_is_what_its_definition_says(pair: Pool) -> None:
    density = 0.05
    for (first, applied, deltas), (second, _, same) in list(zip(*pair.run(sample, density)))[1:]:
        assert deltas == same
        for name, delta in deltas.items():
            mean = (first[name].double() + second[name].double()) / 2
            share = max(1, round(density * mean.numel())) / mean.numel()
            expected = (mean - applied[name]).square().sum() / max(1e-30, (1 - share)) / mean.square().sum()
            torch.testing.assert_close(delta.double(), expected if share < 1 else 0 * expected, rtol=1e-4, atol=1e-6)


def test_it_is_not_measured_unless_asked_for(pair: Pool) -> None:
    for book in pair.run(sample, 0.05):
        assert book[0][2] == {}


class Sampled(Small):
    """A model that asks for deltas every fourth step, if told to."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.asks = asks
        self.deltas = LayerDelta([name for name, _ in self.named_parameters()])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Ask."""
        if self.asks and batch_idx % 4 == 0:
            self.trainer.strategy.engine.sample_layer_deltas()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Take the answer."""
        if self.asks and batch_idx % 4 == 0:
            self.deltas.update(self.trainer.strategy.engine.layer_deltas())
        elif self.asks:
            assert self.trainer.strategy.engine.layer_deltas() == {}


def fit_sampled(rank: int, asks: bool) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Fit; return the weights and the average deltas."""
    model: LightningModule = Sampled(asks)
    trainer: Trainer = make_trainer(rank, SparseDDPStrategy("lags", density=0.05))
    trainer.fit(model)
    averages = {name: float(delta) for name, delta in model.deltas.compute().items()} if asks else {}
    return weights(model), averages


def test_sampling_in_training_changes_nothing_and_finds_top_k_better_than_random(pair: Pool) -> None:
    (sampled, averages), (_, same) = pair.run(fit_sampled, True)
    (unsampled, _), _ = pair.run(fit_sampled, False)
    assert averages == same
    assert averages.keys() == sampled.keys()
    assert all(0 < delta < 1 for delta in averages.values())
    assert all(torch.equal(sampled[name], unsampled[name]) for name in sampled)
