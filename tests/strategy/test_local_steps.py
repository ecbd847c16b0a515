"""Rounds of local steps in a Trainer: any optimizer, any loop, and what is validated, saved and resumed."""

import warnings
from pathlib import Path
from typing import Any, Optional
from unittest import mock

import pytest
import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.callbacks import LearningRateFinder, StochasticWeightAveraging
from pytorch_lightning.plugins import MixedPrecision
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sparse import AdamCorrection, LocalSteps, SparseDDPStrategy
from lightning_sparse.callbacks import AdaptiveDensity, MomentumCorrection, ReplicaSentinel
from lightning_sparse.compressors import DGC, LAGS, SDAGC
from lightning_sparse.compressors.density import CriticalRegime
from lightning_sparse.testing.equality import assert_same
from lightning_sparse.testing.pool import Pool
from tests.helpers.devices import DEVICE
from tests.helpers.resuming import BATCHES, Numbered, fit_numbered, heard, resume_exactly
from tests.helpers.trainers import Rows, Small, run_fit, weights

ROUNDS: dict[str, dict[str, Any]] = {
    "diloco": {"compressor": "dense", "local_steps": LocalSteps(4, 0.7, 0.9, nesterov=True)},
    "sparse": {"density": 0.1, "wire": "2bit", "local_steps": LocalSteps(4, residual_decay=0.9)},
    "late": {"density": 0.1, "local_steps": LocalSteps(4, overlap_steps=2)},
    "synchronous": {
        "density": 0.1,
        "local_steps": LocalSteps(4, overlap_steps=1, synchronous_steps=3),
        "find_unused_parameters": True,
    },
}


class Local(Numbered):
    """A model with BatchNorm, trained by AdamW on rows of this rank's own."""

    def __init__(self, save_after: Optional[int] = None, path: str = "") -> None:
        super().__init__(save_after, path)
        self.network = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))

    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        self.training_step(batch, batch_index)

    def configure_optimizers(self) -> Any:
        """Return AdamW with a learning rate that falls step by step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Narrow(Local):
    """The same in bfloat16, without BatchNorm."""

    def __init__(self, save_after: Optional[int] = None, path: str = "") -> None:
        super().__init__(save_after, path)
        self.network = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).bfloat16()

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16


class Teaching(Local):
    """A network beside a frozen one that follows it, written in a way that no version of a tensor counts."""

    def __init__(self, save_after: Optional[int] = None, path: str = "") -> None:
        super().__init__(save_after, path)
        self.teacher = nn.Linear(32, 64)
        self.teacher.requires_grad_(False)

    def on_before_zero_grad(self, *args: Any) -> None:
        for followed, teacher in zip(self.network[0].parameters(), self.teacher.parameters()):
            teacher.data = 0.5 * (teacher.data + followed.data)


class TeachingOnOne(Teaching):
    """The teacher follows on rank 0 alone, until the others hear of it."""

    def on_before_zero_grad(self, *args: Any) -> None:
        if self.global_rank == 0:
            super().on_before_zero_grad(*args)


def resume(rank: int, kind: str, path: str, save_after: int, module: type[Numbered]) -> tuple[list[int], list[str]]:
    """Fit with a save in between, and go on from it."""
    return resume_exactly(rank, lambda: SparseDDPStrategy(**ROUNDS[kind]), path, save_after, {}, module)


@pytest.mark.parametrize(
    ("module", "save_after"),
    [
        *((Local, after) for after in (2, 3, 5, 6)),
        *((Narrow, after) for after in (2, 3, 8)),
        *((Teaching, after) for after in (2, 6)),
    ],
)
@pytest.mark.parametrize("kind", list(ROUNDS))
def test_a_round_goes_on_to_the_bit(
    pair: Pool, tmp_path: Path, kind: str, module: type[Numbered], save_after: int
) -> None:
    for gone_through, found in pair.run(resume, kind, str(tmp_path / "middle.ckpt"), save_after, module):
        assert gone_through == list(range(save_after + 1, 13))
        assert not found


@pytest.mark.parametrize(
    ("kind", "save_after"), [("diloco", 2), ("sparse", 2), ("late", 2), ("late", 5), ("synchronous", 5)]
)
def test_a_round_goes_on_to_the_bit_where_one_rank_has_written(
    pair: Pool, tmp_path: Path, kind: str, save_after: int
) -> None:
    for _, found in pair.run(resume, kind, str(tmp_path / "middle.ckpt"), save_after, TeachingOnOne):
        assert not found


class SavedLast(Numbered):
    """A model that saves when its last epoch ends, in the midst of a round."""

    def on_train_epoch_end(self) -> None:
        if self.path:
            self.trainer.save_checkpoint(self.path)


def resume_at_the_end(rank: int, path: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Fit, and go on with nothing left to train; return the parameters of both."""
    models = SavedLast(None, path), SavedLast()
    for model, source in zip(models, (None, path)):
        fit_numbered(rank, SparseDDPStrategy("topk", density=0.1, local_steps=4), model, source, max_epochs=1)
    return weights(models[0]), weights(models[1])


def test_a_resume_with_nothing_left_to_train_ends_with_the_shared_model(pair: Pool, tmp_path: Path) -> None:
    answers = pair.run(resume_at_the_end, str(tmp_path / "end.ckpt"))
    for resumed in answers[0][1], answers[1][1]:
        assert_same(resumed, answers[0][0])


def save(rank: int, kind: str, path: str, module: type[Local], save_after: int) -> dict[str, Tensor]:
    """Fit with a save in the midst of a round; return this rank's own parameters then."""
    model = module(save_after, path)
    fit_numbered(rank, SparseDDPStrategy(**ROUNDS[kind]), model, max_epochs=1)
    return model.history[save_after]


def take_up(rank: int, kind: str, path: str, module: type[Local], save_after: int) -> dict[str, Tensor]:
    """Go on from a save; return this rank's own parameters when training starts."""

    class Noting(module):  # type: ignore[misc,valid-type]
        def on_train_start(self) -> None:
            self.history[0] = weights(self)

    model = Noting()
    fit_numbered(rank, SparseDDPStrategy(**ROUNDS[kind]), model, path, limit_train_batches=6)
    return model.history[0]


@pytest.mark.parametrize(("module", "save_after"), [(Local, 6), (Teaching, 2), (Teaching, 6)])
@pytest.mark.parametrize("kind", ["diloco", "late"])
def test_other_numbers_of_ranks_take_up_the_mean(
    pools: dict[int, Pool], tmp_path: Path, kind: str, module: type[Local], save_after: int
) -> None:
    path = str(tmp_path / "middle.ckpt")
    saved = pools[3].run(save, kind, path, module, save_after)
    for taken_up in pools[2].run(take_up, kind, path, module, save_after):
        for name, tensor in taken_up.items():
            mean = sum(each[name].double() for each in saved) / 3
            torch.testing.assert_close(tensor.double(), mean, rtol=0, atol=1e-6)


def change_over(rank: int, path: str, before: dict[str, Any], after: dict[str, Any]) -> tuple[list[str], bool]:
    """Save in the midst of a round, and go on in another way; return what is said, and whether it trains."""
    fit_numbered(rank, SparseDDPStrategy(density=0.1, **before), Local(6, path), max_epochs=1)
    model = Local()
    with heard() as lines:
        fit_numbered(rank, SparseDDPStrategy(density=0.1, **after), model, path)
    return lines, bool(model.history)


def test_rounds_and_gradients_keep_different_things(pair: Pool, tmp_path: Path) -> None:
    rounds, path = {"local_steps": 4}, str(tmp_path / "middle.ckpt")
    for lines, trains in pair.run(change_over, path, rounds, {}):
        assert trains
        assert "what has changed since its last round" in lines[-1]
    for lines, trains in pair.run(change_over, path, {}, rounds):
        assert trains
        assert "rounds of local steps keep changes of parameters" in lines[-1]


class Validated(Local):
    """A model that notes with which parameters and buffers it is validated."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[Tensor] = []

    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        self.validated.append(torch.cat([each.detach().flatten().float() for each in self.state_dict().values()]))


def validate(rank: int, kind: str, interval: Optional[int]) -> tuple[list[Tensor], list[Tensor], float]:
    """Fit, with a validation after every few batches or none; return what was validated, trained, and sent."""
    model = Validated()
    checks = {"limit_val_batches": 0} if interval is None else {"val_check_interval": interval, "limit_val_batches": 1}
    trainer = fit_numbered(rank, SparseDDPStrategy(**ROUNDS[kind]), model, **checks)
    assert isinstance(trainer.strategy, SparseDDPStrategy)
    trained = [torch.cat([each.flatten() for each in model.history[seen].values()]) for seen in sorted(model.history)]
    return model.validated, trained, trainer.strategy.compression_stats()["total_wire_bytes"]


@pytest.mark.parametrize("kind", list(ROUNDS))
def test_the_shared_model_is_validated_for_nothing(pair: Pool, kind: str) -> None:
    often, never = (pair.run(validate, kind, interval) for interval in (1, None))
    for (validated, trained, sent), (_, trained_alone, sent_alone) in zip(often, never):
        assert len(validated) >= 12
        assert all(map(torch.equal, validated, often[0][0]))
        assert all(map(torch.equal, trained, trained_alone))
        assert sent == sent_alone
    assert not torch.equal(often[0][1][4], often[1][1][4])


class SwapsAtValidation(Callback):
    """Keep a moving average of the weights, and validate it: of a rank's own kind, as many write it.

    Attributes:
        average: of the weights.
        validated: the weights that were there in each validation, and whether they were the average.
    """

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}
        self.validated: list[bool] = []

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *args: Any) -> None:
        for name, tensor in weights(pl_module).items():
            self.average[name] = 0.5 * (self.average.get(name, tensor) + tensor)

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.own = weights(pl_module)
        pl_module.load_state_dict(self.average, strict=False)

    def on_validation_batch_end(self, trainer: Any, pl_module: LightningModule, *args: Any) -> None:
        self.validated.append(not self.average or _same(weights(pl_module), self.average))

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        pl_module.load_state_dict(self.own, strict=False)


def fit_swapping(rank: int, kind: str, swaps: bool) -> tuple[dict[int, dict[str, Tensor]], list[bool]]:
    """Fit with validations, in which a callback validates an average; return the weights, and whether it was there."""
    model, swapping = Local(), SwapsAtValidation()
    checks = {"val_check_interval": 1, "limit_val_batches": 1, "callbacks": [swapping] * swaps}
    fit_numbered(rank, SparseDDPStrategy(**ROUNDS.get(kind, {"compressor": kind})), model, **checks)
    return model.history, swapping.validated


@pytest.mark.parametrize("kind", [*ROUNDS, "a2sgd"])
def test_a_callback_may_swap_weights_for_a_validation(pair: Pool, kind: str) -> None:
    swapped, alone = (pair.run(fit_swapping, kind, swaps) for swaps in (True, False))
    for (history, validated), (expected, _) in zip(swapped, alone):
        assert len(validated) > 12
        assert all(validated)
        assert_same(history, expected)


class Loads(Callback):
    """Load other weights when training starts."""

    def __init__(self, hook: str, by_rank: float) -> None:
        setattr(self, hook, self._load)
        self.by_rank = by_rank

    def _load(self, trainer: Any, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step == 0:
            scale_weights(pl_module, 1.0 + self.by_rank * trainer.global_rank)


@torch.no_grad()
def scale_weights(module: nn.Module, factor: float) -> None:
    """Write other weights, of few bits, so that means of them are exact."""
    for parameter in module.parameters():
        parameter.mul_(64).round_().mul_(factor / 16)


def fit_loaded(rank: int, kind: str, hook: str, by_rank: float) -> tuple[list[Tensor], dict[int, dict[str, Tensor]]]:
    """Fit from weights that a callback loads, or that were there before; return those validated, and those trained."""
    model = Validated()
    if not hook:
        scale_weights(model, 1.0 + by_rank / 2)
    checks = {"num_sanity_val_steps": 1, "limit_val_batches": 1, "callbacks": [Loads(hook, by_rank)] * bool(hook)}
    fit_numbered(rank, SparseDDPStrategy(**ROUNDS[kind]), model, **checks)
    return model.validated, model.history


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_epoch_start"])
@pytest.mark.parametrize("kind", list(ROUNDS))
def test_training_starts_from_what_callbacks_load(pair: Pool, kind: str, hook: str) -> None:
    for by_rank in (0.0, 0.5) if kind != "synchronous" else (0.0,):  # DDP's first steps leave ranks as they are
        loaded, expected = (pair.run(fit_loaded, kind, given, by_rank) for given in (hook, ""))
        for (validated, history), (other, trained) in zip(loaded, expected):
            assert_same(history, trained)
            assert_same(validated[1:], other[1:])
            assert hook != "on_fit_start" or by_rank or torch.equal(validated[0], other[0])


def save_weights(rank: int, kind: str, path: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Save in the midst of a round and at the end of training; return what is in rank 0's file, and the model."""
    model = Local(5, path)
    trainer = fit_numbered(rank, SparseDDPStrategy(**ROUNDS[kind]), model)
    trainer.save_checkpoint(f"{path}.end")
    return torch.load(path, weights_only=True)["state_dict"], {
        name: each.clone() for name, each in model.state_dict().items()
    }


@pytest.mark.parametrize("kind", list(ROUNDS))
def test_what_is_saved_and_there_at_the_end_is_the_shared_model(pair: Pool, tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "middle.ckpt")
    (middle, first), (_, second) = pair.run(save_weights, kind, path)
    assert all(torch.equal(first[name], second[name]) for name in first)
    end = torch.load(f"{path}.end", weights_only=True)["state_dict"]
    assert all(torch.equal(first[name], end[name].to(first[name].device)) for name in first)
    assert not all(torch.equal(middle[name], end[name]) for name in end)


class Adversaries(Small):
    """Two networks that are trained in turn by optimizers of their own, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.judge = nn.Linear(32, 1)

    def training_step(self, batch: Tensor, batch_index: int) -> None:
        """Train one, then the other, which steps every second time."""
        rows = torch.randn(4, 32, generator=torch.Generator().manual_seed(self.global_rank)).to(self.device)
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = self.judge(self.network(rows)).square().mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        if batch_index % 2:
            loss = (1 - self.judge(self.network(rows).detach())).square().mean()
            second.zero_grad()
            self.manual_backward(loss)
            second.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.network.parameters()), torch.optim.SGD(self.judge.parameters(), lr=0.1)


class Partial(Local):
    """A model of which some ranks use a part only, and of which a part is frozen after some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(32, 32)
        self.late = nn.Linear(32, 32)
        self.late.requires_grad_(False)

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        rows = self.rows(batch_index)
        out = self.late(self.network(rows))
        return ((out + self.side(rows) if self.global_rank % 2 else out) - rows).square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Freeze one part and unfreeze another, in the midst of a round."""
        if batch_idx == 2:
            self.network[0].requires_grad_(False)
            self.late.requires_grad_(True)


def fit(rank: int, module: type[LightningModule], kind: str, arguments: dict[str, Any], more: dict[str, Any]) -> Any:
    """Fit a model; return its parameters at the start and at the end, and the statistics."""
    model = module()
    start = weights(model)
    trainer = run_fit(rank, SparseDDPStrategy(**{**ROUNDS[kind], **more}), model, limit_train_batches=8, **arguments)
    assert isinstance(trainer.strategy, SparseDDPStrategy)
    return start, weights(model), trainer.strategy.compression_stats()


@pytest.mark.parametrize(
    ("module", "arguments", "more"),
    [
        (Adversaries, {}, {}),
        (Local, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, {}),
        (Partial, {}, {}),
        (Partial, {}, {"find_unused_parameters": True}),
    ],
    ids=["by hand", "accumulated", "frozen", "unused"],
)
@pytest.mark.parametrize("kind", list(ROUNDS))
def test_any_loop_trains_one_model(
    pair: Pool, kind: str, module: type[LightningModule], arguments: dict[str, Any], more: dict[str, Any]
) -> None:
    (start, first, stats), (_, second, _) = pair.run(fit, module, kind, arguments, more)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(not torch.equal(first[name].cpu(), start[name]) for name in first if "network.1" not in name)
    assert stats["total_wire_bytes"] > 0


class Overflowing(Local):
    """A model whose gradients overflow on one rank, in one step."""

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        return loss * (float("inf") if self.global_rank == 1 and batch_index == 1 else 1.0)


def fit_scaled(rank: int, path: str) -> tuple[dict[str, Tensor], list[float], list[str]]:
    """Fit with a gradient scaler, and resume; return parameters, the scale of this rank, and differences."""
    plugins = []

    def build() -> SparseDDPStrategy:
        return SparseDDPStrategy(**ROUNDS["diloco"])

    def arguments() -> dict[str, Any]:
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=8.0, growth_interval=3)
        plugins.append(MixedPrecision("16-mixed", DEVICE.type, scaler))
        return {"plugins": [plugins[-1]]}

    first = Overflowing(6, path)
    fit_numbered(rank, build(), first, **arguments())
    second = Overflowing()
    fit_numbered(rank, build(), second, path, **arguments())
    found = [str(seen) for seen in second.history if not _same(first.history[seen], second.history[seen])]
    return weights(first), [plugin.scaler.get_scale() for plugin in plugins], found


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_ranks_may_skip_different_steps(pair: Pool, tmp_path: Path) -> None:
    (first, scales, found), (second, other_scales, other_found) = pair.run(fit_scaled, str(tmp_path / "middle.ckpt"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(tensor.isfinite().all() for tensor in first.values())
    assert scales[0] > other_scales[0]
    assert scales[0] == scales[1]
    assert other_scales[0] == other_scales[1]
    assert not found + other_found


def fit_synchronously(
    rank: int, is_ours: bool, module: type[LightningModule], arguments: dict[str, Any], is_scaled: bool, unused: bool
) -> dict[str, Any]:
    """Fit with DDP, or with more synchronous steps than there are; return all that training has made."""
    more = {"find_unused_parameters": unused}
    ours = {"density": 0.1, "local_steps": LocalSteps(2, synchronous_steps=12)}
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=8.0, growth_interval=3)
    plugins = [MixedPrecision("16-mixed", DEVICE.type, scaler)] * is_scaled
    model, checks = module(), {"val_check_interval": 4, "limit_val_batches": 1}
    strategy = SparseDDPStrategy(**ours, **more) if is_ours else DDPStrategy(**more)
    trainer = run_fit(
        rank, strategy, model, max_epochs=2, limit_train_batches=6, plugins=plugins, **checks, **arguments
    )
    return {
        "model": {name: each.clone() for name, each in model.state_dict().items()},
        "optimizers": [optimizer.state_dict()["state"] for optimizer in trainer.optimizers],
        "history": getattr(model, "history", {}),
        "validated": {name: float(number) for name, number in trainer.callback_metrics.items()},
        "scale": scaler.get_scale(),
    }


@pytest.mark.parametrize(
    ("ranks", "module", "arguments", "is_scaled", "unused"),
    [
        (3, Local, {}, False, False),
        (2, Narrow, {}, False, False),
        (2, Local, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, False, False),
        (2, Overflowing, {}, True, False),
        (2, Adversaries, {}, False, True),
    ],
    ids=["AdamW", "bfloat16", "accumulated", "scaled", "by hand"],
)
def test_synchronous_steps_are_those_of_ddp_to_the_bit(
    pools: dict[int, Pool],
    ranks: int,
    module: type[LightningModule],
    arguments: dict[str, Any],
    is_scaled: bool,
    unused: bool,
) -> None:
    ours, theirs = (
        pools[ranks].run(fit_synchronously, is_ours, module, arguments, is_scaled, unused) for is_ours in (True, False)
    )
    assert_same(ours, theirs)


def fit_first_synchronously(rank: int, synchronous: int, every: int) -> tuple[dict[int, dict[str, Tensor]], list[str]]:
    """Fit with plain averages after some synchronous steps; return the weights after each step, and what is said."""
    lines: list[str] = []
    model = Numbered()
    strategy = SparseDDPStrategy("dense", local_steps=LocalSteps(every, synchronous_steps=synchronous))
    with mock.patch.object(strategy, "_say", lines.append):
        fit_numbered(rank, strategy, model)
    return model.history, lines


class Worker(Numbered):
    """A rank of the reference, in this process."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        (self.optimizer,), (self.schedule,) = self.configure_optimizers()

    def backward_on(self, seen: int) -> None:
        epoch, number = divmod(seen, BATCHES)
        seed = 10_000 * self.rank + 100 * epoch + number
        rows = torch.randn(4, 32, generator=torch.Generator().manual_seed(seed))
        self.optimizer.zero_grad()
        (self.network(rows) - rows).square().mean().backward()


@torch.no_grad()
def average(everybody: list[list[Tensor]]) -> None:
    """Replace tensors by their means over workers."""
    for each in zip(*everybody):
        mean = sum(each) / len(each)
        for tensor in each:
            tensor.copy_(mean)


@pytest.mark.parametrize("synchronous", [3, 4])
def test_rounds_follow_synchronous_steps(pair: Pool, synchronous: int) -> None:
    every = 2
    answers = pair.run(fit_first_synchronously, synchronous, every)
    workers = [Worker(rank) for rank in range(2)]
    for seen in range(12):
        for worker in workers:
            worker.backward_on(seen)
        if seen < synchronous:
            average([[each.grad for each in worker.parameters()] for worker in workers])
        for worker in workers:
            worker.optimizer.step()
            worker.schedule["scheduler"].step()
        if seen >= synchronous and (seen + 1 - synchronous) % every == 0:
            average([list(worker.parameters()) for worker in workers])
        for worker, (history, _) in zip(workers, answers):
            if seen < 11:  # the last round is closed after the last batch's note
                for name, parameter in worker.named_parameters():
                    torch.testing.assert_close(history[seen + 1][name].cpu(), parameter, rtol=0, atol=1e-5)
    are_alike = [_same(*(history[seen + 1] for history, _ in answers)) for seen in range(11)]
    assert are_alike == [seen < synchronous or (seen + 1 - synchronous) % every == 0 for seen in range(11)]
    assert f"local steps: 2, the first {synchronous} steps are synchronous" in answers[0][1][0]


def see_buffers(rank: int) -> list[dict[str, Tensor]]:
    """Fit where DDP broadcasts no buffers; return what would be saved of them after each step."""
    seen = []

    class Looking(Local):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            state = self.trainer.strategy.lightning_module_state_dict()
            seen.append({name: each.clone() for name, each in state.items() if "running" in name})

    strategy = SparseDDPStrategy("dense", local_steps=LocalSteps(2, synchronous_steps=3), broadcast_buffers=False)
    warnings.filterwarnings("ignore", message=".*`broadcast_buffers` is deprecated.*")
    fit_numbered(rank, strategy, Looking())
    return seen


def test_rounds_begin_with_the_same_buffers(pair: Pool) -> None:
    first, second = pair.run(see_buffers)
    are_alike = [_same(one, other) for one, other in zip(first, second)]
    assert are_alike == [False] * 3 + [True] * 9


def search_for_a_rate(rank: int, searches: bool, folder: str) -> dict[int, dict[str, Tensor]]:
    """Fit after a search that gets to rounds; return the weights after each step."""
    model = Numbered()
    finder = LearningRateFinder(min_lr=1e-3, max_lr=0.5, num_training_steps=8, update_attr=False)
    arguments = {"callbacks": [finder] * searches, "default_root_dir": folder}
    fit_numbered(rank, SparseDDPStrategy(**ROUNDS["synchronous"]), model, **arguments)
    return model.history


def test_a_search_for_a_rate_goes_back_to_synchronous_steps(pair: Pool, tmp_path: Path) -> None:
    searched, expected = (pair.run(search_for_a_rate, searches, str(tmp_path)) for searches in (True, False))
    assert_same(searched, expected)


def change_number(rank: int, path: str, before: int, after: int, save_after: int) -> tuple[list[int], list[int]]:
    """Save, and go on with another number of synchronous steps; return which batches left what on this rank."""
    plain = []
    for synchronous, model, source in ((before, Numbered(save_after, path), None), (after, Numbered(), path)):
        strategy = SparseDDPStrategy("dense", local_steps=LocalSteps(3, synchronous_steps=synchronous))
        seen: list[int] = []
        model.on_before_zero_grad = lambda *args, strategy=strategy, seen=seen: seen.append(strategy.is_plain)
        fit_numbered(rank, strategy, model, source)
        plain.append(sum(seen))
    return plain


@pytest.mark.parametrize(
    ("before", "after", "save_after", "expected"),
    [(5, 8, 4, [5, 4]), (5, 2, 4, [5, 0]), (2, 8, 4, [2, 0])],
    ids=["more", "fewer", "begun"],
)
def test_another_number_counts_until_rounds_begin(
    pair: Pool, tmp_path: Path, before: int, after: int, save_after: int, expected: list[int]
) -> None:
    for answer in pair.run(change_number, str(tmp_path / "middle.ckpt"), before, after, save_after):
        assert answer == expected


class Unseen(Small):
    """A model that steps its optimizer where Lightning does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_index: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward((self.network(batch) - batch).square().mean())
        optimizer.step()


@pytest.mark.parametrize("kind", list(ROUNDS))
def test_steps_that_lightning_does_not_see_are_counted(pair: Pool, kind: str) -> None:
    (start, first, stats), (_, second, _) = pair.run(fit, Unseen, kind, {}, {})
    assert _same(first, second)
    assert all(not torch.equal(first[name].cpu(), start[name]) for name in first)
    assert stats["total_wire_bytes"] > 0


class Averages(Callback):
    """Keep a moving average of the weights, which is the model at the end."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *args: Any) -> None:
        for name, tensor in weights(pl_module).items():
            self.average[name] = 0.5 * (self.average.get(name, tensor) + tensor)

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        pl_module.load_state_dict(self.average, strict=False)


def fit_averaging(rank: int, kind: str, averages: str, batches: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Fit with a callback that averages weights; return its averages on this rank, and the model at the end."""
    model: Numbered = Numbered() if averages == "SWA" else Local()
    own = Averages()
    swa = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1)
    callback = own if averages == "EMA" else swa
    strategy = SparseDDPStrategy(**ROUNDS[kind])
    warnings.filterwarnings("ignore", message=".*SWA is currently only supported every epoch.*")
    fit_numbered(rank, strategy, model, callbacks=[callback], limit_train_batches=batches)
    kept = own.average if averages == "EMA" else weights(swa._average_model)
    return kept, {name: each.detach().clone() for name, each in model.state_dict().items()}


@pytest.mark.parametrize("batches", [4, 5])
@pytest.mark.parametrize("averages", ["EMA", "SWA", "SWA with BatchNorm"])
@pytest.mark.parametrize("kind", list(ROUNDS))
def test_weights_that_callbacks_average_are_there_at_the_end(
    pair: Pool, kind: str, averages: str, batches: int
) -> None:
    (one, first), (other, second) = pair.run(fit_averaging, kind, averages, batches)
    assert _same(first, {name: second[name] for name in first if "num_batches" not in name} | first)
    for name in one:
        torch.testing.assert_close(first[name], (one[name] + other[name]) / 2, rtol=1e-5, atol=1e-6)


def told(rank: int, local_steps: Any, arguments: dict[str, Any]) -> list[str]:
    """Fit; return the lines and the warning about rounds."""
    lines: list[str] = []
    strategy = SparseDDPStrategy("dense", local_steps=local_steps)
    module = Adversaries if arguments.pop("by_hand", False) else Small
    warn = "lightning_sparse.strategy.trainer.rank_zero_warn"
    with mock.patch(warn, lines.append), mock.patch.object(strategy, "_say", lines.append):
        run_fit(rank, strategy, module(), **arguments)
    return [line for line in lines if "rounds" in line]


@pytest.mark.parametrize(
    ("local_steps", "arguments", "expected"),
    [
        (3, {"max_epochs": 2}, ["up to 32 optimizer steps, that is 11 rounds of 3 local steps."]),
        (8, {"accumulate_grad_batches": 2}, ["that is 1 rounds of 8", "ended 8 to 48 % above"]),
        (8, {"fast_dev_run": True}, ["up to 1 optimizer steps, that is 1 rounds"]),
        ("auto", {"max_steps": 3}, []),
        (8, {"by_hand": True}, []),
    ],
    ids=["known", "few", "a try", "auto", "by hand"],
)
def test_the_number_of_rounds_is_told_at_the_start(
    pair: Pool, local_steps: Any, arguments: dict[str, Any], expected: list[str]
) -> None:
    for lines in pair.run(told, local_steps, arguments):
        assert len(lines) == len(expected)
        assert all(part in line for part, line in zip(expected, lines))


class Plateau(Small):
    """A model whose learning rate goes by a loss of this rank alone."""

    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        self.log("mine", float(self.global_step * (2 * self.global_rank - 1)), sync_dist=False)

    def configure_optimizers(self) -> Any:
        """Return SGD that slows down where the loss gets worse."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "mine"}}


class Uneven(Small):
    """A model with more batches on one rank."""

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Rows(8 + 4 * self.global_rank), batch_size=4)


def refusal(rank: int, module: type[LightningModule], arguments: dict[str, Any], changes: dict[str, Any]) -> str:
    """Return what a fit is refused with."""
    warnings.filterwarnings("ignore", message=".*It is recommended to use `self.log.*")
    try:
        run_fit(rank, SparseDDPStrategy(**{**ROUNDS["diloco"], **changes}), module(), **arguments)
    except (ValueError, RuntimeError, MisconfigurationException) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("module", "arguments", "told"),
    [
        (Local, {"sync_batchnorm": True}, "local_steps=4 exchanges nothing between rounds, but SyncBatchNorm does"),
        (Plateau, {"max_epochs": 4, "limit_train_batches": 4}, r"sync_dist=True"),
        (Uneven, {"use_distributed_sampler": False}, "limit_train_batches=2"),
    ],
    ids=["SyncBatchNorm", "plateau", "uneven"],
)
def test_what_would_drive_ranks_apart_is_refused(
    pair: Pool, module: type[LightningModule], arguments: dict[str, Any], told: str
) -> None:
    for answer in pair.run(refusal, module, arguments, {"local_steps": 4}):
        assert told in answer


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"compressor": "a2sgd"}, "averages replicas by a period of its own"),
        ({"compressor": "dgc"}, "act on gradients, which are not exchanged"),
        ({"compressor": DGC(momentum=None, clip_norm=1.0)}, "clip_norm=1.0 act on gradients"),
        ({"compressor": "lags", "schedule": "auto"}, "leaves nothing of an exchange to hide"),
        ({"compressor": LAGS(adapts_density=True)}, "leaves nothing of an exchange to hide"),
        ({"compressor": "topk", "optimizer_correction": AdamCorrection()}, "optimizers see whole gradients"),
        ({"compressor": "dense", "local_steps": LocalSteps(5, residual_decay=0.9)}, "residual_decay=0.9"),
        ({"local_steps": 0}, "local_steps=0"),
        ({"compressor": SDAGC(momentum=None), "wire": "2bit"}, "wire='2bit' was given to SDAGC"),
        ({"compressor": "exdyna", "wire": "4bit"}, "wire='4bit' was given to ExDyna"),
    ],
    ids=[
        *("a2sgd", "momentum", "clipping", "auto", "adapting", "correction", "decay"),
        *("none", "gaps", "union"),
    ],
)
def test_what_cannot_go_together_is_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        SparseDDPStrategy(**{"local_steps": 5, **arguments})


@pytest.mark.parametrize(
    "callback", [MomentumCorrection(), AdaptiveDensity([CriticalRegime()])], ids=["momentum", "density"]
)
def test_callbacks_that_act_on_gradients_are_refused(pair: Pool, callback: Callback) -> None:
    changes = {"compressor": "topk", "local_steps": 4}
    for answer in pair.run(refusal, Small, {"callbacks": [callback]}, changes):
        assert "use local_steps=1" in answer


def test_replicas_that_drift_are_not_compared(pair: Pool) -> None:
    for answer in pair.run(refusal, Small, {"callbacks": [ReplicaSentinel()]}, {}):
        assert "drift" in answer
