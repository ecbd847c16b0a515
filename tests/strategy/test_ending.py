"""What a training tells of itself at its end: one line, and the same numbers."""

import re
from typing import Any, Optional
from unittest import mock

import pytest
from pytorch_lightning import LightningModule

from lightning_sparse import LocalSteps, SparseDDPStrategy
from lightning_sparse.testing.pool import Pool
from tests.helpers.pricing import SETTLED, Priced, much, nothing
from tests.helpers.trainers import Small, WithAdam, make_trainer

ELEMENTS = 32 * 64 + 64 + 64 * 32 + 32  # of Small
DENSE = 4.0 * ELEMENTS  # bytes that leave one of two ranks in a step of DDP


class Stopping(Small):
    """A model that ends its training, or breaks it off with an error, after five steps."""

    has_failed = False

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            if self.has_failed:
                raise KeyError("five")
            self.trainer.should_stop = True


class Failing(Stopping):
    """One that breaks off."""

    has_failed = True


def fit(
    rank: int, settings: dict[str, Any], module: Any = Small, arguments: Optional[dict[str, Any]] = None
) -> tuple[list[str], dict[str, float], dict[str, float]]:
    """Fit; return the lines that the strategy says, the statistics in the midst of it and after it."""
    lines: list[str] = []
    seen: dict[str, float] = {}
    strategy = SparseDDPStrategy(**settings)
    model: LightningModule = module()
    trainer = make_trainer(rank, strategy, **{"limit_val_batches": 0, **(arguments or {})})
    model.on_train_end = lambda: seen.update(strategy.compression_stats())  # type: ignore[method-assign]
    with mock.patch("lightning_sparse.strategy.trainer.rank_zero_info", lines.append):
        if module is Failing:
            with pytest.raises(KeyError):
                trainer.fit(model)
        else:
            trainer.fit(model)
    return lines, seen, strategy.compression_stats()


def closing_of(lines: list[str]) -> str:
    """Return the one line of the end, which is the last."""
    (line,) = [line for line in lines if "steps sent" in line]
    assert line is lines[-1]
    return line


@pytest.mark.parametrize("module", [Small, WithAdam])
def test_one_line_tells_of_the_whole_training_and_stays_to_be_asked_for(pair: Pool, module: Any) -> None:
    settings = {"compressor": "topk", "density": 0.01, "schedule": "single"}
    for lines, seen, stats in pair.run(fit, settings, module, {"max_epochs": 2, "limit_val_batches": 1}):
        assert stats["total_steps"] == 32
        assert stats["total_dense_bytes"] == 32 * DENSE
        assert stats["total_compression_ratio"] == stats["total_dense_bytes"] / stats["total_wire_bytes"]
        if module is WithAdam:  # whose warm-up the last step knows nothing of
            assert stats["total_compression_ratio"] < 0.5 * stats["compression_ratio"]
        assert 0 < stats["exposed_share"] < 1
        assert stats == seen
        sent = re.fullmatch(
            r"SparseDDPStrategy: 32 steps sent (.+) kB where DDP sends (.+) kB, compression ratio (.+);"
            r" exposed: (.+) % of the time\.",
            closing_of(lines),
        )
        assert sent is not None, lines[-1]
        expected = (stats["total_wire_bytes"] / 1e3, stats["total_dense_bytes"] / 1e3, stats["total_compression_ratio"])
        assert [float(number) for number in sent.groups()[:3]] == pytest.approx(expected, rel=5e-3)
        assert float(sent[4]) == pytest.approx(100 * stats["exposed_share"], abs=0.06)


def test_a_training_that_is_stopped_tells_and_one_that_fails_does_not(pair: Pool) -> None:
    for lines, _, stats in pair.run(fit, {"density": 0.01}, Stopping):
        assert "5 steps sent" in closing_of(lines)
        assert stats["total_steps"] == 5
    for lines, _, _ in pair.run(fit, {"density": 0.01}, Failing):
        assert lines
        assert not any("steps sent" in line for line in lines)


def test_one_process_has_sent_nothing_to_tell_of(pools: dict[int, Pool]) -> None:
    ((lines, _, stats),) = pools[1].run(fit, {"density": 0.01})
    assert "one process" in lines[-1]
    assert stats == {}


@pytest.mark.parametrize("accumulated", [1, 2])
def test_synchronous_and_local_steps_count_whatever_was_exchanged(pair: Pool, accumulated: int) -> None:
    local, none = (
        {"compressor": "dense", "local_steps": LocalSteps(4, synchronous_steps=synchronous)} for synchronous in (5, 100)
    )
    arguments = {"max_epochs": 2 * accumulated, "accumulate_grad_batches": accumulated}
    for lines, _, stats in pair.run(fit, local, Small, arguments):
        assert stats["total_steps"] == 32
        assert stats["total_dense_bytes"] == 32 * DENSE
        # 5 steps of DDP, and 27 local ones in 7 rounds.
        assert stats["total_wire_bytes"] == pytest.approx(12 * DENSE, rel=0.01)
        assert 0 < stats["exposed_share"] < 1
        assert "32 steps sent" in closing_of(lines)
    for lines, _, stats in pair.run(fit, none, Small, arguments):
        assert stats["total_wire_bytes"] == stats["total_dense_bytes"] == 32 * DENSE
        assert "exposed" not in closing_of(lines)


def test_a_second_fit_counts_from_its_own_start(pair: Pool) -> None:
    for first, second in pair.run(fit_twice):
        assert first == second == 5


def fit_twice(rank: int) -> list[float]:
    """Fit twice with one strategy; return the steps that each tells of."""
    strategy = SparseDDPStrategy(density=0.01)
    trainer = make_trainer(rank, strategy, limit_val_batches=0, limit_train_batches=5)
    steps = []
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(Small())
        steps.append(strategy.compression_stats()["total_steps"])
    return steps


def fit_auto(rank: int, steps: int) -> tuple[list[str], list[bool], dict[str, float]]:
    """Fit a model that DDP trains faster; return what is said, which steps were plain, and statistics."""
    lines: list[str] = []
    strategy = SparseDDPStrategy("lags", 0.05, schedule="auto")
    model = Priced(nothing, much)
    trainer = make_trainer(rank, strategy, max_epochs=-1, max_steps=steps, limit_val_batches=0)
    with mock.patch("lightning_sparse.strategy.trainer.rank_zero_info", lines.append):
        model.fit(trainer)
    return lines, model.were_plain, strategy.compression_stats()


@pytest.mark.clock
@pytest.mark.parametrize(("steps", "verdict"), [(SETTLED, "chosen: plain DDP, as"), (40, "training ended before")])
def test_the_choice_of_auto_is_told_and_its_steps_of_ddp_are_counted(pair: Pool, steps: int, verdict: str) -> None:
    for lines, were_plain, stats in pair.run(fit_auto, steps):
        assert verdict in closing_of(lines)
        assert stats["total_steps"] == steps
        assert stats["total_dense_bytes"] == steps * DENSE
        assert (sum(were_plain) > 0) == (steps == SETTLED)
        assert sum(were_plain) * DENSE < stats["total_wire_bytes"] < stats["total_dense_bytes"]
