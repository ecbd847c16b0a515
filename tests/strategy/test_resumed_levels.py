from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from lightning_sparse import AdamCorrection
from tests.helpers.fits import fits
from tests.helpers.resuming import Starting

TOPK = {"compressor": "topk", "density": 0.05}
CORRECTED = {
    **TOPK,
    "optimizer_correction": AdamCorrection(warmup_steps=3, density_decay_steps=2, second_moment_interval=2),
}


class Odd(Starting):
    """A model with parts of unequal sizes."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.network = nn.Sequential(nn.Linear(32, 5), nn.ReLU(), nn.Linear(5, 32))


class WithAdamW(Odd):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, betas=(0.9, 0.95))


def module_for(settings):
    return WithAdamW if settings is CORRECTED else Odd


class Stage(NamedTuple):
    ranks: int
    local_world_size: int
    levels: Any = "auto"

    @property
    def shared_by(self):
        return self.local_world_size if self.levels != 1 and 1 < self.local_world_size < self.ranks else 1


def owed(states, shared_by):
    numels = {name: tensor.numel() for name, tensor in Odd().named_parameters()}
    found = {}
    for kind in ("residual", "update", "momentum"):
        for name in states[0].get(kind, {}):
            shares = [state[kind][name].double() for state in states]
            wholes = [torch.cat(shares[first : first + shared_by]) for first in range(0, len(shares), shared_by)]
            found[f"{kind} of {name}"] = torch.stack(wholes).mean(dim=0)[: numels[name]]
    return found


MOVES = [Stage(4, 2), Stage(4, 2, levels=1), Stage(4, 2, levels=2), Stage(2, 2), Stage(4, 2), Stage(1, 1), Stage(4, 2)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "settings", [TOPK, {"compressor": "dgc", "density": 0.05}, CORRECTED], ids=["topk", "dgc", "AdamW"]
)
def test_on_other_nodes_the_mean_of_what_is_owed_stays(pools, tmp_path, settings):
    source, expected, before = None, {}, None
    for number, stage in enumerate(MOVES):
        path, limits = str(tmp_path / f"{number}.ckpt"), {"max_steps": 7 * (number + 1), "max_epochs": -1}
        module = partial(module_for(settings), None, path)
        strategy = {**settings, "levels": stage.levels, "warmup_steps": 0}
        answers = fits(pools[stage.ranks], module, strategy, source, local_world_size=stage.local_world_size, **limits)
        if before is not None:
            present = owed([each.notes["memory"] for each in answers], stage.shared_by)
            torch.testing.assert_close(present, expected, rtol=1e-6, atol=1e-9)
            told = f"{before.ranks} ranks saved"
            assert sum(told in line for line in answers[0].said) == 1
        source, before = path, stage
        expected = owed([each.kept["memory"] for each in answers], stage.shared_by)
        assert any(tensor.any() for tensor in expected.values())
