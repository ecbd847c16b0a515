"""Tensors that are small, equal, empty of numbers, too large or too small for the wire, of every type."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sparse.testing.pool import Pool
from lightning_sparse.testing.subjects import WIRES, density_for, each_compressor, each_wire, keeps, subject_of
from lightning_sparse.testing.tensors import DEVICE, moved
from lightning_sparse.testing.wrapping import (
    Edges,
    Tensors,
    backpropagate,
    batch,
    gradients_of,
    residuals_like,
    sgd_steps,
    sparse_ddp,
)

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
    """Parameters whose gradients are whatever they are multiplied by."""

    def __init__(self, gradients: Tensors) -> None:
        super().__init__()
        weights = {name: nn.Parameter(torch.zeros_like(gradient)) for name, gradient in gradients.items()}
        self.weights = nn.ParameterDict(weights)

    def forward(self, gradients: Tensors) -> Tensor:
        """Return a loss with the gradients ``gradients``."""
        return torch.stack([(self.weights[name] * gradient).sum() for name, gradient in gradients.items()]).sum()


def exchange_given(rank: int, settings: dict[str, Any], gradients: Tensors) -> dict[str, tuple[Tensor, Tensor]]:
    """Exchange the same gradients from all ranks; return what was applied of each, and its residual here."""
    gradients = moved(gradients, DEVICE)
    with sparse_ddp(Given(gradients), **settings) as (ddp, engine):
        backpropagate(ddp, engine, ddp(gradients))
        residuals = residuals_like(engine, {f"weights.{name}": gradient for name, gradient in gradients.items()})
        applied = {name: weight.grad.clone() for name, weight in ddp.module.weights.items()}
        return {name: (applied[name], residuals[f"weights.{name}"]) for name in gradients}


def assert_applied_and_kept(gradient: Tensor, answers: list[tuple[Tensor, Tensor]], compressor: str, edge: str) -> None:
    """Hold what every rank has applied of one gradient, and its residual there, to the gradient."""
    for applied, _ in answers:
        assert torch.equal(applied, answers[0][0]), f"{edge}: ranks differ"
        assert applied.dtype == gradient.dtype, f"{edge}: of another type, {applied.dtype}"
        assert applied.isfinite().all(), f"{edge}: not finite, {applied}"
        assert not applied[gradient == 0].any(), f"{edge}: something has come of zeros, {applied}"
    if keeps(subject_of(compressor)):
        mass = answers[0][0].double() + sum(residual.double() for _, residual in answers) / len(answers)
        rtol = max(torch.finfo(gradient.dtype).eps, 1e-6)
        torch.testing.assert_close(
            mass, gradient.double(), rtol=rtol, atol=1e-8, msg=lambda told: f"{edge}: mass is not conserved. {told}"
        )


def edges_of(dtype: torch.dtype) -> Tensors:
    limit = torch.finfo(dtype).max
    return {edge: gradient.double().clamp(-limit, limit).to(dtype) for edge, gradient in EDGE_GRADIENTS.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@each_wire
@each_compressor
def test_edges(pair: Pool, compressor: str, wire: str, dtype: torch.dtype) -> None:
    gradients = edges_of(dtype)
    # Each travels alone: who selects across a group would take the largest of its elements, and none of most edges.
    settings = {"compressor": compressor, "density": density_for(compressor), "wire": wire, "schedule": "layerwise"}
    answers = pair.run(exchange_given, settings, gradients)
    for edge, gradient in gradients.items():
        assert_applied_and_kept(gradient, [answer[edge] for answer in answers], compressor, edge)


@each_wire
@each_compressor
def test_zero_stays_zero(pair: Pool, compressor: str, wire: str) -> None:
    # Of two signs, fewer than are sent: as of an embedding, of which a batch has used few rows.
    gradient = torch.cat([torch.linspace(-1, 1, 20), torch.zeros(980)])
    settings = {"compressor": compressor, "density": density_for(compressor), "wire": wire}
    for answer in pair.run(exchange_given, settings, {"rows": gradient}):
        for tensor in answer["rows"]:  # what was applied, and what is kept
            assert not tensor[gradient == 0].any(), f"something has come of zeros, {tensor}"


def train_by_default(rank: int, settings: dict[str, Any], dtype: torch.dtype) -> list[Tensors]:
    """Return gradients after each of a few exchanges, in a process whose floating point numbers have another type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(0)
        with sparse_ddp(Edges(), **settings) as (ddp, engine):
            losses = (ddp(batch(rank, step).to(dtype)) for step in range(3))
            return [gradients_of(ddp) for _ in sgd_steps(ddp, engine, losses, lr=1e-3)]
    finally:
        torch.set_default_dtype(before)


@each_compressor
def test_whatever_the_default_type(pair: Pool, compressor: str) -> None:
    settings = {"compressor": compressor, "density": density_for(compressor)}
    for steps in pair.run(train_by_default, settings, torch.float64):
        for name, gradient in (item for gradients in steps for item in gradients.items()):
            assert gradient.dtype is torch.float64, f"{name}: of another type, {gradient.dtype}"
            assert gradient.isfinite().all(), f"{name}: not finite, {gradient}"


def exchange_one_by_one(rank: int, settings: dict[str, Any], gradients: Tensors) -> dict[str, tuple[Tensor, Tensor]]:
    """Exchange each gradient as that of a model of its own."""
    return {name: exchange_given(rank, settings, {name: gradient})[name] for name, gradient in gradients.items()}


@pytest.mark.parametrize(("ranks", "wire"), [(2, "float32"), *((3, wire) for wire in WIRES)])
@each_compressor
def test_a_model_that_is_one_edge(pools: dict[int, Pool], compressor: str, ranks: int, wire: str) -> None:
    """Some look at the whole model: for a threshold, or to give every rank its part of it."""
    gradients = edges_of(torch.float32)
    if ranks == 3:
        gradients = {edge: gradients[edge] for edge in ("one element", "fewer elements than ranks")}
    settings = {"compressor": compressor, "density": density_for(compressor), "wire": wire}
    answers = pools[ranks].run(exchange_one_by_one, settings, gradients)
    for edge, gradient in gradients.items():
        assert_applied_and_kept(gradient, [answer[edge] for answer in answers], compressor, edge)
