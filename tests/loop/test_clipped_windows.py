"""Clipping after each of several backwards in a step, as in truncated backpropagation through time."""

import pytest
import torch
from torch import nn

from lightning_sparse import AdamCorrection, sparsify_gradients
from tests.helpers.devices import DEVICE

WINDOWS, STEPS = 8, 40
CORRECTION = AdamCorrection(warmup_steps=10, density_decay_steps=0)


def mean_length(rank, norm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lengths = []
    with sparsify_gradients(model, optimizer, "lags", 0.05, warmup_steps=0, optimizer_correction=CORRECTION):
        for step in range(STEPS):
            before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
            for window in range(WINDOWS):
                generator = torch.Generator().manual_seed(1000 * step + 10 * window + rank)
                rows = torch.randn(4, 32, generator=generator).to(DEVICE)
                (model(rows) - rows).square().mean().backward()
                if norm is not None and step >= CORRECTION.warmup_steps:
                    nn.utils.clip_grad_norm_(model.parameters(), norm)
            optimizer.step()
            optimizer.zero_grad()
            lengths.append((nn.utils.parameters_to_vector(model.parameters()).detach() - before).norm().item())
    return sum(lengths[STEPS // 2 :]) / (STEPS - STEPS // 2)


@pytest.mark.exhaustive
def test_a_clip_after_each_backward_makes_no_step_longer(pair):
    for clipped, plain in zip(pair.run(mean_length, 0.1), pair.run(mean_length, None)):
        assert clipped < 1.2 * plain
