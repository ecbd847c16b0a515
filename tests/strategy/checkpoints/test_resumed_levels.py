"""What the ranks of a node share is saved, taken up to the bit, and carried to other numbers of ranks and levels."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_sparse import AdamCorrection, SparseDDPStrategy
from lightning_sparse.compressors import DGC
from lightning_sparse.strategy.checkpoints import CheckpointError
from lightning_sparse.testing.pool import Pool
from tests.helpers.resuming import Numbered, fit_numbered, heard, resume_exactly

CORRECTION = AdamCorrection(dense_steps=3, fall_steps=2, refresh_steps=2)


def build(compressor: Any, settings: dict[str, Any]) -> SparseDDPStrategy:
    """Build a strategy, and its compressor if that is not a name."""
    return SparseDDPStrategy(compressor if isinstance(compressor, str) else compressor(), **settings)


class WithAdamW(Numbered):
    """The same model, trained by AdamW."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, betas=(0.9, 0.95))


EXACT = {
    "topk": ("topk", {"density": 0.05}, {}, Numbered),
    "owners": ("topk", {"density": 0.05, "exchange": "owners"}, {}, Numbered),
    "dense, sixteen bits": ("dense", {"wire": "bfloat16"}, {}, Numbered),
    "momentum, clipped": (partial(DGC, clip_norm=0.5), {"density": 0.05}, {}, Numbered),
    "between two batches": ("lags", {"density": 0.05}, {"accumulate_grad_batches": 2}, Numbered),
    "AdamW": ("topk", {"density": 0.05, "optimizer_correction": CORRECTION}, {"gradient_clip_val": 0.1}, WithAdamW),
}


@pytest.mark.parametrize(("compressor", "settings", "arguments", "module"), EXACT.values(), ids=EXACT)
def test_on_the_same_nodes_it_goes_on_to_the_bit(
    pools: dict[int, Pool],
    tmp_path: Path,
    compressor: Any,
    settings: dict[str, Any],
    arguments: dict[str, Any],
    module: type[Numbered],
) -> None:
    told = {"node_ranks": 2, **arguments}
    strategy = partial(build, compressor, settings)
    answers = pools[4].run(resume_exactly, strategy, str(tmp_path / "two.ckpt"), 7, told, module)
    for resumed, found in answers:
        assert resumed == [8, 9, 10, 11, 12]
        assert found == []
    for path in tmp_path.rglob("*.*t"):
        assert path.is_dir() or torch.load(path, weights_only=True)["lightning_sparse"]["node_ranks"] == 2


class Starting(Numbered):
    """A model that notes what its rank starts with."""

    def on_train_start(self) -> None:
        self.at_start = copied(self.trainer.strategy.engine)


class StartingAdamW(WithAdamW, Starting):
    """The same with AdamW."""


def copied(engine: Any) -> dict[str, dict[str, Tensor]]:
    """Copy what is kept."""
    state = {} if engine is None else engine.state_dict()["memory"]
    return {kind: {name: tensor.clone() for name, tensor in kept.items()} for kind, kept in state.items()}


class Stage(NamedTuple):
    """Where a fit goes on: so many ranks on each of some nodes, and the levels that are asked for."""

    ranks: int
    node_ranks: int
    levels: Any = "auto"

    @property
    def shared_by(self) -> int:
        return self.node_ranks if self.levels != 1 and 1 < self.node_ranks < self.ranks else 1


def fit_stage(
    rank: int, compressor: str, module: type[Starting], stage: Stage, steps: int, source: Any, path: str
) -> Any:
    """Go on from ``source`` and save to ``path``; return what was kept at start and end, and what was said."""
    model = module()
    strategy = (
        SparseDDPStrategy(
            compressor, density=0.05, levels=stage.levels, warmup_epochs=0, optimizer_correction=CORRECTION
        )
        if module is StartingAdamW
        else SparseDDPStrategy(compressor, density=0.05, levels=stage.levels, warmup_epochs=0)
    )
    with heard() as lines:
        trainer = fit_numbered(
            rank, strategy, model, source, max_steps=steps, max_epochs=-1, node_ranks=stage.node_ranks
        )
    trainer.save_checkpoint(path)
    return model.at_start, strategy._final_state["memory"], lines


def owed(states: list[dict[str, dict[str, Tensor]]], shared_by: int, numels: dict[str, int]) -> dict[str, Tensor]:
    """Return what the model is owed: of whole parameters, the mean over all who keep one."""
    found = {}
    for kind in ("residual", "update", "momentum"):
        for name in states[0].get(kind, {}):
            shares = [state[kind][name].double() for state in states]
            wholes = [torch.cat(shares[first : first + shared_by]) for first in range(0, len(shares), shared_by)]
            found[f"{kind} of {name}"] = torch.stack(wholes).mean(dim=0)[: numels[name]]
    return found


MOVES = [Stage(4, 2), Stage(4, 2, levels=1), Stage(4, 2, levels=2), Stage(2, 2), Stage(4, 2), Stage(1, 1), Stage(4, 2)]


@pytest.mark.parametrize(
    ("compressor", "module"),
    [("topk", Starting), ("dgc", Starting), ("topk", StartingAdamW)],
    ids=["topk", "dgc", "AdamW"],
)
def test_on_other_nodes_the_mean_of_what_is_owed_stays(
    pools: dict[int, Pool], tmp_path: Path, compressor: str, module: type[Starting]
) -> None:
    numels = {name: tensor.numel() for name, tensor in Numbered().named_parameters()}
    source, expected, before = None, {}, None
    for number, stage in enumerate(MOVES):
        path = str(tmp_path / f"{number}.ckpt")
        arguments = (compressor, module, stage, 7 * (number + 1), source, path)
        starts, ends, said = zip(*pools[stage.ranks].run(fit_stage, *arguments))
        if before is not None:
            present = owed(starts, stage.shared_by, numels)
            assert present.keys() == expected.keys()
            for label, value in present.items():
                torch.testing.assert_close(value, expected[label], rtol=1e-6, atol=1e-9, msg=f"{label}, {stage}")
            told = f"{before.ranks} ranks{' on nodes of 2' if before.shared_by > 1 else ''} saved"
            assert sum(told in line for line in said[0]) == 1
        source, expected, before = path, owed(ends, stage.shared_by, numels), stage
        assert any(tensor.any() for tensor in expected.values())


class Laid(Numbered):
    """A model with a convolution, in some order of memory."""

    def __init__(self, memory_format: torch.memory_format, **saving: Any) -> None:
        super().__init__(**saving)
        self.convolution = torch.nn.Conv2d(3, 4, 3).to(memory_format=memory_format)

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        rows = self.rows(batch_index)
        images = rows[:, :27].reshape(-1, 3, 3, 3)
        return super().training_step(batch, batch_index) + self.convolution(images).square().mean()


def resume_relaid(rank: int, path: str, levels: Any) -> str:
    """Save in one order of memory and go on in another; return what was said against it."""
    strategy = partial(SparseDDPStrategy, "topk", density=0.05)
    arguments: dict[str, Any] = {"node_ranks": 2, "max_epochs": 1}
    fit_numbered(rank, strategy(), Laid(torch.contiguous_format, save_after=4, path=path), **arguments)
    try:
        fit_numbered(rank, strategy(levels=levels), Laid(torch.channels_last), path, **arguments)
    except CheckpointError as error:
        return str(error)
    return ""


def test_in_another_order_of_memory_one_level_goes_on(pools: dict[int, Pool], tmp_path: Path) -> None:
    for refusal in pools[4].run(resume_relaid, str(tmp_path / "one.ckpt"), "auto"):
        assert "resume with the same memory_format, or with SparseDDPStrategy(levels=1)" in refusal
    assert pools[4].run(resume_relaid, str(tmp_path / "other.ckpt"), 1) == [""] * 4
