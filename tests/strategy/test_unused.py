from functools import partial

import pytest
import torch
from torch import nn

from lightning_sparse import AdamCorrection
from lightning_sparse.testing.tensors import assert_same
from tests.helpers.fits import fits
from tests.helpers.resuming import Numbered

STRATEGIES = {
    "lags": {"compressor": "lags", "density": 0.1},
    "exdyna": {"compressor": "exdyna", "density": 0.1},
    "dgc": {"compressor": "dgc", "density": 0.1, "warmup_steps": 0},
    "auto": {"compressor": "lags", "density": 0.1, "schedule": "auto"},
    "local steps": {"density": 0.1, "local_steps": 3},
}


class Optimized(Numbered):
    def __init__(self, kind, *arguments):
        super().__init__(*arguments)
        self.kind = kind

    def build(self, parameters):
        if self.kind == "AdamW":
            return torch.optim.AdamW(parameters, lr=0.01)
        return torch.optim.SGD(parameters, lr=0.05)

    def configure_optimizers(self):
        return self.build(self.parameters())


class Partly(Optimized):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.never, self.apart, self.at_times, self.seldom = (nn.Linear(32, 32) for _ in range(4))

    def training_step(self, batch, batch_index):
        rows = self.rows(batch_index)
        for layer, is_used in (
            (self.apart, self.global_rank == 0),
            (self.at_times, batch_index % 2),
            (self.seldom, self.global_rank == 1 and batch_index % 3 == 0),
        ):
            rows = layer(rows) if is_used else rows
        return (self.network(rows) - self.rows(batch_index)).square().mean()


class Idle(Optimized):
    def training_step(self, batch, batch_index):
        if batch_index == 1 or (batch_index == 2 and self.global_rank == 1):
            return torch.zeros((), requires_grad=True, device=self.device)
        return super().training_step(batch, batch_index)


MODELS = {"partly used": Partly, "idle": Idle}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_runs_without_a_flag(pair, strategy, model, kind):
    settings = dict(STRATEGIES[strategy])
    if kind == "AdamW" and strategy in ("lags", "exdyna"):
        settings["optimizer_correction"] = AdamCorrection(3, 2, 2)
    if kind == "AdamW" and strategy == "dgc":
        pytest.skip("momentum that is taken over is SGD's")
    trained, other = fits(pair, partial(MODELS[model], kind), settings)
    assert_same(trained.end, other.end)
    if strategy != "local steps":
        assert_same(trained.batches, other.batches)
    for name, before in trained.start.items():
        assert torch.equal(before, trained.end[name]) == name.startswith("never")
