from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_sparse import AdamCorrection, sparsify_gradients
from lightning_sparse.compressors.selection import FlatSelection
from lightning_sparse.engine.adam import memory as memory_module
from lightning_sparse.engine.adam.memory import AdamMemory
from lightning_sparse.engine.adam.steps import AdamSteps
from lightning_sparse.functional import elements
from tests.helpers.racing import CPU, CUDA, Skipping, played

NUMELS = (5, 3000, 17, 70_000, 900)
RATE, STEPS = 0.1, 3


@contextmanager
def pretended_device():
    """Let the CPU take the device's code path."""
    with mock.patch.object(elements, "_CPU_BATCH", 4000), mock.patch.object(memory_module, "look_up", return_value={}):
        yield


def means(ranks):
    counts = tuple(max(1, numel // 100) for numel in NUMELS)
    starts = [sum(NUMELS[:each]) for each in range(len(NUMELS))]
    rows = [
        torch.cat([start + torch.arange(count) * 7 % 41 for start, count in zip(starts, counts)]) for _ in range(ranks)
    ]
    values = torch.randn(ranks, sum(counts), generator=torch.Generator().manual_seed(1))
    return FlatSelection(values, torch.stack(rows), NUMELS, counts)


def trained(change, dtype=torch.float32):
    random = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(numel, generator=random)) for numel in NUMELS]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.1)
    for parameter in parameters:
        moments = [torch.rand(parameter.shape, generator=random).to(dtype) for _ in range(2)]
        step = torch.tensor(float(STEPS))
        optimizer.state[parameter] = {"step": step, "exp_avg": moments[0], "exp_avg_sq": moments[1]}
    names = {parameter: str(place) for place, parameter in enumerate(parameters)}
    memory = AdamMemory(2, AdamCorrection(warmup_steps=2, density_decay_steps=0))
    steps = AdamSteps([optimizer], names, lambda name: 0.01, memory)
    context = steps.next_step(is_dense=False)
    own = [torch.randn(numel, generator=random) for numel in NUMELS]
    accumulated = memory.compensate(list(names.values()), own, context.hyperparameters)
    sent = [tensor.clone() for tensor in accumulated]
    for parameter, gradient in zip(parameters, accumulated):
        parameter.grad = gradient
    memory.write_means(list(names.values()), accumulated, means(2))
    steps.note_arrived()
    change(parameters)
    optimizer.step()
    return [*sent, *(parameter.detach() for parameter in parameters), *(parameter.grad for parameter in parameters)]


def leave(parameters):
    """Change nothing."""


def add_everywhere(parameters):
    for parameter in parameters:
        parameter.grad.add_(0.01)


def replace(parameters):
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("change", [leave, add_everywhere, replace])
def test_a_corrected_step_on_a_device_is_that_on_a_cpu(change, dtype):
    expected = trained(change, dtype)
    with pretended_device():
        found = trained(change, dtype)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def trained_on(device):
    """Return parameters after a step with an unused layer and a gradient of the previous step.

    The ranks are those of :func:`~tests.helpers.racing.played`.
    """
    torch.manual_seed(0)
    net = Skipping()
    batches = torch.randn(5, 4, 64)
    net, batches = net.to(device), batches.to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
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
        (stale, found), (expected_stale, expected) = trained_on(CUDA), trained_on(CPU)
    assert stale.any()
    for one, other in zip([stale, *found], [expected_stale, *expected], strict=True):
        torch.testing.assert_close(one, other)
