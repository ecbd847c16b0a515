"""Tensors that are small, equal, empty of numbers, too large or too small for the wire, of every type."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sparse.testing.devices import DEVICE
from lightning_sparse.testing.laws.marks import each_wire
from lightning_sparse.testing.pool import Pool
from lightning_sparse.testing.subjects import any_compressor, density_for, holds_for, keeps, subject_of
from lightning_sparse.testing.wrapping import backpropagate, residuals_like, sparse_ddp

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
        backpropagate(ddp, engine, ddp(gradient))
        residual = residuals_like(engine, {"weight": gradient})["weight"]
        return ddp.module.weight.grad.clone(), residual


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("edge", EDGE_GRADIENTS)
@each_wire
@holds_for(any_compressor)
def test_edges(pair: Pool, compressor: str, wire: str, edge: str, dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    gradient = EDGE_GRADIENTS[edge].double().clamp(-limit, limit).to(dtype)
    settings = {"compressor": compressor, "density": density_for(compressor), "wire": wire}
    answers = pair.run(exchange_given, settings, gradient, dtype)
    kept = sum(residual.double() for _, residual in answers) / len(answers)
    for applied, _ in answers:
        assert torch.equal(applied, answers[0][0])
        assert applied.dtype == dtype
        assert applied.isfinite().all()
        assert not applied[gradient == 0].any()
        eps = torch.finfo(dtype).eps
        if keeps(subject_of(compressor)):
            torch.testing.assert_close(applied.double() + kept, gradient.double(), rtol=max(eps, 1e-6), atol=1e-8)


@each_wire
@holds_for(keeps)
def test_two_of_three_ranks_are_fewer_than_the_elements(pools: dict[int, Pool], compressor: str, wire: str) -> None:
    settings = {"compressor": compressor, "density": density_for(compressor), "wire": wire}
    for gradient in (torch.tensor([1.0, -2.0]), torch.tensor([5.0])):
        answers = pools[3].run(exchange_given, settings, gradient, torch.float32)
        kept = sum(residual.double() for _, residual in answers) / 3
        torch.testing.assert_close(answers[0][0].double() + kept, gradient.double(), rtol=1e-6, atol=1e-7)
