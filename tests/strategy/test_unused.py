from functools import partial

import pytest
import torch

from lightning_sparse import AdamCorrection
from lightning_sparse.testing.tensors import assert_same
from tests.helpers.fits import fits
from tests.helpers.resuming import Numbered

SGD, ADAMW = partial(torch.optim.SGD, lr=0.05), partial(torch.optim.AdamW, lr=0.01)
CORRECTED = {"optimizer_correction": AdamCorrection(3, 2, 2)}
CASES = {
    "LAGS": (SGD, {"compressor": "lags"}),
    "LAGS, AdamW": (ADAMW, {"compressor": "lags", **CORRECTED}),
    "ExDyna": (SGD, {"compressor": "exdyna"}),
    "ExDyna, AdamW": (ADAMW, {"compressor": "exdyna", **CORRECTED}),
    "DGC": (SGD, {"compressor": "dgc", "warmup_steps": 0}),
    "auto": (SGD, {"compressor": "lags", "schedule": "auto"}),
    "local steps": (ADAMW, {"local_steps": 3}),
}


class Idle(Numbered):
    """A model without a gradient in one batch of all ranks, and in one batch of rank 1."""

    def __init__(self, build):
        super().__init__()
        self.build = build

    def training_step(self, batch, batch_index):
        if batch_index == 1 or (batch_index == 2 and self.global_rank == 1):
            return torch.zeros((), requires_grad=True, device=self.device)
        return super().training_step(batch, batch_index)

    def configure_optimizers(self):
        return self.build(self.parameters())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("build", "settings"), CASES.values(), ids=CASES)
def test_a_step_without_a_gradient_needs_no_flag(pair, build, settings):
    trained, other = fits(pair, partial(Idle, build), {"density": 0.1, **settings})
    assert_same(trained.end, other.end)
    if "local_steps" not in settings:
        assert_same(trained.batches, other.batches)
    assert not any(torch.equal(before, trained.end[name]) for name, before in trained.start.items())
