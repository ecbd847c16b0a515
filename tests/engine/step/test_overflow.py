import copy
from itertools import cycle, pairwise

import pytest
import torch
from pytorch_lightning.plugins import MixedPrecision
from torch import nn

from lightning_sparse import sparsify_gradients
from lightning_sparse.testing.tensors import assert_same
from tests.helpers.devices import DEVICE
from tests.helpers.fits import fits
from tests.helpers.sparse_ddp import DENSITY, DIFFERENT_NAMES
from tests.helpers.trainers import Small


class Overflowing(Small):
    overflow_at = 3

    def __init__(self):
        super().__init__()
        self.notes = []

    def note(self):
        return {
            "parameters": torch.cat([parameter.detach().flatten().clone() for parameter in self.parameters()]),
            "kept": copy.deepcopy(self.trainer.strategy.engine.state_dict()),
            "scale": self.trainer.precision_plugin.scaler.get_scale(),
        }

    def on_train_batch_start(self, batch, batch_idx):
        self.notes.append(self.note())

    def training_step(self, batch, batch_index):
        loss = super().training_step(batch, batch_index)
        return loss * float("inf") if batch_index == self.overflow_at and self.global_rank == 1 else loss

    def on_train_end(self):
        self.notes.append(self.note())


def train_two(rank, overflow_at):
    model = nn.ParameterDict({name: torch.zeros(100) for name in ("first", "second")}).to(DEVICE)
    optimizers = [torch.optim.SGD([each], lr=1.0) for each in model.values()]
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=4.0, growth_interval=1000)
    generator, owed = torch.Generator().manual_seed(rank), torch.zeros(100)
    with sparsify_gradients(model, optimizers, "topk", density=0.1, warmup_steps=0, scaler=scaler) as handle:
        for step in range(12):
            inputs, overflows = torch.randn(100, generator=generator) + 1, step == overflow_at
            owed += 0 if overflows else inputs
            first, second = ((each * inputs.to(DEVICE)).sum() for each in model.values())
            scaler.scale(first * (float("inf") if overflows else 1.0) + second).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
        waiting = handle.engine.memory.state_dict()["residual"]["second"].cpu()
    return owed, waiting - model["second"].detach().cpu()


def test_an_overflow_of_one_optimizer_has_none_apply_what_is_not_kept(pair):
    owed, got = (sum(each) / 2 for each in zip(*pair.run(train_two, 9)))
    torch.testing.assert_close(got, owed)


def without_counter(kept):
    return {part: state for part, state in kept.items() if part != "averager"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("compressor", "wire"), list(zip(DIFFERENT_NAMES, cycle(["float32", "float16"]))))
def test_an_overflow_in_fp16_is_skipped_and_leaves_what_is_kept(pair, compressor, wire):
    # A small scale, because a default scale would overflow in fp16.
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10, growth_interval=1000)
    plugins = [MixedPrecision("16-mixed", DEVICE.type, scaler=scaler)]
    settings = {"compressor": compressor, "density": DENSITY[compressor], "wire": wire, "warmup_steps": 0}
    answers = [each.notes for each in fits(pair, Overflowing, settings, plugins=plugins, max_epochs=1)]
    for notes in answers:
        for step, (before, after) in enumerate(pairwise(notes)):
            is_skipped = step == Overflowing.overflow_at
            assert torch.equal(before["parameters"], after["parameters"]) == is_skipped, step
            assert after["scale"] == before["scale"] / (2 if is_skipped else 1), step
            if is_skipped:
                # A2SGD counts on, because only the device stores whether the scaler skipped the step.
                assert_same(without_counter(before["kept"]), without_counter(after["kept"]))
            assert after["parameters"].isfinite().all()
    kept = [notes[Overflowing.overflow_at]["kept"]["memory"].get("residual", {}) for notes in answers]
    assert all(residual.any() for residuals in kept for name, residual in residuals.items() if "weight" in name)
