import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sparse.compressors import ExDyna, MiCRO
from lightning_sparse.compressors.base import ModelLayout
from lightning_sparse.schedule import FixedSize
from tests.compressors.exdyna_reference import Reference
from tests.compressors.simulation import Simulation
from tests.helpers.devices import DEVICE, moved
from tests.helpers.sparse_ddp import backpropagate, sgd_steps, sparse_ddp

METHODS = {"exdyna": ExDyna, "micro": MiCRO}
each_method = pytest.mark.parametrize("method", METHODS)

NUMELS = {"one": 1, "prime": 997, "matrix": 34_000, "pair": 2}


def draw(rank, step, numel):
    return torch.randn(numel, generator=torch.Generator().manual_seed(100_003 * rank + step)).to(DEVICE)


def uneven_gradient(rank, step, parameters):
    """Return a gradient of the parameters, ten times as large in one range."""
    scale = torch.full((parameters.numel(),), 0.01, device=DEVICE)
    scale[5000:8500] = 0.1
    return scale * (0.2 * parameters + draw(rank, step, parameters.numel()))


class Recorded:
    history: list[list[int]]

    def begin(self, layout):
        super().begin(layout)
        self.history, self._chosen = [], []

    def select(self, names, accumulated, counts):
        selections = super().select(names, accumulated, counts)
        for name, selection in zip(names, selections):
            self._chosen += (selection.indices + self._starts[name]).tolist()
        return selections

    def finish_step(self, names, means, finite, all_gather):
        self.history.append(sorted(self._chosen))
        self._chosen = []
        super().finish_step(names, means, finite, all_gather)


RECORDED = {name: type(name, (Recorded, kind), {}) for name, kind in METHODS.items()}


class Tensors(nn.Module):
    def __init__(self, numels=NUMELS):
        super().__init__()
        self.numels = list(numels.values())
        for name, numel in numels.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(numel)))

    def forward(self, gradient):
        pieces = zip(self.parameters(), gradient.split(self.numels))
        return sum((parameter * piece).sum() for parameter, piece in pieces)

    def flat(self):
        return torch.cat([parameter.detach() for parameter in self.parameters()])


def train(rank, method, density, steps):
    compressor = RECORDED[method]()
    with sparse_ddp(Tensors(), compressor, density, schedule=FixedSize(1000)) as (ddp, engine):
        losses = (ddp(uneven_gradient(rank, step, ddp.module.flat())) for step in range(steps))
        parameters = [ddp.module.flat() for _ in sgd_steps(ddp, engine, losses, lr=0.5)]
    return compressor.history, parameters


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("method", "ranks"), [("exdyna", 2), ("exdyna", 4), ("micro", 3)])
def test_training_equals_the_reference(pools, method, ranks):
    steps, density = 35, 0.01
    answers = moved(pools[ranks].run(train, method, density, steps), DEVICE)
    reference = Reference(method, list(NUMELS.values()), ranks, density)
    parameters, sizes, partitions = torch.zeros(reference.numel, device=DEVICE), set(), set()
    for step in range(steps):
        partitions.add(tuple(reference.owner_blocks))
        chosen, mean = reference.step([uneven_gradient(rank, step, parameters) for rank in range(ranks)])
        parameters.add_(mean, alpha=-0.5)
        sizes.add(sum(map(len, chosen)))
        for rank, (history, trained) in enumerate(answers):
            assert history[step] == chosen[rank], f"step {step}, rank {rank}"
            assert torch.equal(trained[step], parameters), f"step {step}"
    assert len(sizes) > steps // 2
    assert (len(partitions) > 1) == (method == "exdyna")


def laplace(rank, step, numel):
    uniform = torch.rand(numel, generator=torch.Generator().manual_seed(1000 * rank + step)).sub_(0.5)
    return uniform.sign() * -torch.log1p(-2 * uniform.abs().clamp(max=0.4999999))


@pytest.mark.sampled(2)
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
def test_the_density_is_the_one_wanted(method, gradient, factor):
    simulation = Simulation(METHODS[method], {"small": 700, "large": 39_300}, ranks=4, density=0.005)

    def densities(first, last, scale):
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


class CountMagnitudes(TorchDispatchMode):
    """Count the elements with a computed magnitude, and record the operations that read more."""

    def __init__(self):
        super().__init__()
        self.elements = 0
        self.widest = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._opname
        for tensor in (tensor for tensor in args if isinstance(tensor, Tensor)):
            if name == "abs" and tensor.numel() > 1:
                self.elements += tensor.numel()
            self.widest[name] = max(self.widest.get(name, 0), tensor.numel())
        return function(*args, **(kwargs or {}))


@each_method
def test_each_rank_examines_its_share_alone(method):
    examined, gradient = {}, draw(0, 0, 65_536)
    for ranks in (1, 2, 4, 8):
        compressor = METHODS[method]()
        compressor.begin(ModelLayout(("weight",), (65_536,), ranks - 1, ranks, DEVICE))
        compressor.load_state_dict({**compressor.state_dict(), "threshold": 3.0})
        with CountMagnitudes() as counted:
            compressor.select(["weight"], [gradient], counts=[66])
        examined[ranks] = counted.elements
        too_wide = {name for name, numel in counted.widest.items() if numel > 65_536 // ranks}
        # Views, and reads of selected elements only. The norm of all elements takes a list of tensors.
        assert too_wide <= {"slice", "split", "detach", "index_select", "new_empty"}
    assert examined == {ranks: 65_536 // ranks for ranks in (1, 2, 4, 8)}


def gradients_of(simulation, step, scale=1.0):
    generator = torch.Generator().manual_seed(step)
    return [scale * torch.randn(simulation.numel, generator=generator) for _ in simulation.compressors]


@each_method
def test_zero_gradients_neither_select_everything_nor_end_the_search(method):
    simulation = Simulation(METHODS[method], {"weight": 4000}, ranks=2, density=0.01)
    for start in (0, 100):
        for step in range(60):
            # The residual is still sent, but the threshold follows slowly. Without zeros there would be 4000.
            assert sum(map(len, simulation.step([torch.zeros(4000)] * 2))) < 400, step
        later = [sum(map(len, simulation.step(gradients_of(simulation, start + step)))) for step in range(40)]
        assert all(later[20:])


@each_method
def test_fewer_nonzero_elements_than_wanted_are_all_sent(method):
    simulation = Simulation(METHODS[method], {"weight": 4000}, ranks=2, density=0.01)
    gradient = torch.zeros(4000)
    gradient[::400] = 1.0
    for _ in range(3):
        union = set(torch.cat(simulation.step([gradient, gradient])).tolist())
        assert len(union) == 40
        assert union >= set(range(0, 4000, 400))


@each_method
def test_the_density_may_change_from_step_to_step(method):
    simulation = Simulation(METHODS[method], {"weight": 20_000}, ranks=2, density=1.0)
    for phase, density in enumerate((1.0, 0.25, 0.06, 0.015)):
        simulation.density = density
        steps = [simulation.step(gradients_of(simulation, 100 * phase + step)) for step in range(50)]
        mean = sum(len(positions) for chosen in steps[-20:] for positions in chosen) / 20 / 20_000
        assert mean == pytest.approx(density, rel=0.2)


@pytest.mark.sampled(1)
@each_method
def test_what_is_sent_does_not_swing_where_gradients_hardly_change(method):
    simulation = Simulation(METHODS[method], {"weight": 20_000}, ranks=2, density=0.005)
    scale, drift = (torch.randn(20_000, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    steps = [
        simulation.step([scale.exp() * (drift + 0.05 * noise) for noise in gradients_of(simulation, step)])
        for step in range(250)
    ]
    sent = torch.tensor([float(sum(map(len, chosen))) for chosen in steps[100:]]) / 100
    # With a single gain and consecutive measurements: a mean of 1.5, and from a fifth to four times the wanted density.
    assert sent.mean() == pytest.approx(1.0, rel=0.3)
    assert sent.std() < 0.3
    assert 0.4 < sent.min() < sent.max() < 2.2


def applied_densities(rank, compressor, steps):
    unions = []
    with sparse_ddp(Tensors({"matrix": 20_000, "bias": 100}), compressor, 0.01) as (ddp, engine):
        for step in range(steps):
            backpropagate(ddp, engine, ddp(draw(rank, step, 20_100)))
            unions.append(sum(int(each.grad.count_nonzero()) for each in ddp.parameters()) / 20_100)
    return unions


@pytest.mark.exhaustive
def test_what_travels_does_not_grow_with_the_number_of_ranks(forked):
    means = {}
    for compressor in ("exdyna", "micro", "topk"):
        unions = forked[4].run(applied_densities, compressor, 80)[0]
        means[compressor] = sum(unions[-50:]) / 50
    assert means["exdyna"] == pytest.approx(0.01, rel=0.15)
    assert means["micro"] == pytest.approx(0.01, rel=0.15)
    assert means["topk"] > 3.5 * 0.01
