"""Resumed they go on to the bit, too: models whose step is more than one gradient for each parameter."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sparse import LocalSteps, SparseDDPStrategy
from lightning_sparse.testing.equality import differences
from lightning_sparse.testing.pool import Pool
from tests.helpers.resuming import BATCHES, Numbered, fit_numbered, resume_exactly
from tests.helpers.sparse_ddp import DENSITY


class OneCycle(Numbered):
    """A schedule writes the momentum after every step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Decaying(Numbered):
    """The weight decay is written before every step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["weight_decay"] = 0.01 * (BATCHES * self.current_epoch + batch_idx + 1)


class Cadence(Numbered):
    """One optimizer steps after every batch, the other one after three, with all that has gathered."""

    momentum = 0.0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.automatic_optimization = False
        self.slow = nn.Linear(32, 32)

    def training_step(self, batch: Tensor, batch_index: int) -> None:  # type: ignore[override]
        rows = self.rows(batch_index)
        fast, slow = self.optimizers()  # type: ignore[misc]
        fast.zero_grad()
        self.manual_backward((self.network(rows) - rows).square().mean() + (self.slow(rows) - rows).square().mean())
        fast.step()
        if batch_index % 3 == 2:
            slow.step()
            slow.zero_grad()

    def configure_optimizers(self) -> Any:
        layers = self.network, self.slow
        return [torch.optim.SGD(layer.parameters(), lr=0.1, momentum=self.momentum) for layer in layers]


class CadenceWithMomentum(Cadence):
    """The same, with momentum."""

    momentum = 0.9


class Heads(Numbered):
    """A head for even batches, another one for odd batches, and a layer that nobody needs."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.heads = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
        self.spare = nn.Linear(2, 2)

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        rows = self.rows(batch_index)
        return (self.heads[batch_index % 2](self.network(rows)) - rows).square().mean()


class Edges(Numbered):
    """Parameters without an element, without a dimension, and of one element."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.shift = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        rows = self.rows(batch_index)
        return (self.network(rows) * self.scale + self.shift + self.empty.sum() - rows).square().mean()


class Sparse(Numbered):
    """An embedding whose gradients have a sparse layout."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.table = nn.Embedding(50, 32, sparse=True)

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        rows = self.rows(batch_index)
        picked = self.table((20 * rows[:, :3].abs()).long().clamp(max=49)).sum(dim=1)
        return (self.network(rows + picked) - rows).square().mean()

    def configure_optimizers(self) -> Any:
        """Return SGD without weight decay, which sparse layouts do not go with."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


IN_PAIRS = {"accumulate_grad_batches": 2}
UNUSED = {"find_unused_parameters": True}
MODELS: dict[str, tuple[Any, str, dict[str, Any], dict[str, Any]]] = {
    "a momentum that is scheduled": (OneCycle, "dgc", {}, {}),
    "a weight decay that is scheduled": (Decaying, "dgc", {}, {}),
    "an optimizer that steps less often": (Cadence, "topk", {}, {}),
    "the same, with momentum": (CadenceWithMomentum, "dgc", {}, {}),
    "used before the save only": (Heads, "exdyna", UNUSED, IN_PAIRS),
    "the same, own buckets": (Heads, "topk", {**UNUSED, "gradient_as_bucket_view": False}, IN_PAIRS),
    "sparse layout": (Sparse, "topk", {}, IN_PAIRS),
    **{f"edges, {name}": (Edges, name, {}, IN_PAIRS) for name in ("topk", "exdyna", "sdagc")},
}


@pytest.mark.parametrize(("module", "compressor", "settings", "arguments"), MODELS.values(), ids=MODELS)
def test_resumed_it_goes_on_to_the_bit(
    pair: Pool, tmp_path: Path, module: Any, compressor: str, settings: dict[str, Any], arguments: dict[str, Any]
) -> None:
    build = partial(SparseDDPStrategy, compressor, DENSITY[compressor], schedule="layerwise", **settings)
    for resumed, found in pair.run(resume_exactly, build, str(tmp_path / "mid.ckpt"), 7, arguments, module):
        assert resumed == [8, 9, 10, 11, 12]
        assert found == []


class Convolving(Numbered):
    """A convolution, and a weight that is kept transposed; notes of what waits before each batch."""

    def __init__(self, *arguments: Any, is_other: bool = False) -> None:
        super().__init__(*arguments)
        self.convolution = nn.Conv2d(2, 4, 3, padding=1)
        matrix = torch.randn(16, 8)
        self.matrix = nn.Parameter(matrix if is_other else matrix.t().contiguous().t())
        if is_other:
            self.convolution = self.convolution.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.notes: list[dict[str, Tensor]] = []

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        rows = self.rows(batch_index)
        outputs = self.convolution(rows.view(4, 2, 4, 4)), rows.view(16, 8) @ self.matrix.t(), self.network(rows)
        return torch.stack([output.square().mean() for output in outputs]).sum()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Note what waits, each element at its place of the parameter."""
        kept = self.trainer.strategy.engine.memory.state_dict()["residual"]  # type: ignore[union-attr]
        likes = dict(self.named_parameters())
        self.notes.append(
            {name: kept[name].as_strided(likes[name].shape, likes[name].stride()).clone() for name in kept}
        )


def resume_laid_otherwise(rank: int, path: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Save, and go on with parameters that lie otherwise in memory; return what waits at the save, and then."""
    notes = []
    for model, ckpt_path in ((Convolving(4, path), None), (Convolving(is_other=True), path)):
        fit_numbered(rank, SparseDDPStrategy("topk", 0.05), model, ckpt_path)
        notes.append(model.notes)
    return notes[0][4], notes[1][0]


def test_what_waits_stays_at_its_place_where_parameters_lie_otherwise_in_memory(pair: Pool, tmp_path: Path) -> None:
    for saved, resumed in pair.run(resume_laid_otherwise, str(tmp_path / "mid.ckpt")):
        assert saved["convolution.weight"].any()
        assert differences(saved, resumed) == []


class Flickering(Heads):
    """The layer that nobody needs is frozen, and unfrozen between two batches of one step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.spare.requires_grad_(batch_idx != 2)


def fit_both(rank: int, settings: dict[str, Any]) -> tuple[list[str], dict[int, Any]]:
    """Fit with and without flickering; return where the weights differ, and those with."""
    models = Flickering(), Heads()
    for model in models:
        strategy = SparseDDPStrategy("topk", 0.05, schedule="layerwise", **UNUSED, **settings)
        fit_numbered(rank, strategy, model, **IN_PAIRS)
    return differences(models[0].history, models[1].history), models[0].history


@pytest.mark.parametrize("is_view", [True, False])
def test_wrapping_anew_within_a_step_changes_nothing(pair: Pool, is_view: bool) -> None:
    (found, one), (_, other) = pair.run(fit_both, {"gradient_as_bucket_view": is_view})
    assert found == []
    assert differences(one, other) == []


class Thawing(Numbered):
    """A model of which a part is frozen in the first epoch, and when a training begins."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.network[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Unfreeze it for good."""
        self.network[0].requires_grad_(self.current_epoch > 0)


@pytest.mark.parametrize(
    ("settings", "arguments", "save_after"),
    [
        ({"local_steps": 3}, {}, 8),
        ({"compressor": "exdyna", "local_steps": 3}, {}, 4),
        ({"local_steps": 3}, {"precision": "bf16-true"}, 8),
        ({"local_steps": 2}, IN_PAIRS, 9),
        ({}, IN_PAIRS, 9),
    ],
    ids=["within a round", "before the change", "bf16", "within a step of a round", "within a step"],
)
def test_it_goes_on_where_other_parameters_are_trained_than_at_the_start(
    pair: Pool, tmp_path: Path, settings: dict[str, Any], arguments: dict[str, Any], save_after: int
) -> None:
    build, path = partial(SparseDDPStrategy, **{"density": 0.05, **settings}), str(tmp_path / "thawing.ckpt")
    for resumed, found in pair.run(resume_exactly, build, path, save_after, arguments, Thawing):
        assert resumed == list(range(save_after + 1, 13))
        assert found == []


def test_three_ranks_divide_what_was_restored_as_what_backward_brings(pools: dict[int, Pool], tmp_path: Path) -> None:
    build = partial(SparseDDPStrategy, "topk", local_steps=LocalSteps(2, synchronous_steps=100), **UNUSED)
    for resumed, found in pools[3].run(resume_exactly, build, str(tmp_path / "three.ckpt"), 7, IN_PAIRS):
        assert resumed == [8, 9, 10, 11, 12]
        assert found == []
