"""Density 1 is DDP, replicas are identical whatever the timing, and neither schedule nor observer change a bit."""

import random
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse.engine.engine as engine_module
from lightning_sparse.engine.step.worker import ExchangeWorker
from lightning_sparse.schedule import FixedSize, Schedule
from lightning_sparse.testing.pool import Pool
from lightning_sparse.testing.subjects import (
    agrees,
    density_for,
    each_compressor,
    each_schedule,
    holds_for,
    is_exact,
    is_grouping_free,
    subject_of,
)
from lightning_sparse.testing.tensors import DEVICE, assert_same
from lightning_sparse.testing.wrapping import Edges, Tensors, batch, parameters_of, sgd_steps, sparse_ddp


def train_both(rank: int, settings: dict[str, Any], micro_batches: int) -> tuple[Tensors, Tensors]:
    """Train a model behind the engine, and its twin behind plain DDP."""
    torch.manual_seed(0)
    with sparse_ddp(Edges(), **settings) as (ddp, engine):
        torch.manual_seed(0)
        twin = DistributedDataParallel(Edges().to(DEVICE))
        for model in (ddp, twin):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            for step in range(5):
                optimizer.zero_grad()
                for micro in range(micro_batches - 1):
                    with model.no_sync():
                        model(batch(rank, 100 * step + micro)).backward()
                model(batch(rank, 100 * step + 99)).backward()
                optimizer.step()
        engine.worker.raise_error()
        return parameters_of(ddp), parameters_of(twin)


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "ranks"),
    [
        pytest.param(schedule, batches, 2 + (row + column) % 2, id=f"{schedule}-{name}-{2 + (row + column) % 2}")
        for row, schedule in enumerate(["merged", "layerwise", "single"])
        for column, (name, batches) in enumerate({"no accumulation": 1, "accumulation": 3}.items())
    ],
)
@holds_for(is_exact)
def test_density_one_equals_ddp(
    pools: dict[int, Pool], ranks: int, compressor: str, schedule: str, micro_batches: int
) -> None:
    density = None if density_for(compressor) is None else 1.0
    settings = {"compressor": compressor, "density": density, "schedule": schedule}
    assert_close(pools[ranks].run(train_both, settings, micro_batches))


def assert_close(ranks: list[tuple[Tensors, Tensors]]) -> None:
    """Check what :func:`train_both` returned on every rank: two models that differ by roundings."""
    for ours, twin in ranks:
        torch.testing.assert_close(ours, twin, rtol=1e-5, atol=1e-6)


class Sluggish(ExchangeWorker):
    """An exchange worker that dawdles before every task, differently on every rank."""

    def submit(self, run: Any, *others: Any, **named: Any) -> None:
        """Queue a task behind a short sleep."""
        chance = random.Random(f"{dist.get_rank()} {time.perf_counter_ns()}")

        def run_late() -> None:
            time.sleep(chance.random() * 0.005)
            run()

        super().submit(run_late, *others, **named)


def train_sluggishly(rank: int, settings: dict[str, Any], steps: int, is_observed: bool) -> list[Tensors]:
    """Train with delays in hooks and exchanges, and copy the parameters after every step."""
    torch.manual_seed(0)
    chance = random.Random(time.perf_counter_ns())
    history = []
    with mock.patch.object(engine_module, "ExchangeWorker", Sluggish), sparse_ddp(Edges(), **settings) as (ddp, engine):
        for parameter in ddp.parameters():
            parameter.register_hook(lambda gradient: time.sleep(chance.random() * 0.002))
        losses = (ddp(batch(rank, step)) for step in range(steps))
        for _ in sgd_steps(ddp, engine, losses, lr=0.01, momentum=0.9):
            history.append(parameters_of(ddp))
            if is_observed:
                assert engine.compression_stats()["wire_bytes"] > 0
    return history


@pytest.mark.parametrize(("wire", "ranks"), [("float32", 2), ("bfloat16", 3), ("float16", 2), ("4bit", 3), ("2bit", 2)])
@each_compressor
def test_replicas_are_identical_and_no_schedule_changes_a_bit(
    pools: dict[int, Pool], ranks: int, compressor: str, wire: str
) -> None:
    schedules: list[str | Schedule] = ["layerwise", "single", FixedSize(1000), FixedSize(2600)]
    grouping_free = is_grouping_free(subject_of(compressor))
    if not grouping_free:
        schedules *= 2  # each of the four is then to agree with itself
    settings = {"compressor": compressor, "density": density_for(compressor), "wire": wire}
    outcomes = outcomes_of(pools[ranks], settings, schedules, one_model=agrees(subject_of(compressor)))
    for outcome, expected in zip(outcomes, outcomes[:1] * len(outcomes) if grouping_free else outcomes[4:]):
        assert_same(outcome, expected)


def outcomes_of(
    pool: Pool, settings: dict[str, Any], schedules: Sequence[str | Schedule], steps: int = 3, one_model: bool = True
) -> list[list[list[Tensors]]]:
    """Train with each schedule; return all ranks' parameters after every step, which are the same on all of them."""
    outcomes = [pool.run(train_sluggishly, {**settings, "schedule": each}, steps, False) for each in schedules]
    for first, *others in outcomes if one_model else ():
        for history in others:
            assert_same(history, first)
    return outcomes


@each_schedule
@each_compressor
def test_the_observer_changes_nothing(pair: Pool, compressor: str, schedule: str) -> None:
    settings = {"compressor": compressor, "density": density_for(compressor), "schedule": schedule}
    runs = [pair.run(train_sluggishly, settings, 3, is_observed) for is_observed in (True, False)]
    for observed, unobserved in zip(*runs):
        assert_same(observed[-1], unobserved[-1])
