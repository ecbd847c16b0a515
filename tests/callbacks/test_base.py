"""What all callbacks of the package refuse."""

from typing import Any

import pytest
from pytorch_lightning import Trainer

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.callbacks import AssumptionMonitor, CompressionMonitor, OverlapTimeline, ReplicaSentinel
from lightning_sparse.testing.pool import Pool
from tests.helpers.trainers import Small, accelerator, make_trainer

CALLBACKS = {
    "AssumptionMonitor": AssumptionMonitor,
    "CompressionMonitor": CompressionMonitor,
    "OverlapTimeline": lambda: OverlapTimeline(pictures=False),
    "ReplicaSentinel": ReplicaSentinel,
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_another_strategy_is_refused(name: str) -> None:
    trainer = Trainer(accelerator=accelerator(), devices=1, max_epochs=1, logger=False, callbacks=[CALLBACKS[name]()])
    message = rf"{name} needs a SparseDDPStrategy, got SingleDeviceStrategy.*strategy='sparse_topk'\), or remove"
    with pytest.raises(TypeError, match=message):
        trainer.fit(Small())


@pytest.mark.parametrize("name", CALLBACKS)
def test_the_same_callback_twice_is_refused(name: str) -> None:
    trainer = Trainer(
        strategy=SparseDDPStrategy(),
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        callbacks=[CALLBACKS[name](), CALLBACKS[name]()],
    )
    with pytest.raises(ValueError, match=rf"callbacks holds 2 {name}.*give one"):
        CALLBACKS[name]().setup(trainer, Small(), "fit")


def fit_with_all(rank: int, directory: str, arguments: dict[str, Any]) -> int:
    """Fit with all callbacks at once, twice; return the steps made."""
    callbacks = [build() for build in CALLBACKS.values() if build is not CALLBACKS["OverlapTimeline"]]
    callbacks.append(OverlapTimeline(steps=[2, 20], path=f"{directory}/overlap.json", pictures=False))
    callbacks[1].progress_bar = True  # somewhere to log
    trainer = make_trainer(rank, SparseDDPStrategy(density=0.05), callbacks=callbacks, log_every_n_steps=2, **arguments)
    model = Small()
    trainer.fit(model)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model)
    trainer.validate(model, verbose=False)
    return trainer.global_step


def test_all_live_together_and_through_a_second_fit(pair: Pool, tmp_path: Any) -> None:
    for steps in pair.run(fit_with_all, str(tmp_path), {}):
        assert steps == 32


@pytest.mark.parametrize("ranks", [1])
def test_one_process_has_nothing_to_look_at(pools: dict[int, Pool], tmp_path: Any, ranks: int) -> None:
    pools[ranks].run(fit_alone, str(tmp_path))
    assert not (tmp_path / "overlap.json").exists()


def fit_alone(rank: int, directory: str) -> None:
    """Fit on one process with callbacks that would look at every step."""
    timeline = OverlapTimeline(every_n_steps=1, path=f"{directory}/overlap.json", pictures=False)
    callbacks = [AssumptionMonitor(1), CompressionMonitor(progress_bar=True), ReplicaSentinel(1), timeline]
    trainer = make_trainer(rank, SparseDDPStrategy(), callbacks=callbacks, log_every_n_steps=1)
    with pytest.warns(UserWarning, match="no step that more than one process made"):
        trainer.fit(Small())
