import pytest
import torch

from lightning_sparse.compressors import DGC, LAGS
from tests.compressors.virtual import DENSITY, VirtualTopK, assert_same_as_virtual, largest
from tests.helpers.fits import refuse
from tests.helpers.sparse_ddp import sparse_ddp


def mean_of(rows):
    """Return the mean, with division before addition, in rank order."""
    total = torch.zeros_like(rows[0])
    for row in rows:
        total += row / len(rows)
    return total


@pytest.mark.sampled
@pytest.mark.parametrize("schedule", ["layerwise", "single"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_lags_equals_its_reference(pools, ranks, schedule):
    densities = {"first.weight": 0.01, "second.bias": 1.0}
    settings = {"compressor": LAGS(densities), "density": DENSITY, "schedule": schedule}
    assert_same_as_virtual(pools[ranks], settings, VirtualTopK(densities=densities))


def test_lags_in_units_of_the_update_equals_its_reference_across_a_change_of_the_rate(pair):
    settings = {"compressor": LAGS(error_feedback="update"), "density": DENSITY}
    assert_same_as_virtual(pair, settings, VirtualTopK(in_update_units=True), relative=1e-4)


class VirtualDGC:
    """Momentum correction, factor masking and local clipping for N workers."""

    def __init__(self, momentum, nesterov, masks, clip_norm):
        self.momentum, self.nesterov, self.masks, self.clip_norm = momentum, nesterov, masks, clip_norm
        self.velocities = {}
        self.momenta = {}

    def __call__(self, gradients, rate):
        sent = [self.worker(rank, gradient, len(gradients)) for rank, gradient in enumerate(gradients)]
        return {name: mean_of([rows[name] for rows in sent]) for name in gradients[0]}

    def worker(self, rank, gradient, ranks):
        norm = torch.cat(list(gradient.values())).norm()
        factor = min(1.0, float(self.clip_norm / ranks**0.5 / norm))
        rows = {}
        for name, raw in gradient.items():
            clipped = raw * factor
            momentum = self.momenta.get((rank, name), torch.zeros_like(raw))
            velocity = self.velocities.get((rank, name), torch.zeros_like(raw))
            if self.nesterov:
                momentum = self.momentum * (momentum + clipped)
                velocity = velocity + (momentum + clipped)
            else:
                momentum = self.momentum * momentum + clipped
                velocity = velocity + momentum
            positions = largest(velocity, DENSITY)
            rows[name] = torch.zeros_like(raw)
            rows[name][positions] = velocity[positions]
            velocity[positions] = 0
            if self.masks:
                momentum[positions] = 0
            self.momenta[rank, name], self.velocities[rank, name] = momentum, velocity
        return rows


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("nesterov", "masks", "clip_norm"),
    [(False, True, 1e9), (False, False, 0.05), (True, True, 0.05), (True, False, 1e9)],
)
def test_dgc_equals_its_reference(pools, nesterov, masks, clip_norm):
    compressor = DGC(masks_momentum=masks, clip_norm=None if clip_norm == 1e9 else clip_norm)
    settings = {"compressor": compressor, "density": DENSITY, "warmup_steps": 0}
    reference = VirtualDGC(0.9, nesterov, masks, clip_norm)
    assert_same_as_virtual(pools[3], settings, reference, momentum=0.9, nesterov=nesterov, relative=1e-4)


def name_a_layer_wrongly(rank):
    with sparse_ddp(torch.nn.Linear(3, 3), compressor=LAGS({"wieght": 0.1})):
        pass


def test_a_density_for_a_layer_that_does_not_exist_is_refused(pair):
    for said in pair.run(refuse, name_a_layer_wrongly):
        assert said.endswith("densities='wieght' is unknown; choose one of: weight, bias (did you mean 'weight'?)")
