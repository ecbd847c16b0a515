"""What all callbacks of the package refuse."""

from typing import Any

import pytest
from pytorch_lightning import Trainer

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.callbacks import (
    AdaptiveDensity,
    AssumptionMonitor,
    CompressionMonitor,
    ErrorBudget,
    MomentumCorrection,
    OverlapTimeline,
    ReplicaSentinel,
    Warmup,
)
from lightning_sparse.testing.pool import Pool
from tests.helpers.trainers import Small, WithSGD, accelerator, make_trainer

CALLBACKS = {
    "AdaptiveDensity": lambda: AdaptiveDensity([Warmup(4)]),
    "AssumptionMonitor": AssumptionMonitor,
    "CompressionMonitor": CompressionMonitor,
    "MomentumCorrection": MomentumCorrection,
    "OverlapTimeline": lambda: OverlapTimeline(pictures=False),
    "ReplicaSentinel": ReplicaSentinel,
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_another_strategy_and_the_same_callback_twice_are_refused(name: str) -> None:
    build, quiet = CALLBACKS[name], {"logger": False, "devices": 1}
    trainer = Trainer(accelerator=accelerator(), max_epochs=1, callbacks=[build()], **quiet)
    with pytest.raises(TypeError, match=f"{name} needs a SparseDDPStrategy"):
        trainer.fit(Small())
    twice = Trainer(strategy=SparseDDPStrategy(), accelerator="cpu", callbacks=[build(), build()], **quiet)
    with pytest.raises(ValueError, match=f"callbacks holds 2 {name}"):
        build().setup(twice, Small(), "fit")


@pytest.mark.parametrize("callback", [AssumptionMonitor, ReplicaSentinel])
@pytest.mark.parametrize("every", [0, -1, 2.5, True, "often"])
def test_a_bad_interval_is_refused(callback: Any, every: Any) -> None:
    with pytest.raises(ValueError, match="every_n_steps"):
        callback(every_n_steps=every)


def fit_with_all(rank: int, directory: str) -> int:
    """Fit with all that look on at once, twice; return the steps made."""
    timeline = OverlapTimeline(steps=[2, 20], path=f"{directory}/overlap.json", pictures=False)
    callbacks = [AssumptionMonitor(), CompressionMonitor(progress_bar=True), ReplicaSentinel(), timeline]
    trainer = make_trainer(rank, SparseDDPStrategy(density=0.05), callbacks=callbacks, log_every_n_steps=2)
    model = Small()
    trainer.fit(model)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model)
    trainer.validate(model, verbose=False)
    return trainer.global_step


def test_all_live_together_and_through_a_second_fit(pair: Pool, tmp_path: Any) -> None:
    assert pair.run(fit_with_all, str(tmp_path)) == [32, 32]


def fit_alone(rank: int, directory: str) -> list[float]:
    """Fit on one process with callbacks that would act in every step; return the momentum that is left to SGD."""
    timeline = OverlapTimeline(every_n_steps=1, path=f"{directory}/overlap.json", pictures=False)
    adaptive = AdaptiveDensity([Warmup(4), ErrorBudget(1.0)], every_n_steps=1)
    watching = [AssumptionMonitor(1), CompressionMonitor(progress_bar=True), ReplicaSentinel(1), timeline]
    callbacks = [*watching, adaptive, MomentumCorrection()]
    trainer = make_trainer(rank, SparseDDPStrategy(), callbacks=callbacks, log_every_n_steps=1)
    with pytest.warns(UserWarning, match="OverlapTimeline has recorded nothing"):
        trainer.fit(WithSGD())
    with pytest.warns(UserWarning, match="MomentumCorrection"):
        make_trainer(rank, SparseDDPStrategy(), callbacks=[MomentumCorrection(0.9)]).fit(WithSGD(momentum=0.0))
    return [group["momentum"] for group in trainer.optimizers[0].param_groups]


def test_one_process_has_nothing_to_look_at_or_to_correct(forked: dict[int, Pool], tmp_path: Any) -> None:
    assert forked[1].run(fit_alone, str(tmp_path)) == [[0.9]]
    assert not (tmp_path / "overlap.json").exists()
