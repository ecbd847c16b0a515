"""The laws that hold for every compressor under every schedule, in real gloo processes.

A compressor gets these tests by being registered. Four laws follow from what it declares: mass is conserved where a
residual is kept, density 1 is DDP where everything can be sent, replicas are identical unless they are said to diverge,
and no schedule changes a bit unless the selection is said to depend on it.
"""

import copy
import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.schedule import ExchangeWorker, FixedSize, Schedule
from tests.devices import DEVICE, moved
from tests.pool import Pool
from tests.sparse_ddp import (
    AGREEING_NAMES,
    COMPRESSOR_NAMES,
    DENSITY,
    EXACT_NAMES,
    GROUPING_FREE_NAMES,
    KEEPING_NAMES,
    SCHEDULE_NAMES,
    WIRES,
    Edges,
    batch,
    parameters_of,
    sparse_ddp,
    watch_gradients,
)

each_compressor = pytest.mark.parametrize("compressor", COMPRESSOR_NAMES)
each_keeping_compressor = pytest.mark.parametrize("compressor", KEEPING_NAMES)
each_exact_compressor = pytest.mark.parametrize("compressor", EXACT_NAMES)
each_schedule = pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
each_wire = pytest.mark.parametrize("wire", WIRES)
each_world = pytest.mark.parametrize("ranks", [2, 3])

Tensors = dict[str, Tensor]


def residuals_like(engine: Any, gradients: Tensors) -> Tensors:
    """Copy what waits, in the shape of the gradients; nothing waits where nothing was allocated."""
    state = engine.memory.state_dict().get("residual", {})
    return {
        name: state[name].view_as(gradient).clone() if name in state else torch.zeros_like(gradient)
        for name, gradient in gradients.items()
    }


def balance(rank: int, settings: dict[str, Any], steps: int) -> list[dict[str, Tensors]]:
    """Train, and write down for every step what came in, what was applied and what waits before and after."""
    torch.manual_seed(0)
    book = []
    with sparse_ddp(Edges(), **settings) as (ddp, engine):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        gradients = watch_gradients(ddp.module)
        for step in range(steps):
            before = residuals_like(engine, gradients)
            optimizer.zero_grad()
            ddp(batch(rank, step)).backward()
            engine.raise_error()
            applied = {name: parameter.grad.clone() for name, parameter in ddp.module.named_parameters()}
            after = residuals_like(engine, gradients)
            arrived = {name: gradient.clone() for name, gradient in gradients.items()}
            book.append({"gradient": arrived, "before": before, "applied": applied, "after": after})
            optimizer.step()
    return book


@each_world
@each_wire
@each_schedule
@each_keeping_compressor
def test_mass_is_conserved(pools: dict[int, Pool], ranks: int, compressor: str, schedule: str, wire: str) -> None:
    settings = {"compressor": compressor, "density": DENSITY[compressor], "schedule": schedule, "wire": wire}
    books = pools[ranks].run(balance, settings, 4)
    for entries in zip(*books):
        for name in entries[0]["gradient"]:
            owed = sum(entry["before"][name].double() + entry["gradient"][name].double() for entry in entries) / ranks
            kept = sum(entry["after"][name].double() for entry in entries) / ranks
            applied = entries[0]["applied"][name].double()
            torch.testing.assert_close(applied + kept, owed, rtol=2e-6, atol=1e-6 * owed.abs().max().item() + 1e-12)


@each_world
@each_schedule
def test_top_k_on_a_lossless_wire_loses_not_one_bit(pools: dict[int, Pool], ranks: int, schedule: str) -> None:
    books = pools[ranks].run(balance, {"compressor": "topk", "density": 0.05, "schedule": schedule}, 4)
    # Divided where the exchange divides: a GPU multiplies by the inverse, which may differ in the last bit.
    for entries in zip(*moved(books, DEVICE)):
        for name in entries[0]["gradient"]:
            total = torch.zeros_like(entries[0]["gradient"][name])
            for entry in entries:
                accumulated = entry["before"][name] + entry["gradient"][name]
                was_sent = entry["after"][name] != accumulated
                assert not entry["after"][name][was_sent].any()
                total += torch.where(was_sent, accumulated, 0.0) / ranks
            assert torch.equal(total, entries[0]["applied"][name])


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
        engine.raise_error()
        return parameters_of(ddp), parameters_of(twin)


@each_world
@each_schedule
@each_exact_compressor
@pytest.mark.parametrize("micro_batches", [1, 3], ids=["no accumulation", "accumulation"])
def test_density_one_equals_ddp(
    pools: dict[int, Pool], ranks: int, compressor: str, schedule: str, micro_batches: int
) -> None:
    density = None if DENSITY[compressor] is None else 1.0
    settings = {"compressor": compressor, "density": density, "schedule": schedule}
    for ours, twin in pools[ranks].run(train_both, settings, micro_batches):
        for name in twin:
            torch.testing.assert_close(ours[name], twin[name], rtol=1e-5, atol=1e-6)


class Sluggish(ExchangeWorker):
    """An exchange worker that dawdles before every task, differently on every rank."""

    def submit(self, run: Any, settle: Any = None) -> None:
        """Queue a task behind a short sleep."""
        chance = random.Random(f"{dist.get_rank()} {time.perf_counter_ns()}")

        def run_late() -> None:
            time.sleep(chance.random() * 0.005)
            run()

        super().submit(run_late, settle)


def train_sluggishly(rank: int, settings: dict[str, Any], steps: int, is_observed: bool) -> list[Tensors]:
    """Train with delays in hooks and exchanges, and copy the parameters after every step."""
    import lightning_sparse.engine

    torch.manual_seed(0)
    chance = random.Random(time.perf_counter_ns())
    worker_class = lightning_sparse.engine.ExchangeWorker
    lightning_sparse.engine.ExchangeWorker = Sluggish
    history = []
    try:
        with sparse_ddp(Edges(), **settings) as (ddp, engine):
            for parameter in ddp.parameters():
                parameter.register_hook(lambda gradient: time.sleep(chance.random() * 0.002))
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
            for step in range(steps):
                optimizer.zero_grad()
                ddp(batch(rank, step)).backward()
                engine.raise_error()
                optimizer.step()
                history.append(parameters_of(ddp))
                if is_observed:
                    assert engine.compression_stats()["wire_bytes"] > 0
    finally:
        lightning_sparse.engine.ExchangeWorker = worker_class
    return history


def assert_same_bits(one: Tensors, other: Tensors) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@each_world
@each_wire
@each_compressor
def test_replicas_are_identical_and_no_schedule_changes_a_bit(
    pools: dict[int, Pool], ranks: int, compressor: str, wire: str
) -> None:
    outcomes = []
    schedules: list[str | Schedule] = ["layerwise", "single", FixedSize(1000), FixedSize(2600)]
    if compressor not in GROUPING_FREE_NAMES:
        schedules *= 2  # each of the four is then to agree with itself
    for schedule in schedules:
        settings = {"compressor": compressor, "density": DENSITY[compressor], "schedule": schedule, "wire": wire}
        histories = pools[ranks].run(train_sluggishly, settings, 4, False)
        if compressor in AGREEING_NAMES:
            for history in histories[1:]:
                for ours, first in zip(history, histories[0]):
                    assert_same_bits(ours, first)
        outcomes.append([parameters for history in histories for parameters in history])
    grouping_free = compressor in GROUPING_FREE_NAMES
    for outcome, expected in zip(outcomes, outcomes[:1] * len(outcomes) if grouping_free else outcomes[4:]):
        for one, other in zip(outcome, expected):
            assert_same_bits(one, other)


@each_schedule
@each_compressor
def test_the_observer_changes_nothing(pair: Pool, compressor: str, schedule: str) -> None:
    settings = {"compressor": compressor, "density": DENSITY[compressor], "schedule": schedule}
    runs = [pair.run(train_sluggishly, settings, 3, is_observed) for is_observed in (True, False)]
    for observed, unobserved in zip(*runs):
        assert_same_bits(observed[-1], unobserved[-1])


def assert_same_state(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same_state(one[key], other[key])
    elif isinstance(one, Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def train_with_gap(rank: int, settings: dict[str, Any], poisoned: float, gap_rank: int) -> tuple[Any, ...]:
    """Train two steps, then one in which one rank's gradient is not finite, then go on."""
    torch.manual_seed(0)
    with sparse_ddp(Edges(), **settings) as (ddp, engine):
        for step in range(2):
            ddp.zero_grad()
            ddp(batch(rank, step)).backward()
        before = copy.deepcopy(engine.state_dict())
        ddp.zero_grad()
        factor = poisoned if rank == gap_rank else 1.0
        (ddp(batch(rank, 2)) + ddp.module.prime[3] * factor).backward()
        engine.raise_error()
        gradients = {name: parameter.grad.clone() for name, parameter in ddp.module.named_parameters()}
        after = copy.deepcopy(engine.state_dict())
        ddp.zero_grad()
        ddp(batch(rank, 3)).backward()
        recovered = all(parameter.grad.isfinite().all() for parameter in ddp.parameters())
        return before, after, gradients, recovered


@pytest.mark.parametrize("poisoned", [float("nan"), float("inf"), float("-inf")])
@each_wire
@each_schedule
@each_compressor
def test_a_gradient_that_is_not_finite_moves_nothing_that_is_kept(
    pair: Pool, compressor: str, schedule: str, wire: str, poisoned: float
) -> None:
    settings = {"compressor": compressor, "density": DENSITY[compressor], "schedule": schedule, "wire": wire}
    for before, after, gradients, recovered in pair.run(train_with_gap, settings, poisoned, 1):
        assert_same_state(before, after)
        assert not gradients["prime"].isfinite().all()
        assert recovered


class Branches(nn.Module):
    """A parameter that every rank uses, one that only some do, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Parameter(torch.randn(300))
        self.sometimes = nn.Parameter(torch.randn(300))
        self.never = nn.Parameter(torch.randn(300))

    def forward(self, inputs: Tensor, uses: tuple[bool, bool]) -> Tensor:
        """Return a loss that leaves parameters out."""
        loss = (self.shared * inputs).sum()
        for is_used, parameter in zip(uses, (self.sometimes, self.never)):
            if is_used:
                loss = loss + (parameter * inputs).sum()
        return loss


def train_branches(rank: int, settings: dict[str, Any]) -> list[tuple[Tensors, Tensors, Tensors]]:
    """Use everything, then ``sometimes`` on rank 0 alone and ``never`` nowhere."""
    torch.manual_seed(0)
    book = []
    with sparse_ddp(Branches(), **settings, find_unused_parameters=True) as (ddp, engine):
        gradients = watch_gradients(ddp.module)
        for step, uses in enumerate([(True, True), (rank == 0, False), (rank == 0, False)]):
            inputs = torch.randn(300, generator=torch.Generator().manual_seed(10 * rank + step)).to(DEVICE)
            owed = residuals_like(engine, gradients)
            ddp.zero_grad(set_to_none=True)
            for gradient in gradients.values():
                gradient.zero_()
            ddp(inputs, uses).backward()
            engine.raise_error()
            applied = {name: parameter.grad for name, parameter in ddp.module.named_parameters()}
            nothing = torch.zeros(300, device=DEVICE)
            applied = {name: nothing if grad is None else grad.clone() for name, grad in applied.items()}
            owed = {name: residual + gradients[name] for name, residual in owed.items()}
            book.append((owed, applied, residuals_like(engine, owed)))
    return book


@each_wire
@each_schedule
@each_keeping_compressor
def test_the_residual_of_an_unused_parameter_is_neither_spent_nor_lost(
    pair: Pool, compressor: str, schedule: str, wire: str
) -> None:
    settings = {"compressor": compressor, "density": DENSITY[compressor], "schedule": schedule, "wire": wire}
    for entries in zip(*pair.run(train_branches, settings)):
        for name in ("shared", "sometimes", "never"):
            owed = sum(owed[name].double() for owed, _, _ in entries) / 2
            kept = sum(after[name].double() for _, _, after in entries) / 2
            torch.testing.assert_close(entries[0][1][name].double() + kept, owed, rtol=1e-5, atol=1e-6)


@each_schedule
@each_compressor
def test_a_parameter_is_written_where_any_rank_used_it(pair: Pool, compressor: str, schedule: str) -> None:
    settings = {"compressor": compressor, "density": DENSITY[compressor], "schedule": schedule}
    for book in pair.run(train_branches, settings):
        assert all(book[0][1][name].any() for name in ("shared", "sometimes", "never"))
        for _, applied, _ in book[1:]:
            assert applied["shared"].any()
            assert not applied["never"].any()
    (rank_0, rank_1) = (book[1][1] for book in pair.run(train_branches, settings))
    assert rank_0["sometimes"].any()
    assert compressor not in AGREEING_NAMES or torch.equal(rank_0["sometimes"], rank_1["sometimes"])


EDGE_GRADIENTS = {
    "one element": torch.tensor([2.0]),
    "all zero": torch.zeros(70),
    "all equal": torch.full((70,), 3.0),
    "all negative": -torch.arange(1.0, 71.0),
    "prime size": torch.linspace(-1, 1, 997),
    "fewer elements than ranks": torch.tensor([1.0, -2.0]),
    "beyond float16": torch.tensor([1e6, -3e38, 1.0, 1e-9]),
    "denormal": torch.full((70,), 1e-42),
    "large and equal": torch.full((200_000,), -0.5),
}


class Given(nn.Module):
    """A parameter whose gradient is whatever it is multiplied by."""

    def __init__(self, gradient: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(gradient.numel(), dtype=dtype))

    def forward(self, gradient: Tensor) -> Tensor:
        """Return a loss whose gradient is ``gradient``."""
        return (self.weight * gradient).sum()


def exchange_given(rank: int, settings: dict[str, Any], gradient: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Exchange the same gradient from all ranks; return what was applied and what waits here."""
    gradient = gradient.to(DEVICE, dtype)
    with sparse_ddp(Given(gradient, dtype), **settings) as (ddp, engine):
        ddp(gradient).backward()
        engine.raise_error()
        residual = residuals_like(engine, {"weight": gradient})["weight"]
        return ddp.module.weight.grad.clone(), residual


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("edge", EDGE_GRADIENTS)
@each_wire
@each_compressor
def test_edges(pair: Pool, compressor: str, wire: str, edge: str, dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    gradient = EDGE_GRADIENTS[edge].double().clamp(-limit, limit).to(dtype)
    settings = {"compressor": compressor, "density": DENSITY[compressor], "wire": wire}
    answers = pair.run(exchange_given, settings, gradient, dtype)
    kept = sum(residual.double() for _, residual in answers) / len(answers)
    for applied, _ in answers:
        assert torch.equal(applied, answers[0][0])
        assert applied.dtype == dtype
        assert applied.isfinite().all()
        assert not applied[gradient == 0].any()
        eps = torch.finfo(dtype).eps
        if compressor in KEEPING_NAMES:
            torch.testing.assert_close(applied.double() + kept, gradient.double(), rtol=max(eps, 1e-6), atol=1e-8)


@each_wire
@each_keeping_compressor
def test_two_of_three_ranks_are_fewer_than_the_elements(pools: dict[int, Pool], compressor: str, wire: str) -> None:
    settings = {"compressor": compressor, "density": DENSITY[compressor], "wire": wire}
    for gradient in (torch.tensor([1.0, -2.0]), torch.tensor([5.0])):
        answers = pools[3].run(exchange_given, settings, gradient, torch.float32)
        kept = sum(residual.double() for _, residual in answers) / 3
        torch.testing.assert_close(answers[0][0].double() + kept, gradient.double(), rtol=1e-6, atol=1e-7)
