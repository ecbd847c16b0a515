"""ExDyna and MiCRO: equal to a slow reference, and better where they claim to be."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sparse.compressors import ExDyna, MiCRO
from lightning_sparse.compressors.layout import ModelLayout
from lightning_sparse.schedule import FixedSize
from lightning_sparse.testing.pool import Pool
from tests.compressors.exclusive_reference import Reference
from tests.compressors.simulation import Simulation
from tests.helpers.devices import DEVICE, moved
from tests.helpers.sparse_ddp import backpropagate, sgd_steps, sparse_ddp

METHODS = {"exdyna": ExDyna, "micro": MiCRO}
each_method = pytest.mark.parametrize("method", METHODS)
each_mode = pytest.mark.parametrize("mode", ["default", "paper"])

NUMELS = {"one": 1, "prime": 997, "matrix": 34_000, "pair": 2}


def draw(rank: int, step: int, numel: int) -> Tensor:
    """Draw normal numbers that depend on rank and step."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(100_003 * rank + step)).to(DEVICE)


def uneven_gradient(rank: int, step: int, parameters: Tensor) -> Tensor:
    """Return a gradient that follows the parameters, and is ten times as large in one stretch as elsewhere."""
    scale = torch.full((parameters.numel(),), 0.01, device=DEVICE)
    scale[5000:8500] = 0.1
    return scale * (0.2 * parameters + draw(rank, step, parameters.numel()))


class Recorded:
    """Write down what a compressor selects, by rank."""

    history: list[list[int]]

    def begin(self, layout: ModelLayout) -> None:
        super().begin(layout)  # type: ignore[misc]
        self.history, self._chosen = [], []

    def select(self, names: Any, accumulated: Any, counts: Any) -> Any:
        selections = super().select(names, accumulated, counts)  # type: ignore[misc]
        for name, selection in zip(names, selections):
            self._chosen += (selection.indices + self._starts[name]).tolist()
        return selections

    def finish_step(self, names: Any, means: Any, finite: Tensor, all_gather: Any) -> Any:
        self.history.append(sorted(self._chosen))
        self._chosen = []
        return super().finish_step(names, means, finite, all_gather)  # type: ignore[misc]


class RecordedExDyna(Recorded, ExDyna):
    """ExDyna that writes down what it selects."""


class RecordedMiCRO(Recorded, MiCRO):
    """MiCRO that writes down what it selects."""


RECORDED = {"exdyna": RecordedExDyna, "micro": RecordedMiCRO}


class Tensors(nn.Module):
    """Parameters whose gradient is whatever they are multiplied by."""

    def __init__(self, numels: dict[str, int] = NUMELS) -> None:
        super().__init__()
        self.numels = list(numels.values())
        for name, numel in numels.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(numel)))

    def forward(self, gradient: Tensor) -> Tensor:
        """Return a loss whose gradient is the flat ``gradient``."""
        pieces = zip(self.parameters(), gradient.split(self.numels))
        return sum((parameter * piece).sum() for parameter, piece in pieces)

    def flat(self) -> Tensor:
        """Return all parameters end to end."""
        return torch.cat([parameter.detach() for parameter in self.parameters()])


def train(rank: int, method: str, mode: str, density: float, steps: int) -> tuple[list[list[int]], list[Tensor]]:
    """Return what this rank selected, and the parameters after each step."""
    compressor = RECORDED[method](mode)
    with sparse_ddp(Tensors(), compressor, density, schedule=FixedSize(1000)) as (ddp, engine):
        losses = (ddp(uneven_gradient(rank, step, ddp.module.flat())) for step in range(steps))
        parameters = [ddp.module.flat() for _ in sgd_steps(ddp, engine, losses, lr=0.5)]
    return compressor.history, parameters


@pytest.mark.parametrize(
    ("method", "mode", "ranks"),
    [
        ("exdyna", "default", 2),
        ("exdyna", "default", 4),
        ("exdyna", "paper", 3),
        ("exdyna", "paper", 4),
        ("micro", "default", 3),
        ("micro", "paper", 2),
    ],
)
def test_training_equals_the_reference(pools: dict[int, Pool], method: str, mode: str, ranks: int) -> None:
    steps, density = 35, 0.01
    answers = moved(pools[ranks].run(train, method, mode, density, steps), DEVICE)
    reference = Reference(method, mode, list(NUMELS.values()), ranks, density)
    parameters, sizes, partitions = torch.zeros(reference.numel, device=DEVICE), set(), set()
    for step in range(steps):
        partitions.add(tuple(reference.owner_blocks))
        chosen, mean = reference.step([uneven_gradient(rank, step, parameters) for rank in range(ranks)])
        parameters.add_(mean, alpha=-0.5)
        sizes.add(sum(map(len, chosen)))
        for rank, (history, trained) in enumerate(answers):
            assert history[step] == chosen[rank], f"step {step}, rank {rank}"
            assert torch.equal(trained[step], parameters), f"step {step}"
    # Else the comparison would show nothing.
    assert len(sizes) > steps // 2
    assert (len(partitions) > 1) == (method == "exdyna")


def laplace(rank: int, step: int, numel: int) -> Tensor:
    """Draw from a distribution with heavier tails than the normal one."""
    uniform = torch.rand(numel, generator=torch.Generator().manual_seed(1000 * rank + step)).sub_(0.5)
    return uniform.sign() * -torch.log1p(-2 * uniform.abs().clamp(max=0.4999999))


@pytest.mark.parametrize(
    ("method", "gradient", "factor"),
    [
        ("exdyna", laplace, 0.01),
        ("exdyna", draw, 1.0),
        ("exdyna", laplace, 100.0),
        ("micro", draw, 0.01),
        ("micro", laplace, 1.0),
        ("micro", draw, 100.0),
    ],
)
def test_the_density_is_the_one_wanted(method: str, gradient: Any, factor: float) -> None:
    simulation = Simulation(METHODS[method], {"small": 700, "large": 39_300}, ranks=4, density=0.005)

    def densities(first: int, last: int, scale: float) -> list[float]:
        steps = ([scale * gradient(rank, step, 40_000) for rank in range(4)] for step in range(first, last))
        return [sum(map(len, simulation.step(gradients))) / 40_000 for gradients in steps]

    densities(0, 3, 1.0)
    for compressor in simulation.compressors:
        state = compressor.state_dict()
        compressor.load_state_dict({**state, "threshold": factor * state["threshold"]})
    forced = densities(3, 103, 1.0)
    assert sum(forced[50:]) / 50 == pytest.approx(0.005, rel=0.15)
    after_change = densities(103, 203, 10.0)
    assert sum(after_change[50:]) / 50 == pytest.approx(0.005, rel=0.15)
    assert len({compressor.state_dict()["threshold"] for compressor in simulation.compressors}) == 1


def padding_waste(method: str) -> float:
    simulation = Simulation(METHODS[method], {"tensor": 40_000}, ranks=8, density=0.005)
    waste = []
    for step in range(120):
        gradients = [draw(rank, step, 40_000) for rank in range(8)]
        for gradient in gradients:
            gradient[12_000:16_000] *= 10
        counts = [len(chosen) for chosen in simulation.step(gradients)]
        waste.append(max(counts) * 8 / sum(counts) - 1)
    return sum(waste[-50:]) / 50


def test_partitions_of_equal_load_waste_little_on_padding() -> None:
    exdyna, micro = padding_waste("exdyna"), padding_waste("micro")
    assert exdyna < 0.5
    assert micro > 3 * exdyna


def union_densities(rank: int, compressor: str, steps: int) -> list[float]:
    unions = []
    with sparse_ddp(Tensors({"matrix": 20_000, "bias": 100}), compressor, 0.01) as (ddp, engine):
        for step in range(steps):
            backpropagate(ddp, engine, ddp(draw(rank, step, 20_100)))
            unions.append(engine.compression_stats()["union_density"])
    return unions


def test_what_travels_does_not_grow_with_the_number_of_ranks(forked: dict[int, Pool]) -> None:
    means = {}
    for compressor in ("exdyna", "micro", "topk"):
        unions = forked[4].run(union_densities, compressor, 80)[0]
        means[compressor] = sum(unions[-50:]) / 50
    assert means["exdyna"] == pytest.approx(0.01, rel=0.15)
    assert means["micro"] == pytest.approx(0.01, rel=0.15)
    assert means["topk"] > 3.5 * 0.01


class CountMagnitudes(TorchDispatchMode):
    """Count the elements whose magnitude is taken, and note the operations that read more."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.widest: dict[str, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._opname
        for tensor in (tensor for tensor in args if isinstance(tensor, Tensor)):
            if name == "abs" and tensor.numel() > 1:
                self.elements += tensor.numel()
            self.widest[name] = max(self.widest.get(name, 0), tensor.numel())
        return function(*args, **(kwargs or {}))


@each_mode
@each_method
def test_each_rank_examines_its_share_alone(method: str, mode: str) -> None:
    examined, gradient = {}, draw(0, 0, 65_536)
    for ranks in (1, 2, 4, 8):
        compressor = METHODS[method](mode)
        compressor.begin(ModelLayout(("weight",), (65_536,), ranks - 1, ranks, DEVICE))
        compressor.load_state_dict({**compressor.state_dict(), "threshold": 3.0})
        with CountMagnitudes() as counted:
            compressor.select(["weight"], [gradient], counts=[66])
        examined[ranks] = counted.elements
        too_wide = {name for name, numel in counted.widest.items() if numel > 65_536 // ranks}
        # Views; the one norm of everything takes a list of tensors.
        assert too_wide <= {"slice", "split", "detach"}
    assert examined == {ranks: 65_536 // ranks for ranks in (1, 2, 4, 8)}


def test_its_state_is_the_hosts_whatever_the_default_device() -> None:
    exdyna = ExDyna()
    with torch.device("meta"):
        exdyna.begin(ModelLayout(("weight",), (64,), 0, 2, torch.device("cpu")))
        state = exdyna.state_dict()
    assert {name: tensor.device.type for name, tensor in state.items() if isinstance(tensor, Tensor)} == {
        "cuts": "cpu",
        "loads": "cpu",
    }
