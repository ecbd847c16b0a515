import pytest
import torch

from lightning_sparse.compressors.selection import FlatSelection
from lightning_sparse.engine.memory import Hyperparameters, MomentumMemory

SIZES = {"large": (1 << 18) + 3, "small": 1000, "smaller": 10}
YES, NO = torch.tensor(True), torch.tensor(False)


def gradients(step):
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(size, generator=generator) for name, size in SIZES.items()}


def make_step(memory, step, hyperparameters, accepted=YES):
    names, given = list(SIZES), gradients(step)
    accumulated = memory.compensate(names, list(given.values()), dict.fromkeys(names, hyperparameters))
    before = {name: tensor.clone() for name, tensor in zip(names, accumulated)}
    sent = FlatSelection.of(accumulated, [torch.tensor([0])] * len(names))
    kept = sent.replaced(torch.zeros(len(names)), sent.indices)
    memory.update_residual(names, accumulated, kept, accepted)
    return before, accumulated


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_residuals_follow_the_rate_to_a_tenth_of_the_largest_and_a_rate_of_zero_changes_none(momentum):
    memory = MomentumMemory(Hyperparameters(0.1), masks_momentum=False, rescale_on_lr_change=True)
    velocity, residual, last = dict.fromkeys(SIZES, 0.0), dict.fromkeys(SIZES, 0.0), 0.1
    for step, (rate, unit) in enumerate(
        [(0.0, 0.1), (0.1, 0.1), (0.05, 0.05), (0.0, 0.05), (1e-4, 0.01), (0.5, 0.5), (1e-9, 0.05), (0.04, 0.05)]
    ):
        accumulated, _ = make_step(memory, step, Hyperparameters(rate, momentum))
        for name, gradient in gradients(step).items():
            velocity[name] = velocity[name] * momentum + gradient
            expected = velocity[name] + residual[name] * (last / unit)
            torch.testing.assert_close(accumulated[name], expected)
            if rate:
                residual[name] = expected
                residual[name][0] = 0.0
        last = unit
        state = memory.state_dict()
        memory = MomentumMemory(Hyperparameters(0.1), masks_momentum=False, rescale_on_lr_change=True)
        memory.load_state_dict(state)
    assert all(torch.allclose(state["residual"][name], residual[name]) for name in SIZES)
