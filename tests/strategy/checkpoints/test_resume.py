"""Nothing is lost at a restart: what the ranks keep is saved, and taken up to the bit, or in the mean."""

import re
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.compressors import A2SGD, DGC, LAGS
from lightning_sparse.testing.equality import differences
from lightning_sparse.testing.pool import Pool
from tests.helpers.resuming import Numbered, fit_numbered, heard, kept_at_end, resume_exactly
from tests.helpers.sparse_ddp import COMPRESSOR_NAMES, DENSITY, GROUPING_FREE_NAMES, SCHEDULE_NAMES
from tests.helpers.trainers import weights


def build(compressor: Any, settings: dict[str, Any]) -> SparseDDPStrategy:
    """Build a strategy, and its compressor if that is not a name."""
    return SparseDDPStrategy(compressor if isinstance(compressor, str) else compressor(), **settings)


# A method whose numbers depend on the grouping is exact where that is given, and not left to what is measured.
REPRODUCIBLE = [
    (compressor, schedule)
    for compressor in COMPRESSOR_NAMES
    for schedule in SCHEDULE_NAMES
    if compressor in GROUPING_FREE_NAMES or schedule != "merged"
]


@pytest.mark.parametrize(("compressor", "schedule"), REPRODUCIBLE)
def test_resumed_in_the_middle_of_an_epoch_it_goes_on_to_the_bit(
    pair: Pool, tmp_path: Path, compressor: str, schedule: str
) -> None:
    settings = {"density": DENSITY[compressor], "schedule": schedule}
    answers = pair.run(resume_exactly, partial(build, compressor, settings), str(tmp_path / "mid.ckpt"), 8, {})
    for resumed, found in answers:
        assert resumed == [9, 10, 11, 12]
        assert found == []
    for path in tmp_path.rglob("*.*t"):
        assert path.is_dir() or torch.load(path, weights_only=True)["lightning_sparse"]["ranks"] == 2


EXACT = {
    "rates in the memory": (partial(LAGS, error_feedback="update"), {"density": 0.05}, {}),
    "local clipping": (partial(DGC, clip_norm=0.5), {"density": 0.05}, {}),
    "warm-up": ("dgc", {"density": 0.01, "warmup_epochs": 2}, {}),
    "drift": (partial(A2SGD, param_sync_every=5), {}, {}),
    "thresholds that follow": ("sdagc", {"density": 0.05}, {}),
    "sixteen bits": ("dgc", {"density": 0.05, "wire": "bfloat16"}, {}),
    "unused parameters": ("dgc", {"density": 0.05, "find_unused_parameters": True}, {}),
    "bf16": ("dgc", {"density": 0.05}, {"precision": "bf16-mixed"}),
    "between two batches of one step": ("dgc", {"density": 0.05}, {"accumulate_grad_batches": 2}),
    "after the first of three": ("exdyna", {"density": 0.05}, {"accumulate_grad_batches": 3}),
    "own buckets": ("topk", {"gradient_as_bucket_view": False}, {"accumulate_grad_batches": 2}),
    "drift between two batches": ("a2sgd", {}, {"accumulate_grad_batches": 2}),
}


@pytest.mark.parametrize(("compressor", "settings", "arguments"), EXACT.values(), ids=EXACT)
def test_nothing_that_is_kept_is_left_out(
    pair: Pool, tmp_path: Path, compressor: Any, settings: dict[str, Any], arguments: dict[str, Any]
) -> None:
    answers = pair.run(resume_exactly, partial(build, compressor, settings), str(tmp_path / "all.ckpt"), 7, arguments)
    for resumed, found in answers:
        assert resumed == [8, 9, 10, 11, 12]
        assert found == []


class Holding(Numbered):
    """A model that notes how many of the gradients that it starts with are still held when the optimizer steps."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not self.history:
            self.taken_up = [weakref.ref(parameter.grad) for parameter in self.parameters()]
            self.held: list[int] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.held.append(self.count())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.held.append(self.count())

    def count(self) -> int:
        return sum(gradient() is not None for gradient in self.taken_up)


def go_on_holding(rank: int, path: str) -> list[int]:
    """Save between two batches of one step, and go on."""
    settings: dict[str, Any] = {"accumulate_grad_batches": 2}
    fit_numbered(rank, SparseDDPStrategy("dgc", density=0.05), Numbered(7, path), **settings)
    model = Holding()
    fit_numbered(rank, SparseDDPStrategy("dgc", density=0.05), model, ckpt_path=path, **settings)
    return model.held[:2]


def test_what_had_been_accumulated_is_held_until_no_stream_reads_it(pair: Pool, tmp_path: Path) -> None:
    assert pair.run(go_on_holding, str(tmp_path / "held.ckpt")) == [[4, 0], [4, 0]]


class Idle(Numbered):
    """A model whose batches have no gradient, and that notes with what its optimizer steps."""

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        return 0.0 * super().training_step(batch, batch_index)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if not hasattr(self, "gradients"):
            self.gradients = {name: each.grad.clone() for name, each in self.named_parameters()}


def go_on_with_other_windows(rank: int, path: str) -> Any:
    """Save after two batches of three, go on in pairs; return what had gathered, and the gradients of the next step."""
    model = Idle()
    fit_numbered(rank, SparseDDPStrategy("dense"), Numbered(8, path), accumulate_grad_batches=3)
    (part,) = Path(path).parent.rglob(f"rank_{rank:05d}.*.pt")
    fit_numbered(rank, SparseDDPStrategy("dense"), model, ckpt_path=path, accumulate_grad_batches=2)
    return torch.load(part, weights_only=True)["gradients"], model.gradients


def test_what_had_been_accumulated_is_kept_where_the_windows_are_others(pair: Pool, tmp_path: Path) -> None:
    (one, stepped), (other, alike) = pair.run(go_on_with_other_windows, str(tmp_path / "windows.ckpt"))
    for name, gradient in stepped.items():
        assert torch.equal(gradient, alike[name])
        assert gradient.any()
        torch.testing.assert_close(gradient, (one[name] + other[name]) / 2)


def test_plain_ddp_loses_what_it_had_accumulated(pair: Pool, tmp_path: Path) -> None:
    # Which is why ours is kept, though Lightning's file has no place for it.
    path, arguments = str(tmp_path / "ddp.ckpt"), {"accumulate_grad_batches": 2}
    for _, found in pair.run(resume_exactly, DDPStrategy, path, 7, arguments):
        assert found != []
    for _, found in pair.run(resume_exactly, DDPStrategy, path, 8, arguments):
        assert found == []


def fit_twice(rank: int, path: str) -> list[str]:
    """Fit, and go on from the middle with the same Trainer and strategy."""
    first, second = Numbered(8, path), Numbered()
    trainer = fit_numbered(rank, SparseDDPStrategy("dgc", density=0.05), first)
    once = kept_at_end(trainer)
    trainer.fit(second, ckpt_path=path)
    found = differences({seen: first.history[seen] for seen in (9, 10, 11, 12)}, second.history)
    return found + differences(once, kept_at_end(trainer))


def test_a_second_fit_goes_on_from_a_checkpoint(pair: Pool, tmp_path: Path) -> None:
    assert pair.run(fit_twice, str(tmp_path / "twice.ckpt")) == [[], []]


class GoesBack(Numbered):
    """A model that is set back to its checkpoint during training, as the search for a learning rate does."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note what is kept when saving, and after going back."""
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx == 2:
            self.saved = self.kept()
        if batch_idx == 4:
            self.before = self.kept()
            self.trainer._checkpoint_connector.restore(self.path)
            self.after = self.kept()
            self.trainer.should_stop = True

    def kept(self) -> Any:
        state = self.trainer.strategy.engine.state_dict()["memory"]
        return {kind: {name: tensor.clone() for name, tensor in kept.items()} for kind, kept in state.items()}


def go_back(rank: int, path: str) -> tuple[bool, list[str]]:
    """Tell whether what was kept had changed, and how it differs after going back."""
    model = GoesBack(3, path)
    fit_numbered(rank, SparseDDPStrategy("dgc", density=0.05), model, max_epochs=1)
    return differences(model.saved, model.before) != [], differences(model.saved, model.after)


def test_restoring_during_training_restores_what_is_kept(pair: Pool, tmp_path: Path) -> None:
    assert pair.run(go_back, str(tmp_path / "back.ckpt")) == [(True, [])] * 2


class Starting(Numbered):
    """A model that notes what its rank starts with."""

    def on_train_start(self) -> None:
        engine = getattr(self.trainer.strategy, "engine", None)
        self.weights_at_start = weights(self)
        self.at_start = {} if engine is None else engine.state_dict()
        memory = self.at_start.get("memory", {})
        self.at_start = {
            **self.at_start,
            "memory": {kind: {name: tensor.clone() for name, tensor in kept.items()} for kind, kept in memory.items()},
            "optimizers": [
                value["momentum_buffer"].clone()
                for value in self.trainer.optimizers[0].state.values()
                if value.get("momentum_buffer") is not None
            ],
        }


def fit_stage(rank: int, compressor: str, steps: int, source: Any, path: str) -> tuple[Any, Any, list[str]]:
    """Go on from ``source`` and save to ``path``; return what was kept at start and end, and what was said."""
    model = Starting()
    strategy = SparseDDPStrategy(compressor, density=DENSITY[compressor])
    with heard() as lines:
        trainer = fit_numbered(rank, strategy, model, source, max_steps=steps, max_epochs=-1)
    trainer.save_checkpoint(path)
    optimizers = [value.get("momentum_buffer") for value in trainer.optimizers[0].state.values()]
    end = {**kept_at_end(trainer), "optimizers": [tensor for tensor in optimizers if tensor is not None]}
    return model.at_start, end, lines


def means(states: list[Any]) -> list[tuple[str, Tensor]]:
    """Return the means over ranks of all that has mass."""
    kept = [(f"{kind}.{name}", kind, name) for kind in states[0]["memory"] for name in states[0]["memory"][kind]]
    found = [
        (label, torch.stack([state["memory"][kind][name].double() for state in states]).mean(dim=0))
        for label, kind, name in kept
    ]
    buffers = zip(*(state["optimizers"] for state in states))
    return found + [(str(place), torch.stack(rows).double().mean(dim=0)) for place, rows in enumerate(buffers)]


@pytest.mark.parametrize("compressor", ["topk", "dgc", "sdagc", "exdyna", "a2sgd"])
def test_on_other_numbers_of_ranks_the_mean_of_what_is_kept_stays(
    pools: dict[int, Pool], tmp_path: Path, compressor: str
) -> None:
    source, before, ranks_before = None, None, 0
    for stage, ranks in enumerate((4, 2, 3, 1, 4)):
        path = str(tmp_path / f"{stage}.ckpt")
        answers = pools[ranks].run(fit_stage, compressor, 4 * (stage + 1), source, path)
        if before is not None:
            present = dict(means([start for start, _, _ in answers]))
            expected = dict(means(before))
            assert present.keys() == expected.keys()
            assert len(expected) >= 4
            for label, value in present.items():
                torch.testing.assert_close(value, expected[label], rtol=1e-6, atol=1e-9)
            said = [line for line in answers[0][2] if f"{ranks_before} ranks saved" in line]
            assert len(said) == 1
            assert f"{ranks} go on" in said[0]
        if before is not None and compressor == "exdyna":
            assert {len(start["compressor"]["cuts"]) for start, _, _ in answers} == {ranks + 1}
            learned = [[state["compressor"][key] for key in ("step", "threshold")] for state in before]
            assert all(
                [start["compressor"][key] for key in ("step", "threshold")] in learned for start, _, _ in answers
            )
        source, before, ranks_before = path, [end for _, end, _ in answers], ranks


def switch(rank: int, first: Any, second: Any, path: str) -> tuple[list[str], Any, list[str]]:
    """Save with one strategy and go on with another.

    Returns:
        where weights differ at the start, what is kept at the start, and what was said.
    """
    saved = Numbered(4, path)
    fit_numbered(rank, first(), saved, max_steps=4)
    went_on = Starting()
    with heard() as lines:
        fit_numbered(rank, second(), went_on, path, max_steps=8)
    assert went_on.trainer.global_step == 8
    return differences(saved.history[4], went_on.weights_at_start), went_on.at_start, lines


TOPK, LAGS_, DGC_, EXDYNA, DENSE = (
    partial(build, name, {"density": DENSITY[name]}) for name in ("topk", "lags", "dgc", "exdyna", "dense")
)
SWITCHES = {
    "dense to sparse": (DDPStrategy, TOPK, False, "holds nothing that a sparse strategy kept"),
    "sparse to dense": (TOPK, DDPStrategy, False, None),
    "alike": (TOPK, LAGS_, True, None),
    "momentum": (DGC_, TOPK, False, "not used of .*: momentum and residual, because TopK keeps other things"),
    "learned": (EXDYNA, TOPK, True, "not used of .*: what ExDyna had learned, because TopK goes on"),
    "to none": (TOPK, DENSE, False, "not used of .*: residual, because Dense keeps other things"),
    "from none": (DENSE, TOPK, False, None),
    "refused": (TOPK, partial(build, "topk", {"resume_compression": False}), False, "was read without it; residuals"),
}


@pytest.mark.parametrize(("first", "second", "is_kept", "message"), SWITCHES.values(), ids=SWITCHES)
def test_strategies_may_change_and_say_what_they_do_not_use(
    pair: Pool, tmp_path: Path, first: Any, second: Any, is_kept: bool, message: Any
) -> None:
    for found, start, lines in pair.run(switch, first, second, str(tmp_path / "switch.ckpt")):
        assert found == []
        assert any(kept.any() for kept in start["memory"].get("residual", {}).values()) == is_kept
        if message is None:
            assert lines == []
        else:
            assert len(lines) == 1
            assert re.search(message, lines[0])
