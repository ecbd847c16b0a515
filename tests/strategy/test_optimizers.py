"""Momentum that the memory takes over from the optimizer, and gives back."""

import warnings
from functools import partial
from typing import Any, Optional

import pytest
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.compressors import DGC, SDAGC
from lightning_sparse.testing.pool import Pool
from tests.helpers.trainers import Small, WithAdam, WithSGD, make_trainer, run_fit, weights


def fit_both(rank: int, arguments: dict[str, Any], epochs: int = 1) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Fit behind momentum correction at density 1, and behind plain DDP."""
    fitted = []
    for strategy in (SparseDDPStrategy(DGC(), density=1.0, warmup_epochs=0), DDPStrategy()):
        model = WithSGD(**arguments)
        make_trainer(rank, strategy, max_epochs=epochs).fit(model)
        fitted.append(weights(model))
    return fitted[0], fitted[1]


@pytest.mark.parametrize("arguments", [{}, {"nesterov": True}, {"one_cycle": True}, {"momentum": 0.0}], ids=str)
def test_sent_whole_momentum_in_the_memory_is_momentum_in_the_optimizer(pair: Pool, arguments: dict[str, Any]) -> None:
    for ours, ddp in pair.run(fit_both, arguments):
        for name in ddp:
            torch.testing.assert_close(ours[name], ddp[name], rtol=1e-4, atol=1e-6)


class InPieces(WithSGD):
    """A model that backpropagates its loss in pieces before the optimizer steps; the first and the last have heads."""

    def __init__(self, pieces: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.automatic_optimization = False
        self.pieces = pieces
        self.applied: dict[str, Tensor] = {}
        self.heads = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])

    def training_step(self, batch: Tensor, batch_index: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad(set_to_none=batch_index % 2 == 0)
        for piece in range(self.pieces):
            outputs = self.network(batch)
            loss = (outputs - batch).square().mean() / self.pieces
            for head, its_piece in zip(self.heads, (0, self.pieces - 1)):
                if piece == its_piece:
                    loss = loss + (head(outputs.detach()) - batch).square().mean()
            self.manual_backward(loss)
        for name, parameter in self.named_parameters():
            self.applied[name] = self.applied.get(name, 0) + parameter.grad.flatten()  # type: ignore[union-attr]
        optimizer.step()


def fit_in_pieces(
    rank: int, compressor: Any, density: float, arguments: dict[str, Any], strategy: dict[str, Any]
) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Fit with one backward a step and with three; return weights, and the sum of what was applied and is owed."""
    fitted = []
    for pieces in (1, 3):
        model = InPieces(pieces, **arguments)
        ours = SparseDDPStrategy(compressor, density, warmup_epochs=0, find_unused_parameters=True, **strategy)
        trainer = make_trainer(rank, ours, max_epochs=2)
        trainer.fit(model)
        assert trainer.strategy._final_state is not None
        owed = trainer.strategy._final_state["memory"]["residual"]
        fitted.append((weights(model), {name: applied + owed[name] for name, applied in model.applied.items()}))
    return fitted


@pytest.mark.parametrize("arguments", [{}, {"nesterov": True}, {"weight_decay": 0.01}], ids=str)
@pytest.mark.parametrize("strategy", [{}, {"gradient_as_bucket_view": False}], ids=str)
def test_several_backwards_in_one_step_are_one_step_of_momentum(
    pair: Pool, arguments: dict[str, Any], strategy: dict[str, Any]
) -> None:
    for (one, _), (several, _) in pair.run(fit_in_pieces, DGC(), 1.0, arguments, strategy):
        for name in one:
            torch.testing.assert_close(several[name], one[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("compressor", "momentum"),
    [(DGC(masks_momentum=False), 0.9), ("topk", 0.0), ("omgs", 0.0)],
    ids=["dgc", "topk", "omgs"],
)
def test_the_model_is_owed_as_much_after_several_backwards_as_after_one(
    pair: Pool, compressor: Any, momentum: float
) -> None:
    # With a learning rate so small, gradients do not depend on what was selected before.
    answers = pair.run(fit_in_pieces, compressor, 0.05, {"lr": 1e-6, "momentum": momentum}, {})
    one, several = ({name: sum(total[name] for _, total in fits) for name in fits[0][1]} for fits in zip(*answers))
    for name in one:
        torch.testing.assert_close(several[name], one[name], rtol=1e-3, atol=1e-4)


def test_weight_decay_stays_as_strong_while_the_momentum_is_away(pair: Pool) -> None:
    # In 192 steps the decay takes away more than half of a weight; a tenth of it would be seen at once.
    for ours, ddp in pair.run(fit_both, {"weight_decay": 0.01, "lr": 0.05}, 12):
        for name in ("network.0.weight", "network.2.weight"):
            assert (ours[name] - ddp[name]).norm() < 0.05 * ddp[name].norm()


def fit_and_save(rank: int, path: str) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Fit with momentum correction, saving in between; return the saved and final group, and the group in training."""
    during = []

    class Watched(WithSGD):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            during.append(optimizer.param_groups[0]["momentum"])

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                self.trainer.save_checkpoint(path)

    trainer = run_fit(rank, SparseDDPStrategy(DGC()), Watched(weight_decay=0.01, nesterov=True))
    saved = torch.load(path, weights_only=True)["optimizer_states"][0]["param_groups"][0]
    return saved, dict(trainer.optimizers[0].param_groups[0]), max(during)


def test_what_was_taken_is_given_back_and_is_in_the_checkpoint(pair: Pool, tmp_path: Any) -> None:
    for saved, final, during in pair.run(fit_and_save, str(tmp_path / "momentum.ckpt")):
        assert during == 0.0
        for group in (saved, final):
            assert (group["momentum"], group["nesterov"], group["weight_decay"]) == (0.9, True, 0.01)


def refused(rank: int, compressor: Any, model: Any) -> str:
    """Fit what must be refused; return the message."""
    try:
        make_trainer(rank, SparseDDPStrategy(compressor)).fit(model)
    except ValueError as error:
        return str(error)
    return "was not refused"


class WithOptimizer(Small):
    """A model trained by any optimizer."""

    def __init__(self, kind: type, **arguments: Any) -> None:
        super().__init__()
        self.kind, self.arguments = kind, arguments

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.kind(self.parameters(), **self.arguments)


WithRMSprop = partial(WithOptimizer, torch.optim.RMSprop)
REFUSALS = {
    "rmsprop": (DGC(), WithRMSprop(), "RMSprop works on the gradients themselves"),
    "rmsprop and sdagc": (SDAGC(), WithRMSprop(), "compressor=DGC(momentum=None)"),
    "a number as momentum": (DGC(momentum=0.5), WithAdam(), "Adam works on the gradients themselves"),
    "dampening": (DGC(), WithSGD(dampening=0.5), "cannot take over SGD's dampening=0.5: set it to 0"),
    "given twice": (DGC(momentum=0.5), WithSGD(), "momentum=0.5 was given to the memory and momentum=0.9 to SGD"),
}


@pytest.mark.parametrize(("compressor", "model", "message"), REFUSALS.values(), ids=REFUSALS)
def test_an_optimizer_that_makes_no_sense_is_refused(pair: Pool, compressor: Any, model: Any, message: str) -> None:
    for answer in pair.run(refused, compressor, model):
        assert message in answer


def warned_of(rank: int, compressor: Any, density: Optional[float], model: Any) -> list[str]:
    """Fit one batch; return what was warned of on this rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(rank, SparseDDPStrategy(compressor, density=density), max_steps=1)
        warnings.filterwarnings("always", message=".*from what arrives.*")
        trainer.fit(model)
    return [str(each.message) for each in caught if "from what arrives" in str(each.message)]


WARNED = {
    "RMSprop": ("lags", 0.01, torch.optim.RMSprop, True),
    "Adagrad": ("topk", 0.01, torch.optim.Adagrad, True),
    "NAdam": ("exdyna", 0.01, torch.optim.NAdam, True),
    "Adafactor": ("topk", 0.5, torch.optim.Adafactor, True),
    "AdamW": ("lags", 0.01, torch.optim.AdamW, False),
    "Adam with momentum of its own": ("dgc", 0.01, torch.optim.Adam, False),
    "whole": ("topk", 1.0, torch.optim.RMSprop, False),
    "dense": ("dense", None, torch.optim.RMSprop, False),
    "SGD": ("topk", 0.01, torch.optim.SGD, False),
    "ASGD": ("topk", 0.01, torch.optim.ASGD, False),
}


@pytest.mark.parametrize(("compressor", "density", "kind", "is_warned"), WARNED.values(), ids=WARNED)
def test_an_optimizer_that_learns_from_sparse_gradients_how_large_they_are_is_warned_of(
    pair: Pool, compressor: str, density: Optional[float], kind: type, is_warned: bool
) -> None:
    first, second = pair.run(warned_of, compressor, density, WithOptimizer(kind, lr=0.01))
    assert [kind.__name__ in line and "2.11 where DDP ends at 1.55" in line for line in first] == [True] * is_warned
    assert second == []  # once, not once a rank


def test_without_momentum_correction_any_optimizer_will_do(pair: Pool) -> None:
    assert pair.run(refused, SDAGC(momentum=None), WithAdam()) == ["was not refused"] * 2
