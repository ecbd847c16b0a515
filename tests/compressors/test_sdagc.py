"""SDAGC compared with a slow reference, and its density with and without the control loop."""

import math

import pytest
import torch

from lightning_sparse.compressors import SDAGC, element_count
from lightning_sparse.compressors.base import ModelLayout
from tests.compressors.virtual import DENSITY, assert_same_as_virtual
from tests.helpers.devices import DEVICE


class VirtualSDAGC:
    """Section by section, for N workers, with scalar state."""

    def __init__(self, momentum, capacity):
        self.momentum, self.capacity = momentum, capacity
        self.alphas = {}
        self.velocities = {}
        self.momenta = {}
        self.last_rate = math.nan

    def __call__(self, gradients, rate):
        ratio = 1.0 if math.isnan(self.last_rate) else self.last_rate / rate
        self.last_rate = rate
        means = {name: torch.zeros_like(gradient) for name, gradient in gradients[0].items()}
        for rank, gradient in enumerate(gradients):
            for name, raw in gradient.items():
                means[name] += self.worker((rank, name), raw, ratio) / len(gradients)
        return means

    def worker(self, key, gradient, ratio):
        momentum = self.momentum * self.momenta.get(key, torch.zeros_like(gradient)) + gradient
        velocity = self.velocities.get(key, torch.zeros_like(gradient)) * ratio + momentum
        wanted = max(1, round(DENSITY * gradient.numel()))
        alpha = self.alphas.get(key, math.log(gradient.numel() / wanted) / math.sqrt(2))
        threshold = alpha * velocity.std(correction=0)
        order = velocity.abs().argsort(descending=True)
        room = min(gradient.numel(), math.ceil(self.capacity * wanted))
        order, reaching = order.tolist(), (velocity.abs() >= threshold).tolist()
        chosen = [position for position in order[:room] if reaching[position]] or order[:1]
        row = torch.zeros_like(gradient)
        row[chosen] = velocity[chosen]
        velocity[chosen] = momentum[chosen] = 0
        step = min(0.1, max(-0.1, 0.05 * math.log(len(chosen) / wanted)))
        if len(chosen) == room < gradient.numel():
            step = 0.1
        self.alphas[key] = min(50.0, max(0.5, alpha * math.exp(step)))
        self.velocities[key], self.momenta[key] = velocity, momentum
        return row


@pytest.mark.sampled
@pytest.mark.parametrize("schedule", ["layerwise", "single"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_sdagc_equals_its_reference(pools, ranks, schedule):
    settings = {"compressor": SDAGC(masks_momentum=True), "density": DENSITY, "schedule": schedule}
    assert_same_as_virtual(pools[ranks], settings, VirtualSDAGC(0.9, 1.5), momentum=0.9, relative=1e-4)


def refuse(tensor):
    raise AssertionError("there is nothing to agree on")


def densities(compressor, gradients, steps, wanted, numel=20_000, alpha=None):
    compressor.begin(ModelLayout(("layer",), (numel,), 0, 1, DEVICE))
    if alpha is not None:
        compressor.load_state_dict({"alpha": {"layer": torch.tensor(alpha)}})
    residual = torch.zeros(numel, device=DEVICE)
    sent = []
    for step in range(steps):
        gradient = gradients(step, numel).to(DEVICE)
        residual += gradient
        (selection,) = compressor.select(["layer"], [residual], [element_count(numel, wanted)])
        residual[selection.indices[selection.filled]] = 0
        compressor.finish_step(["layer"], [selection], torch.tensor(True, device=DEVICE), refuse)
        sent.append(int(selection.filled.sum()) / numel)
    return sent


def laplace(step, numel):
    generator = torch.Generator().manual_seed(step)
    uniform = torch.rand(numel, generator=generator) - 0.5
    return -uniform.sign() * torch.log1p(-2 * uniform.abs()) * (10.0 if step >= 150 else 1.0)


@pytest.mark.parametrize("factor", [0.01, 1.0, 100.0])
def test_the_loop_holds_the_density_from_a_start_that_is_far_off_and_through_a_change_of_scale(factor):
    wanted = 0.01
    sent = densities(SDAGC(), laplace, 300, wanted, alpha=factor * math.log(1 / wanted) / math.sqrt(2))
    for settled in (sent[50:100], sent[100:150], sent[200:250], sent[250:300]):
        assert sum(settled) / 50 == pytest.approx(wanted, rel=0.15)
