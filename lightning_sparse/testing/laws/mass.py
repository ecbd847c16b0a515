"""The law of mass: nothing is lost by a truncation, a rounding, or a parameter that goes unused."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_sparse.testing.pool import Pool
from lightning_sparse.testing.subjects import (
    agrees,
    density_for,
    each_compressor,
    each_schedule,
    each_way,
    each_way_and_world,
    holds_for,
    keeps,
    subject_of,
)
from lightning_sparse.testing.tensors import DEVICE
from lightning_sparse.testing.wrapping import Edges, Tensors, batch, booked_step, sparse_ddp, watch_gradients


def balance(rank: int, settings: dict[str, Any], steps: int) -> list[dict[str, Tensors]]:
    """Train, and write down for every step gradients, what was applied, and the residuals before and after."""
    torch.manual_seed(0)
    book = []
    with sparse_ddp(Edges(), **settings) as (ddp, engine):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        gradients = watch_gradients(ddp.module)
        for step in range(steps):
            book.append(booked_step(ddp, engine, gradients, ddp(batch(rank, step))))
            optimizer.step()
    return book


@each_way_and_world
@holds_for(keeps)
def test_mass_is_conserved(pools: dict[int, Pool], ranks: int, compressor: str, schedule: str, wire: str) -> None:
    settings = {"compressor": compressor, "density": density_for(compressor), "schedule": schedule, "wire": wire}
    assert_mass_is_conserved(pools[ranks].run(balance, settings, 4))


def assert_mass_is_conserved(books: list[list[dict[str, Tensors]]]) -> None:
    """Check what :func:`balance` wrote down on every rank: what came in was applied, or is kept."""
    for entries in zip(*books):
        for name in entries[0]["gradient"]:
            came = sum(entry["before"][name].double() + entry["gradient"][name].double() for entry in entries)
            owed = torch.as_tensor(came) / len(books)
            kept = torch.as_tensor(sum(entry["after"][name].double() for entry in entries)) / len(books)
            applied = entries[0]["applied"][name].double()
            torch.testing.assert_close(applied + kept, owed, rtol=2e-6, atol=1e-6 * owed.abs().max().item() + 1e-12)


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


def train_branches(rank: int, settings: dict[str, Any], user: int = 0) -> list[dict[str, Tensors]]:
    """Use everything, then ``sometimes`` on one rank alone and ``never`` nowhere; note what :func:`balance` does."""
    torch.manual_seed(0)
    book = []
    with sparse_ddp(Branches(), **settings) as (ddp, engine):
        gradients = watch_gradients(ddp.module)
        for step, uses in enumerate([(True, True), (rank == user, False), (rank == user, False)]):
            inputs = torch.randn(300, generator=torch.Generator().manual_seed(10 * rank + step)).to(DEVICE)
            book.append(booked_step(ddp, engine, gradients, ddp(inputs, uses)))
    return book


@each_way
@holds_for(keeps)
def test_the_residual_of_an_unused_parameter_is_neither_spent_nor_lost(
    pair: Pool, compressor: str, schedule: str, wire: str
) -> None:
    settings = {"compressor": compressor, "density": density_for(compressor), "schedule": schedule, "wire": wire}
    assert_mass_is_conserved(pair.run(train_branches, settings))


@each_schedule
@each_compressor
def test_a_parameter_is_written_where_any_rank_used_it(pair: Pool, compressor: str, schedule: str) -> None:
    settings = {"compressor": compressor, "density": density_for(compressor), "schedule": schedule}
    books = pair.run(train_branches, settings)
    for first, *later in books:
        assert all(first["applied"][name].any() for name in ("shared", "sometimes", "never"))
        for entry in later:
            assert entry["applied"]["shared"].any()
            assert not entry["applied"]["never"].any()
    rank_0, rank_1 = (book[1]["applied"] for book in books)
    assert rank_0["sometimes"].any()
    assert not agrees(subject_of(compressor)) or torch.equal(rank_0["sometimes"], rank_1["sometimes"])
