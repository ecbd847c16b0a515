from unittest import mock

import pytest
import torch

from lightning_sparse import AdamCorrection, sparsify_gradients
from lightning_sparse.loop import backend_choice
from tests.helpers.devices import DEVICE
from tests.helpers.trainers import Line

STEPS = 160


def losses_of_auto(rank):
    model, losses, were_plain, seconds = Line().to(DEVICE), [], [], [0.0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    correction = AdamCorrection(warmup_steps=10, density_decay_steps=10)
    with (
        mock.patch.object(backend_choice, "perf_counter", side_effect=lambda: seconds[0]),
        sparsify_gradients(
            model, optimizer, "lags", schedule="auto", warmup_steps=0, optimizer_correction=correction
        ) as handle,
    ):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(step, rank)
            loss.backward()
            were_plain.append(handle.engine.reducer.is_dense)
            seconds[0] += 0.01 if were_plain[-1] else 0.04
            optimizer.step()
            losses.append(loss.item())
    return losses, were_plain


@pytest.mark.exhaustive
def test_a_change_to_plain_ddp_leaves_the_loss_alone(pair):
    """Late in training the residual has many updates, and a single step with all updates overshoots."""
    for losses, were_plain in pair.run(losses_of_auto):
        changes = len(were_plain) - were_plain[::-1].index(False) - 2  # after the trials
        assert changes < STEPS - 40
        assert max(losses[changes:]) < 2 * max(losses[changes - 20 : changes])
