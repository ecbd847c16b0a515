"""A real gradient scaler, and a gradient that overflows in fp16: the step is skipped, nothing that is kept moves."""

import copy
from itertools import cycle, pairwise

import pytest
import torch
from pytorch_lightning.plugins import MixedPrecision
from torch import nn

from lightning_sparse import sparsify
from lightning_sparse.testing.tensors import assert_same
from tests.helpers.devices import DEVICE
from tests.helpers.fits import fits
from tests.helpers.sparse_ddp import DENSITY, DIFFERENT_NAMES, backpropagate, sparse_ddp
from tests.helpers.trainers import Small


class Overflowing(Small):
    """A model whose loss on rank 1 is infinite in one batch, and notes of every batch."""

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
    """Train two vectors by one backward; the first overflows once. Return what the second was owed, and got."""
    model = nn.ParameterDict({name: torch.zeros(100) for name in ("first", "second")}).to(DEVICE)
    optimizers = [torch.optim.SGD([each], lr=1.0) for each in model.values()]
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=4.0, growth_interval=1000)
    generator, owed = torch.Generator().manual_seed(rank), torch.zeros(100)
    with sparsify(model, optimizers, "topk", density=0.1, warmup_epochs=0, scaler=scaler) as handle:
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


@pytest.mark.parametrize(("compressor", "wire"), list(zip(DIFFERENT_NAMES, cycle(["float32", "float16"]))))
def test_an_overflow_in_fp16_is_skipped_and_leaves_what_is_kept(pair, compressor, wire):
    # Small enough for these gradients in fp16; the scale would otherwise overflow on its own.
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10, growth_interval=1000)
    plugins = [MixedPrecision("16-mixed", DEVICE.type, scaler=scaler)]
    settings = {"compressor": compressor, "density": DENSITY[compressor], "wire": wire, "warmup_epochs": 0}
    answers = [each.notes for each in fits(pair, Overflowing, settings, plugins=plugins, max_epochs=1)]
    for notes in answers:
        for step, (before, after) in enumerate(pairwise(notes)):
            is_skipped = step == Overflowing.overflow_at
            assert torch.equal(before["parameters"], after["parameters"]) == is_skipped, step
            assert after["scale"] == before["scale"] / (2 if is_skipped else 1), step
            if is_skipped:
                # A2SGD's counter goes on: whether the scaler has skipped the step, only the device knows.
                assert_same(without_counter(before["kept"]), without_counter(after["kept"]))
            assert after["parameters"].isfinite().all()
    kept = [notes[Overflowing.overflow_at]["kept"]["memory"].get("residual", {}) for notes in answers]
    assert all(residual.any() for residuals in kept for name, residual in residuals.items() if "weight" in name)


class SparseEmbedding(nn.Module):
    """A layer, and an embedding whose gradient has a sparse layout."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8, sparse=True)
        self.linear = nn.Linear(8, 30)

    def forward(self, tokens, factor):
        """Return a loss in which the embedding alone has a factor."""
        loss = self.linear(torch.ones(8, device=tokens.device)).square().mean()
        return loss + factor * self.embedding(tokens).sum()


def kept_over_a_poisoned_embedding(rank, compressor):
    """Exchange a step whose sparse gradient is infinite on rank 1; return what was kept before and after it."""
    torch.manual_seed(0)
    with sparse_ddp(SparseEmbedding(), compressor) as (ddp, engine):
        tokens = torch.arange(4, device=DEVICE)
        backpropagate(ddp, engine, ddp(tokens, 1.0))
        before = copy.deepcopy(engine.state_dict()["memory"])
        backpropagate(ddp, engine, ddp(tokens, float("inf") if rank == 1 else 1.0))
        after = copy.deepcopy(engine.state_dict()["memory"])
        backpropagate(ddp, engine, ddp(tokens, 1.0))
        has_moved = any(
            not torch.equal(tensor, after[kind][name])
            for kind, tensors in engine.state_dict()["memory"].items()
            for name, tensor in tensors.items()
        )
        return before, after, has_moved


@pytest.mark.parametrize("compressor", ["topk", "sdagc"])
def test_an_infinity_in_a_sparse_layout_moves_nothing_that_is_kept(pair, compressor):
    for before, after, has_moved in pair.run(kept_over_a_poisoned_embedding, compressor):
        assert_same(before, after)
        assert has_moved  # by a step without one
