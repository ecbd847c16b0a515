"""CompressionMonitor: what reaches loggers and the progress bar."""

import csv
from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning import Trainer
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.callbacks import CompressionMonitor
from tests.pool import Pool
from tests.test_strategy import STATS
from tests.trainers import Small, accelerator, make_trainer

TAGS = {f"sparse/{name}" for name in STATS}


def fit_monitored(rank: int, logger_class: Any, directory: str) -> dict[str, float]:
    """Fit with a logger; return what the progress bar was given."""
    logger = logger_class(directory, name="", version="")
    trainer = make_trainer(
        rank,
        SparseDDPStrategy(density=0.01),
        logger=logger,
        log_every_n_steps=4,
        callbacks=[CompressionMonitor(progress_bar=True)],
    )
    trainer.fit(Small())
    return {name: float(value) for name, value in trainer.progress_bar_metrics.items()}


def test_scalars_reach_tensorboard(pair: Pool, tmp_path: Path) -> None:
    pair.run(fit_monitored, TensorBoardLogger, str(tmp_path))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= TAGS
    density = events.Scalars("sparse/density")
    assert [event.step for event in density] == [3, 7, 11, 15]
    assert all(event.value == pytest.approx(0.01, rel=0.05) for event in density)


def test_scalars_reach_any_logger(pair: Pool, tmp_path: Path) -> None:
    pair.run(fit_monitored, CSVLogger, str(tmp_path))
    with (tmp_path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["sparse/wire_bytes"]]
    assert [int(row["step"]) for row in rows] == [3, 7, 11, 15]
    assert rows[0].keys() >= TAGS
    assert all(float(row["sparse/compression_ratio"]) > 10 for row in rows)


def test_the_progress_bar_shows_ratio_and_exposed_time(pair: Pool, tmp_path: Path) -> None:
    shown, _ = pair.run(fit_monitored, CSVLogger, str(tmp_path))
    assert shown["compression"] > 10
    assert shown["exposed_ms"] > 0


def test_another_strategy_is_refused() -> None:
    trainer = Trainer(
        accelerator=accelerator(), devices=1, max_epochs=1, logger=False, callbacks=[CompressionMonitor()]
    )
    with pytest.raises(TypeError, match=r"needs a SparseDDPStrategy, got SingleDeviceStrategy.*strategy='sparse_topk'"):
        trainer.fit(Small())
