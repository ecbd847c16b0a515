"""Residuals in units of updates: training survives learning rates that decay to zero or jump, as with gradients."""

import math
from functools import cache, partial

import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, OneCycleLR

from lightning_sparse import sparsify_gradients
from lightning_sparse.compressors import LAGS, SDAGC

STEPS = 360
SCHEDULES = {
    "restarts to 0": partial(CosineAnnealingWarmRestarts, T_0=STEPS // 4),
    "restarts to 1e-4": partial(CosineAnnealingWarmRestarts, T_0=STEPS // 4, eta_min=1e-4),
    "one cycle": partial(OneCycleLR, max_lr=0.1, total_steps=STEPS + 1, cycle_momentum=False),
    "warm-up from 0": partial(LambdaLR, lr_lambda=lambda step: min(1.0, step / 50)),
    "group at 0": partial(LambdaLR, lr_lambda=[lambda step: 1.0, lambda step: float(not 100 <= step < 180)]),
    "jump": partial(LambdaLR, lr_lambda=lambda step: 1e-3 if 120 <= step < 150 else 1.0),
    "jump after half": partial(LambdaLR, lr_lambda=lambda step: 1e-3 if 100 <= step < 280 else 1.0),
}
# Below a tenth of the largest rate, a sent element is worth less than the residual.
MARGINS = {"jump after half": 0.1}
COMPRESSORS = {  # with residuals of gradients, for comparison
    "sdagc": (SDAGC, partial(SDAGC, revises_learning_rate=False)),
    "lags": (partial(LAGS, error_feedback="update"), LAGS),
}


@cache
def images():
    digits = load_digits()
    return torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)


def train(rank, schedule, build, momentum):
    torch.manual_seed(0)
    inputs, targets = images()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.02 if momentum else 0.1, momentum=momentum)
    scheduler = SCHEDULES[schedule](optimizer)
    generator = torch.Generator().manual_seed(rank)
    with sparsify_gradients(model, optimizer, build(), density=0.01, warmup_steps=0, schedule="single"):
        for _ in range(STEPS):
            batch = torch.randint(0, len(inputs), (16,), generator=generator)
            optimizer.zero_grad()
            cross_entropy(model(inputs[batch]), targets[batch]).backward()
            optimizer.step()
            scheduler.step()
    with torch.no_grad():
        return float(cross_entropy(model(inputs), targets))


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("compressor", COMPRESSORS)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_schedules_train_as_with_residuals_of_gradients(pair, schedule, compressor, momentum):
    loss, by_gradients = (pair.run(train, schedule, build, momentum)[0] for build in COMPRESSORS[compressor])
    assert math.isfinite(loss)
    assert loss < by_gradients + MARGINS.get(schedule, 0.05)
