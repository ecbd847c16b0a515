"""A training loop without Lightning: the laws, resuming, and what is refused."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Optional

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import AdamCorrection, Sparsifier, bucket_cap_mb, sparsify
from lightning_sparse.testing.equality import assert_same
from lightning_sparse.testing.pool import Pool
from lightning_sparse.testing.wrapping import Edges, batch, parameters_of
from tests.helpers.devices import DEVICE

Tensors = dict[str, Tensor]
CORRECTION = AdamCorrection(dense_steps=2, fall_steps=0, refresh_steps=2)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}
each_optimizer = pytest.mark.parametrize("optimizer", list(OPTIMIZERS))


def wrapped(model: Optional[nn.Module] = None, **arguments: Any) -> DistributedDataParallel:
    """Wrap a model; every rank has the same."""
    torch.manual_seed(0)
    model = (Edges() if model is None else model).to(DEVICE)
    return DistributedDataParallel(model, **{"bucket_cap_mb": bucket_cap_mb(model), **arguments})


@contextmanager
def sparsified(
    kind: str, ddp: Optional[DistributedDataParallel] = None, **settings: Any
) -> Iterator[tuple[DistributedDataParallel, torch.optim.Optimizer, Sparsifier]]:
    """Yield a wrapped model, its optimizer and the handle."""
    ddp = wrapped() if ddp is None else ddp
    optimizer = OPTIMIZERS[kind](ddp.parameters())
    if kind == "AdamW":
        settings = {"optimizer_correction": CORRECTION, **settings}
    with sparsify(ddp, optimizer, **{"warmup_epochs": 0, **settings}) as handle:
        yield ddp, optimizer, handle


def train(
    rank: int, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, steps: range, micro_batches: int = 1
) -> None:
    """Train as a plain loop does, with accumulation and clipping."""
    for step in steps:
        for micro in range(micro_batches):
            with nullcontext() if micro == micro_batches - 1 else ddp.no_sync():
                ddp(batch(rank, 100 * step + micro)).backward()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()


def train_both(rank: int, kind: str, micro_batches: int) -> tuple[Tensors, Tensors]:
    """Train at density 1, and a twin with plain DDP."""
    with sparsified(kind, density=1.0) as (ddp, optimizer, _):
        train(rank, ddp, optimizer, range(5), micro_batches)
        twin = wrapped()
        train(rank, twin, OPTIMIZERS[kind](twin.parameters()), range(5), micro_batches)
        return parameters_of(ddp), parameters_of(twin)


@each_optimizer
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_density_one_equals_ddp(pair: Pool, optimizer: str, micro_batches: int) -> None:
    for ours, twin in pair.run(train_both, optimizer, micro_batches):
        for name in twin:
            torch.testing.assert_close(ours[name], twin[name], rtol=1e-5, atol=1e-6)


def train_sparse(
    rank: int, kind: str, settings: dict[str, Any], micro_batches: int
) -> tuple[Tensors, dict[str, float]]:
    """Train, and return parameters and statistics."""
    with sparsified(kind, **settings) as (ddp, optimizer, handle):
        train(rank, ddp, optimizer, range(6), micro_batches)
    return parameters_of(ddp), handle.stats()


@each_optimizer
@pytest.mark.parametrize("compressor", ["lags", "exdyna", "omgs"])
def test_replicas_are_identical(pools: dict[int, Pool], optimizer: str, compressor: str) -> None:
    settings = {"compressor": compressor, "density": 0.05, "wire": "bfloat16"}
    answers = pools[3].run(train_sparse, optimizer, settings, 2)
    for parameters, stats in answers:
        assert_same(parameters, answers[0][0])
        assert 0 < stats["union_density"] < 0.5
        assert 0 < stats["wire_bytes"] < stats["dense_bytes"]
