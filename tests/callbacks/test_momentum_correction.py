"""MomentumCorrection: the same numbers as DGC's own, what is refused, and what is logged."""

import csv
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.callbacks import MomentumCorrection
from lightning_sparse.compressors import DGC, LAGS
from lightning_sparse.testing.pool import Pool
from tests.helpers.trainers import Small, WithAdam, WithSGD, accelerator, make_trainer, weights

SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "taken over": ({}, {}),
    "nesterov": ({}, {"nesterov": True}),
    "one cycle": ({}, {"one_cycle": True}),
    "weight decay": ({}, {"weight_decay": 0.01}),
    "clipped": ({"clip_norm": 0.05}, {}),
    "masked": ({"masks_momentum": True}, {}),
    "a number": ({"momentum": 0.8, "nesterov": True}, {"momentum": 0.0}),
}


class Restarting(WithSGD):
    """A model whose learning rate restarts every few steps."""

    def configure_optimizers(self) -> Any:
        """Return SGD with warm restarts."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fit_both(rank: int, settings: dict[str, Any], model: dict[str, Any], restarts: bool) -> list[dict[str, Tensor]]:
    """Fit with DGC, with top-k behind the callback, and with top-k alone; return the weights of each."""
    runs: list[tuple[Any, list[Callback]]] = [
        (DGC(**settings), []),
        ("topk", [MomentumCorrection(**settings)]),
        ("topk", []),
    ]
    fitted = []
    for compressor, callbacks in runs:
        module = Restarting() if restarts else WithSGD(**model)
        strategy = SparseDDPStrategy(compressor, density=0.05, warmup_epochs=0)
        make_trainer(rank, strategy, max_epochs=2, callbacks=callbacks).fit(module)
        fitted.append(weights(module))
    return fitted


@pytest.mark.parametrize("name", [*SETTINGS, "warm restarts"])
def test_it_trains_bit_for_bit_as_dgc(pair: Pool, name: str) -> None:
    settings, model = SETTINGS.get(name, ({}, {}))
    for own, ours, without in pair.run(fit_both, settings, model, name == "warm restarts", timeout=120):
        assert all(torch.equal(own[parameter], ours[parameter]) for parameter in own)
        assert not all(torch.equal(own[parameter], without[parameter]) for parameter in own)


def fit_twice(rank: int, path: str) -> tuple[list[float], dict[str, Any], list[dict[str, Tensor]]]:
    """Fit with the callback, then with the same strategy without it, then as the latter from the start.

    Returns:
        the optimizer's momentum in the first fit, its group after it, and the weights after the other two.
    """
    during: list[float] = []

    class Watched(WithSGD):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            during.append(optimizer.param_groups[0]["momentum"])

    trainer = make_trainer(rank, SparseDDPStrategy(density=0.05), callbacks=[MomentumCorrection()])
    trainer.fit(Watched(nesterov=True))
    group = dict(trainer.optimizers[0].param_groups[0])
    trainer.callbacks[:] = [each for each in trainer.callbacks if not isinstance(each, MomentumCorrection)]
    trainer.fit_loop.max_epochs = 2
    fitted = []
    later = WithSGD()
    trainer.fit(later)
    fitted.append(weights(later))
    fresh = WithSGD()
    again = make_trainer(rank, SparseDDPStrategy(density=0.05))
    again.fit_loop.epoch_progress.current.processed = again.fit_loop.epoch_progress.current.completed = 1
    again.fit_loop.max_epochs = 2
    again.fit(fresh)
    fitted.append(weights(fresh))
    return during, group, fitted


def test_it_gives_everything_back(pair: Pool, tmp_path: Path) -> None:
    for during, group, (later, fresh) in pair.run(fit_twice, str(tmp_path), timeout=120):
        assert set(during) == {0.0}
        assert (group["momentum"], group["nesterov"]) == (0.9, True)
        assert all(torch.equal(later[name], fresh[name]) for name in later)


def refused(rank: int, strategy: dict[str, Any], correction: MomentumCorrection, model: Any) -> str:
    """Fit what must be refused; return the message."""
    try:
        make_trainer(rank, SparseDDPStrategy(**strategy), callbacks=[correction]).fit(model)
    except ValueError as error:
        return str(error)
    return "was not refused"


REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], Any, str]] = {
    "adam": (
        {"optimizer_correction": None},
        {},
        WithAdam(),
        "Adam works on the gradients themselves, not on velocities: choose torch.optim.SGD",
    ),
    "dampening": ({}, {}, WithSGD(dampening=0.5), "cannot take over SGD's dampening=0.5: set it to 0"),
    "given twice": ({}, {"momentum": 0.5}, WithSGD(), "momentum=0.5 was given to the memory and momentum=0.9 to SGD"),
    "dgc": ({"compressor": "dgc"}, {}, WithSGD(), "DGC corrects momentum or clips itself (momentum='optimizer'"),
    "sdagc": ({"compressor": "sdagc"}, {}, WithSGD(), "SDAGC corrects momentum or clips itself"),
    "a2sgd": ({"compressor": "a2sgd"}, {}, WithSGD(), "with A2SGD, which keeps nothing for later"),
    "omgs": (
        {"compressor": "omgs"},
        {"masks_momentum": True},
        WithSGD(),
        "OMGS selects across a group and cannot mask",
    ),
    "auto": ({"compressor": "lags", "schedule": "auto"}, {}, WithSGD(), "use schedule='merged'"),
}


@pytest.mark.parametrize(("strategy", "settings", "model", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_go_together_is_refused(
    pair: Pool, strategy: dict[str, Any], settings: dict[str, Any], model: Any, message: str
) -> None:
    for answer in pair.run(refused, strategy, MomentumCorrection(**settings), model):
        assert message in answer


@pytest.mark.parametrize(
    ("compressor", "masks_momentum"),
    [("omgs", False), ("lags", True), ("exdyna", True), ("dense", True)],
)
def test_what_keeps_residuals_is_accepted(pair: Pool, compressor: Any, masks_momentum: bool) -> None:
    correction = MomentumCorrection(masks_momentum=masks_momentum)
    assert pair.run(refused, {"compressor": compressor}, correction, WithSGD()) == ["was not refused"] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"momentum": 1.0}, "momentum=1.0 must be 'optimizer'"),
        ({"momentum": None}, "momentum=None leaves nothing to correct"),
        ({"clip_norm": 0.0}, "clip_norm=0.0 must be a positive norm"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MomentumCorrection(**arguments)


def test_another_strategy_is_refused() -> None:
    trainer = Trainer(
        accelerator=accelerator(), devices=1, max_epochs=1, logger=False, callbacks=[MomentumCorrection()]
    )
    with pytest.raises(TypeError, match=r"MomentumCorrection needs a SparseDDPStrategy, got SingleDeviceStrategy"):
        trainer.fit(Small())


def fit_logged(rank: int, directory: str, clip_norm: Optional[float]) -> tuple[list[float], list[float]]:
    """Fit with a logger; return the norms of this rank's momentum and the share of zeros in it, after each step."""
    norms, zeros = [], []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
            momenta = torch.cat(list(trainer.strategy.engine.memory.state_dict()["momentum"].values()))
            norms.append(float(momenta.norm()))
            zeros.append(float((momenta == 0).float().mean()))

    trainer = make_trainer(
        rank,
        SparseDDPStrategy(LAGS(error_feedback="update"), density=0.25),
        logger=CSVLogger(directory, name="", version=""),
        log_every_n_steps=4,
        callbacks=[MomentumCorrection(masks_momentum=True, clip_norm=clip_norm), Watch()],
    )
    trainer.fit(WithSGD())
    return norms, zeros


@pytest.mark.parametrize("clip_norm", [None, 1e-3])
def test_it_logs_what_it_does_on_logged_steps_only(pair: Pool, tmp_path: Path, clip_norm: Optional[float]) -> None:
    (norms, zeros), (other_norms, _) = pair.run(fit_logged, str(tmp_path), clip_norm)
    with (tmp_path / "metrics.csv").open() as file:
        rows = {int(row["step"]): row for row in csv.DictReader(file) if row["sparse/momentum_norm"]}
    assert list(rows) == [3, 7, 11, 15]
    for step, row in rows.items():
        expected = (norms[step] + other_norms[step]) / 2
        assert float(row["sparse/momentum_norm"]) == pytest.approx(expected, rel=1e-5)
        assert float(row["sparse/masked_fraction"]) == pytest.approx(0.25, abs=0.01)
        assert float(row["sparse/masked_fraction"]) <= zeros[step] + 0.01
        assert ("sparse/local_clip_factor" in row) == (clip_norm is not None)
        if clip_norm is not None:
            assert 0 < float(row["sparse/local_clip_factor"]) < 0.1


def fit_alone(rank: int) -> list[float]:
    """Fit on one process; return the momentum that the optimizer had."""
    trainer = make_trainer(rank, SparseDDPStrategy(), callbacks=[MomentumCorrection()])
    trainer.fit(WithSGD())
    with pytest.warns(UserWarning, match=r"MomentumCorrection\(momentum=0.9, clip_norm=None\) has no effect"):
        make_trainer(rank, SparseDDPStrategy(), callbacks=[MomentumCorrection(0.9)]).fit(WithSGD(momentum=0.0))
    return [group["momentum"] for group in trainer.optimizers[0].param_groups]


def test_one_process_leaves_momentum_to_the_optimizer(forked: dict[int, Pool]) -> None:
    assert forked[1].run(fit_alone) == [[0.9]]
