import pytest
import torch

from lightning_sparse import AdamCorrection, sparsify_gradients
from lightning_sparse.functional.reductions import shift_by_sign, sign_totals
from tests.helpers.racing import CPU, CUDA, SYSTEMS, Skipping, played


def model_and_batches(device, count):
    torch.manual_seed(0)
    net, batches = Skipping(), torch.randn(count, 4, 64)
    return net.to(device), batches.to(device)


def trained_on(device, given):
    (net, batches), overflows = model_and_batches(device, 12), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with sparsify_gradients(net, optimizer, **{"density": 0.05, "warmup_steps": 0, "levels": 1, **given}):
        for step, batch in enumerate(batches):
            (net(batch, skips=step % 3 == 1) * (float("inf") if step in (5, 7) else 1.0)).backward()
            gradients = [each.grad.cpu() for each in net.parameters() if each.grad is not None]
            overflows.append(not all(bool(gradient.isfinite().all()) for gradient in gradients))
            if not overflows[-1]:
                optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in net.parameters()], overflows


@pytest.mark.sampled(7)
@pytest.mark.parametrize("schedule", ["layerwise", "single"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_training_on_a_device_ends_as_on_a_cpu(system, schedule):
    given = {"schedule": schedule, **SYSTEMS[system]}
    with played():
        (found, overflows), (expected, expected_overflows) = (trained_on(device, given) for device in (CUDA, CPU))
    assert overflows == expected_overflows
    assert [step for step, overflowed in enumerate(overflows) if overflowed] == [5, 7]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_totals_by_sign_and_what_they_shift_are_those_of_a_cpu_and_nobody_waits():
    tensor = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    expected = sign_totals(tensor)
    with played() as device:
        on_device, shifts = tensor.to(CUDA), torch.tensor([0.5, -0.25]).to(CUDA)
        device.waits.clear()
        totals = sign_totals(on_device)
        shift_by_sign([on_device], *shifts)
        assert device.waits == []
        torch.testing.assert_close(totals.cpu(), expected)
        assert torch.equal(on_device.cpu(), torch.where(tensor > 0, tensor + 0.5, tensor - 0.25))


def trained_with_adam(device):
    """Return parameters after a step with an unused layer and a gradient of the previous step.

    The ranks are those of :func:`~tests.helpers.racing.played`.
    """
    net, batches = model_and_batches(device, 5)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    correction = AdamCorrection(warmup_steps=2, density_decay_steps=0, second_moment_interval=100)
    with sparsify_gradients(
        net, optimizer, compressor="topk", density=0.01, schedule="single", levels=1, optimizer_correction=correction
    ):
        for step, batch in enumerate(batches):
            net(batch, skips=step == 4).backward()
            stale = net.between.weight.grad.cpu().clone()
            optimizer.step()
            if step < 3:
                optimizer.zero_grad()
    return stale, [parameter.detach().cpu() for parameter in net.parameters()]


def test_a_gradient_of_the_step_before_that_no_rank_has_replaced_is_applied_everywhere():
    with played():
        (stale, found), (expected_stale, expected) = trained_with_adam(CUDA), trained_with_adam(CPU)
    assert stale.any()
    for one, other in zip([stale, *found], [expected_stale, *expected], strict=True):
        torch.testing.assert_close(one, other)
