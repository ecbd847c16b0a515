import pytest
import torch

from lightning_sparse.compressors.selection import FlatSelection
from lightning_sparse.engine.memory.momentum import MomentumMemory
from lightning_sparse.engine.memory.residual import Hyperparameters

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


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("is_nesterov", [False, True])
def test_velocities_and_residuals_are_those_of_the_formula(momentum, is_nesterov):
    memory = MomentumMemory(Hyperparameters(0.1), masks_momentum=False)
    velocity, residual = ({name: torch.zeros(size) for name, size in SIZES.items()} for _ in range(2))
    settings = Hyperparameters(0.1, momentum, is_nesterov and momentum > 0)
    for step, accepted in enumerate([YES, YES, NO, YES]):
        accumulated, _ = make_step(memory, step, settings, accepted)
        for name, gradient in gradients(step).items():
            if settings.nesterov:
                next_velocity = (velocity[name] + gradient) * momentum
                expected = gradient + next_velocity + residual[name]
            else:
                next_velocity = velocity[name] * momentum + gradient
                expected = next_velocity + residual[name]
            assert torch.equal(accumulated[name], expected)
            if accepted:
                velocity[name], residual[name] = next_velocity, expected
                residual[name][0] = 0.0
    state = memory.state_dict()
    for name in SIZES:
        assert torch.equal(state["residual"][name], residual[name])
        assert not momentum or torch.equal(state["momentum"][name], velocity[name])
    assert momentum or not state["momentum"]  # no momentum is stored without momentum


def test_momentum_that_begins_later_begins_from_zero_as_the_optimizer_does():
    memory, parameter = MomentumMemory(Hyperparameters(0.1), masks_momentum=False), torch.nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for step, momentum in enumerate([0.0, 0.9, 0.9]):
        make_step(memory, step, Hyperparameters(0.1, momentum))
        parameter.grad, optimizer.param_groups[0]["momentum"] = gradients(step)["smaller"], momentum
        optimizer.step()
    assert torch.equal(memory.state_dict()["residual"]["smaller"][1:], -parameter.detach()[1:])


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
