"""Adam's updates made before selection: against a slow reference, against DDP, and in a Trainer."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional
from unittest import mock

import pytest
import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.plugins import MixedPrecision
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_sparse import AdamCorrection, SparseDDPStrategy
from lightning_sparse.callbacks import CompressionMonitor
from lightning_sparse.engine.adam.memory import AdamMemory, AdamMoments
from lightning_sparse.engine.memory import Hyperparameters
from lightning_sparse.loop.optimizers import OptimizerView
from lightning_sparse.testing.equality import assert_same
from lightning_sparse.testing.pool import Pool
from lightning_sparse.testing.wrapping import Edges, backpropagate, batch, parameters_of, sparse_ddp, watch_gradients
from tests.helpers.devices import DEVICE
from tests.helpers.resuming import Numbered, fit_numbered, heard, kept_at_end, resume_exactly
from tests.helpers.trainers import Rows, Small, make_trainer, weights

DENSE, REFRESH, STEPS, RATE = 3, 2, 12, 1e-3
CORRECTION = AdamCorrection(dense_steps=DENSE, fall_steps=0, refresh_steps=REFRESH)
CORRECTED = ["topk", "lags", "omgs", "dgc", "exdyna", "micro", "sdagc"]
Tensors = dict[str, Tensor]


def corrected_steps(
    rank: int,
    kind: type,
    settings: dict[str, Any],
    arguments: dict[str, Any],
    steps: int,
    poisoned: Optional[int] = None,
    correction: AdamCorrection = CORRECTION,
) -> Iterator[tuple[DistributedDataParallel, Any, torch.optim.Optimizer, Tensors]]:
    """Train with a corrected optimizer, without a Trainer; yield before the first step, and after every step.

    The gradient of step ``poisoned`` is not finite on rank 1; that step of the optimizer is left out.
    """
    torch.manual_seed(0)
    with sparse_ddp(Edges(), correction=correction, **settings) as (ddp, engine):
        optimizer = kind(ddp.parameters(), **{"lr": RATE, **arguments})
        parameters = dict(ddp.module.named_parameters())
        feedback = engine._settings.feedback
        view = OptimizerView(parameters, [optimizer], feedback, engine.target_density, engine.memory)
        gradients = watch_gradients(ddp.module)
        yield ddp, engine, optimizer, gradients
        for step in range(steps):
            coming = view.coming_step()
            engine.begin_backward(None, coming.hyperparameters, 0, coming.whole, coming.settled)
            is_poisoned = step == poisoned
            factor = float("nan") if is_poisoned and rank == 1 else 1.0
            backpropagate(ddp, engine, ddp(batch(rank, step)) * factor)
            if not is_poisoned:
                optimizer.step()
            yield ddp, engine, optimizer, gradients
        view.close()


def train(rank: int, *settings: Any) -> tuple[list[Tensors], list[Tensors], Tensors]:
    """Return parameters after every step, this rank's gradients of every step, and the parameters at the start."""
    torch.manual_seed(0)
    start = {name: parameter.detach().clone() for name, parameter in Edges().named_parameters()}
    history, seen = [], []
    training = corrected_steps(rank, *settings)
    next(training)
    for ddp, _, _, gradients in training:
        history.append(parameters_of(ddp))
        seen.append({name: gradient.clone() for name, gradient in gradients.items()})
    return history, seen, start


def reference(
    start: Tensors, gradients: list[list[Tensors]], density: float, arguments: dict[str, Any], shares: int = 1
) -> list[Tensors]:
    """Make the same steps, slowly and plainly, for all ranks at once: gradients by rank and step.

    Elements are selected from each of so many shares of a parameter by itself.
    """
    (beta1, beta2), decay = arguments.get("betas", (0.9, 0.999)), arguments.get("weight_decay", 0.0)
    is_decoupled = arguments.get("decoupled_weight_decay", False)
    sign = -1 if arguments.get("maximize") else 1
    ranks, history = len(gradients), []
    weights = {name: tensor.cpu().double() for name, tensor in start.items()}
    first, second, largest = ({name: torch.zeros_like(tensor) for name, tensor in weights.items()} for _ in range(3))
    waiting = [{name: torch.zeros_like(tensor) for name, tensor in weights.items()} for _ in range(ranks)]
    known = 0
    for step in range(1, len(gradients[0]) + 1):
        is_dense, is_refreshed = step <= DENSE, step > DENSE and step - known >= REFRESH
        for name, weight in weights.items():
            mine = [sign * gradients[rank][step - 1][name].cpu().double() for rank in range(ranks)]
            if not is_decoupled:
                mine = [each + decay * weight for each in mine]
            mean = torch.stack(mine).mean(dim=0)
            weight.mul_(1 - RATE * decay * is_decoupled)
            if is_dense:
                first[name].mul_(beta1).add_((1 - beta1) * mean)
                second[name].mul_(beta2).add_((1 - beta2) * mean.square())
                largest[name] = torch.maximum(largest[name], second[name])
                used = largest[name] if arguments.get("amsgrad") else second[name]
                weight.sub_(RATE * first[name] / (1 - beta1**step) / ((used / (1 - beta2**step)).sqrt() + 1e-8))
                continue
            used = (largest[name] if arguments.get("amsgrad") else second[name]) / (1 - beta2**known)
            if step == DENSE + 1:
                tail = first[name] * beta1 / (1 - beta1) / (1 - beta1**DENSE) / (used.sqrt() + 1e-8)
                for rank in range(ranks):
                    waiting[rank][name] += tail
            sent = torch.zeros_like(weight)
            for rank in range(ranks):
                waiting[rank][name] += mine[rank] / (
                    (used + 4 * (1 - beta2) * mine[rank].square() / ranks).sqrt() + 1e-8
                )
                size = -(-weight.numel() // shares)
                for flat, sum_of in zip(waiting[rank][name].view(-1).split(size), sent.view(-1).split(size)):
                    chosen = flat.abs().topk(min(len(flat), max(1, round(density * size)))).indices
                    sum_of[chosen] += flat[chosen] / ranks
                    flat[chosen] = 0
            weight.sub_(RATE * sent)
            if is_refreshed:
                share = max(0.5, beta2 ** (step - known))
                rounded = torch.stack([each.bfloat16() for each in mine]).sum(dim=0) / ranks
                unbiased = share * second[name] / (1 - beta2**known) + (1 - share) * rounded.double().square()
                second[name] = unbiased * (1 - beta2**step)
                largest[name] = torch.maximum(largest[name], second[name])
        known = step if is_dense or is_refreshed else known
        history.append({name: tensor.clone() for name, tensor in weights.items()})
    return history


CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1, "betas": (0.9, 0.95)}),
    "AdamW, slow betas": (torch.optim.AdamW, {"weight_decay": 0.1, "betas": (0.8, 0.999)}),
    "Adam": (torch.optim.Adam, {}),
    "decay in the gradient": (torch.optim.Adam, {"weight_decay": 0.1}),
    "maximized": (torch.optim.Adam, {"weight_decay": 0.1, "maximize": True}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True, "betas": (0.9, 0.5)}),
    "one by one": (torch.optim.AdamW, {"foreach": False}),
    "all at once": (torch.optim.AdamW, {"foreach": True}),
    "fused": (torch.optim.AdamW, {"fused": True}),
}


@pytest.mark.parametrize("density", [0.05, 0.3])
@pytest.mark.parametrize(("kind", "arguments"), CASES.values(), ids=CASES)
def test_against_a_slow_reference(pair: Pool, kind: type, arguments: dict[str, Any], density: float) -> None:
    outcomes = pair.run(train, kind, {"density": density}, arguments, STEPS)
    told = {"decoupled_weight_decay": kind is torch.optim.AdamW, **arguments}
    told.setdefault("weight_decay", 0.01 if kind is torch.optim.AdamW else 0.0)
    expected = reference(outcomes[0][2], [seen for _, seen, _ in outcomes], density, told)
    assert_close_to(expected, [history for history, _, _ in outcomes])


def assert_close_to(expected: list[Tensors], histories: list[list[Tensors]]) -> None:
    """Compare the parameters of all ranks after every step with those of the reference."""
    for history in histories:
        for step, (ours, theirs) in enumerate(zip(history, expected)):
            for name in theirs:
                mine = ours[name].cpu().double()
                if name == "prime":  # whose gradients are all equal: rounding decides which of them are sent
                    torch.testing.assert_close(mine.mean(), theirs[name].mean(), rtol=1e-4, atol=1e-5)
                    continue
                # Of two elements of the same size either may be sent.
                differ = torch.isclose(mine, theirs[name], rtol=1e-4, atol=1e-5).logical_not().sum()
                assert differ <= 2 + mine.numel() // 500, f"{differ} elements of {name} after step {step + 1}"


LEVELS = ("AdamW", "decay in the gradient", "maximized", "amsgrad")


@pytest.mark.parametrize(("kind", "arguments"), [CASES[name] for name in LEVELS], ids=LEVELS)
def test_two_levels_make_the_same_steps_for_nodes(
    pools: dict[int, Pool], kind: type, arguments: dict[str, Any]
) -> None:
    outcomes = pools[4].run(train, kind, {"density": 0.1, "node_ranks": 2}, arguments, STEPS)
    told = {"decoupled_weight_decay": kind is torch.optim.AdamW, **arguments}
    told.setdefault("weight_decay", 0.01 if kind is torch.optim.AdamW else 0.0)
    seen = [[each for _, each, _ in outcomes[first : first + 2]] for first in (0, 2)]
    nodes = [[{name: (one[name] + other[name]) / 2 for name in one} for one, other in zip(*pair)] for pair in seen]
    assert_close_to(
        reference(outcomes[0][2], nodes, 0.1, told, shares=2), histories := [history for history, _, _ in outcomes]
    )
    for history in histories:
        assert_same(history, histories[0])


def test_betas_rates_and_decay_are_followed_as_tensors_and_by_group(pair: Pool) -> None:
    plain = pair.run(train_changing, False)
    as_tensors = pair.run(train_changing, True)
    for one, other in zip(plain, as_tensors):
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-6)


def train_changing(rank: int, as_tensors: bool) -> Tensors:
    """Change the numbers of one group and not of the other in the course of training; return what comes of it."""
    arguments: dict[str, Any] = {"lr": torch.tensor(RATE), "foreach": False} if as_tensors else {"foreach": False}
    training = corrected_steps(rank, torch.optim.AdamW, {"density": 0.1}, arguments, 8)
    ddp, _, optimizer, _ = next(training)
    group = optimizer.param_groups[0]
    moved = group["params"].pop()
    optimizer.add_param_group({"params": [moved], "weight_decay": 0.5})
    for step, _ in enumerate(training):
        group["lr"] = torch.tensor(RATE / (step + 2)) if as_tensors else float(torch.tensor(RATE / (step + 2)))
        group["weight_decay"], group["eps"] = 0.1 * step, 1e-6
    return parameters_of(ddp)


def watched_steps(rank: int, compressor: str, wire: str, steps: int) -> list[dict[str, Any]]:
    """Train; return parameters, gradients and what waits of every step."""
    book = []
    settings = {"compressor": compressor, "density": 0.1, "wire": wire}
    for ddp, engine, optimizer, gradients in corrected_steps(
        rank, torch.optim.AdamW, settings, {"weight_decay": 0.0}, steps
    ):
        book.append(
            {
                "parameters": parameters_of(ddp),
                "gradients": {name: gradient.clone() for name, gradient in gradients.items()},
                "memory": copy.deepcopy(engine.memory.state_dict()),
                "seconds": {
                    name: optimizer.state[parameter]["exp_avg_sq"].clone()
                    for name, parameter in ddp.module.named_parameters()
                    if optimizer.state
                },
            }
        )
    return book


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@pytest.mark.parametrize("compressor", CORRECTED)
def test_replicas_agree_and_no_update_is_lost(pair: Pool, compressor: str, wire: str) -> None:
    one, other = pair.run(watched_steps, compressor, wire, 9)
    for ours, theirs in zip(one, other):
        for kind in ("parameters", "seconds"):
            assert_same(ours[kind], theirs[kind])
    for step in range(DENSE + 2, len(one)):  # from the second corrected step on: all that waits is an update by then
        known = int(one[step - 1]["memory"]["second_moment_step"]["matrix"])
        for name, before in one[step - 1]["parameters"].items():
            owed = torch.zeros_like(before).double()
            for book in (one, other):
                gradient = book[step]["gradients"][name].double()
                used = book[step - 1]["seconds"][name].double() / (1 - 0.999**known)
                owed += gradient / ((used + 0.004 * gradient.square() / 2).sqrt() + 1e-8)
                owed += book[step - 1]["memory"]["update"][name].view_as(before).double()
                owed -= book[step]["memory"]["update"][name].view_as(before).double()
            applied = (before.double() - one[step]["parameters"][name].double()) / RATE
            # A parameter is rounded to 24 bits when an update is taken from it.
            torch.testing.assert_close(
                applied, owed / 2, rtol=1e-3, atol=1e-3 + 3e-7 * before.abs().max().item() / RATE
            )


def train_under(rank: int, compressor: str, schedule: str) -> Tensors:
    """Return the parameters at the end, under a schedule."""
    settings = {"compressor": compressor, "density": 0.1, "schedule": schedule}
    training = corrected_steps(rank, torch.optim.AdamW, settings, {}, 9)
    ddp = next(training)[0]
    for _ in training:
        pass
    return parameters_of(ddp)


@pytest.mark.parametrize("compressor", ["topk", "exdyna", "sdagc"])
def test_no_schedule_changes_a_bit(pair: Pool, compressor: str) -> None:
    expected, _ = pair.run(train_under, compressor, "single")
    for schedule in ("layerwise", "merged"):
        for found in pair.run(train_under, compressor, schedule):
            assert_same(found, expected)


def first_planned_step(rank: int, dense_steps: int) -> int:
    """Return the first step after which a plan is followed."""
    correction = AdamCorrection(dense_steps=dense_steps, fall_steps=0, refresh_steps=1000)
    settings = {"compressor": "topk", "schedule": "merged"}
    training = corrected_steps(rank, torch.optim.AdamW, settings, {}, dense_steps + 120, correction=correction)
    engine = next(training)[1]
    planned = [step for step, _ in enumerate(training) if engine.planner.plan is not None]
    return planned[0]


@pytest.mark.clock
def test_a_plan_is_not_made_of_steps_that_send_everything(pair: Pool) -> None:
    # How many steps are tried first depends on what they take; always fewer than the hundred that are whole here.
    [early, *_], [late, *_] = (pair.run(first_planned_step, dense_steps) for dense_steps in (5, 100))
    assert early < 100 < late


def train_as_ddp(rank: int, compressor: str, density: float, steps: int) -> tuple[Tensors, Tensors]:
    """Train a model behind the engine and its twin behind plain DDP, both with AdamW."""
    training = corrected_steps(rank, torch.optim.AdamW, {"compressor": compressor, "density": density}, {}, steps)
    ddp = next(training)[0]
    for _ in training:
        pass
    torch.manual_seed(0)
    twin = DistributedDataParallel(Edges().to(DEVICE))
    optimizer = torch.optim.AdamW(twin.parameters(), lr=RATE)
    for step in range(steps):
        optimizer.zero_grad()
        twin(batch(rank, step)).backward()
        optimizer.step()
    return parameters_of(ddp), parameters_of(twin)


@pytest.mark.parametrize("compressor", CORRECTED)
def test_while_all_is_sent_it_is_ddp(pair: Pool, compressor: str) -> None:
    for ours, twin in pair.run(train_as_ddp, compressor, 0.05, DENSE):
        for name in twin:
            torch.testing.assert_close(ours[name], twin[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compressor", ["topk", "lags", "omgs"])
def test_density_one_is_ddp_for_good(pair: Pool, compressor: str) -> None:
    for ours, twin in pair.run(train_as_ddp, compressor, 1.0, STEPS):
        for name in twin:
            torch.testing.assert_close(ours[name], twin[name], rtol=1e-5, atol=1e-5)


def poison(rank: int, compressor: str, poisoned: int) -> tuple[Any, Any, bool]:
    """Train with a step that is not finite; return all that is kept before and after it, and whether it was noticed."""
    states, gradients = [], []
    for ddp, engine, optimizer, _ in corrected_steps(
        rank, torch.optim.AdamW, {"compressor": compressor, "density": 0.1}, {}, poisoned + 3, poisoned
    ):
        states.append(copy.deepcopy((engine.state_dict(), optimizer.state_dict()["state"])))
        gradients.append([each.grad.clone() for each in ddp.parameters() if each.grad is not None])
    finite = [all(gradient.isfinite().all() for gradient in step) for step in gradients]
    return states[poisoned], states[poisoned + 1], finite == [step != poisoned + 1 for step in range(len(finite))]


@pytest.mark.parametrize("poisoned", [DENSE + 1, DENSE + 2, DENSE + 3])
@pytest.mark.parametrize("compressor", ["topk", "exdyna", "sdagc"])
def test_what_is_not_finite_moves_nothing_that_is_kept(pair: Pool, compressor: str, poisoned: int) -> None:
    for before, after, is_noticed in pair.run(poison, compressor, poisoned):
        assert is_noticed
        assert_same(before[0], after[0])
        assert_same(before[1], after[1])


def build(density: float = 0.05, **arguments: Any) -> SparseDDPStrategy:
    """Build a strategy that soon sends little."""
    correction = AdamCorrection(dense_steps=2, fall_steps=2, refresh_steps=2)
    return SparseDDPStrategy(
        **{"compressor": "topk", "density": density, "optimizer_correction": correction, **arguments}
    )


class NumberedAdam(Numbered):
    """The same, with AdamW."""

    def configure_optimizers(self) -> Any:
        """Return AdamW with a learning rate that falls step by step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, self.learning_rate_factor)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def resume(rank: int, path: str, save_after: int, strategy: dict[str, Any], trainer: dict[str, Any]) -> Any:
    """Save and go on."""
    return resume_exactly(rank, lambda: build(**strategy), path, save_after, trainer, NumberedAdam)


@pytest.mark.parametrize("save_after", [1, 2, 3, 4, 6, 7])
@pytest.mark.parametrize("compressor", ["topk", "exdyna"])
def test_resumed_it_goes_on_to_the_bit(pair: Pool, tmp_path: Path, compressor: str, save_after: int) -> None:
    settings = {"compressor": compressor, "wire": "bfloat16"}
    for seen, found in pair.run(resume, str(tmp_path / "adam.ckpt"), save_after, settings, {}):
        assert seen[0] <= save_after + 1
        assert found == []


def test_resumed_with_clipping_it_goes_on_to_the_bit(pair: Pool, tmp_path: Path) -> None:
    for _, found in pair.run(resume, str(tmp_path / "adam.ckpt"), 7, {}, {"gradient_clip_val": 0.01}):
        assert found == []


class ClippedByHand(NumberedAdam):
    """A model whose user clips and steps."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_index))
        self.clip_gradients(optimizer, 0.01, "norm")
        optimizer.step()


def resume_by_hand(rank: int, path: str) -> Any:
    """Save and go on."""
    return resume_exactly(rank, build, path, 7, {}, ClippedByHand)


def test_resumed_with_clipping_by_hand_the_first_step_is_clipped_too(pair: Pool, tmp_path: Path) -> None:
    for _, found in pair.run(resume_by_hand, str(tmp_path / "by_hand.ckpt")):
        assert found == []


def fit_and_save(rank: int, path: str, strategy: Any, save_after: int) -> Tensors:
    """Fit two epochs, saving in between; return the parameters at the end."""
    model = NumberedAdam(save_after, path)
    fit_numbered(rank, strategy, model)
    return weights(model)


def go_on(rank: int, path: str, strategy: Any) -> tuple[dict[str, Tensor], dict[str, Any], list[str], list[float]]:
    """Go on from a checkpoint; return parameters, what is kept, what was said, and the density of the last step."""
    model = NumberedAdam()
    with heard() as lines:
        trainer = fit_numbered(rank, strategy, model, ckpt_path=path)
    is_ours = isinstance(strategy, SparseDDPStrategy)
    stats = [trainer.strategy.compression_stats()["density"]] if is_ours else []
    return weights(model), kept_at_end(trainer) if is_ours else {}, lines, stats


def test_a_checkpoint_goes_on_with_plain_adamw_and_the_reverse(pair: Pool, tmp_path: Path) -> None:
    ours, theirs = str(tmp_path / "ours.ckpt"), str(tmp_path / "theirs.ckpt")
    sparse = pair.run(fit_and_save, ours, build(), 8)
    dense = pair.run(fit_and_save, theirs, DDPStrategy(), 8)
    for (plain, _, _, _), (started, kept, _, densities), stayed, expected in zip(
        pair.run(go_on, ours, DDPStrategy()), pair.run(go_on, theirs, build()), sparse, dense
    ):
        # Each has four steps of at most 0.01 left.
        assert all((plain[name] - stayed[name]).abs().max() < 0.05 for name in plain)
        assert all((started[name] - expected[name]).abs().max() < 0.05 for name in plain)
        assert densities[0] == pytest.approx(0.05, abs=0.01)  # its second moment is there, so that nothing is warmed up
        assert kept["memory"]["update"].keys() == started.keys()


def test_other_ranks_go_on_with_the_mean_of_what_waited(pools: dict[int, Pool], tmp_path: Path) -> None:
    path = str(tmp_path / "adam.ckpt")
    pools[2].run(fit_and_save, path, build(), 8)
    for _, kept, lines, _ in pools[3].run(go_on, path, build()):
        assert "mean of what those kept" in lines[0]
        assert "not used" not in " ".join(lines)
        assert kept["memory"]["update"]


class Unfreezing(NumberedAdam):
    """A layer that joins the optimizer in the fifth batch."""

    def __init__(self) -> None:
        super().__init__()
        self.network[0].requires_grad_(False)
        self.densities: list[float] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.network[2].parameters(), lr=0.01)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.current_epoch == 0 and batch_idx == 4:
            self.network[0].requires_grad_(True)
            self.trainer.optimizers[0].add_param_group({"params": list(self.network[0].parameters())})

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.densities.append(self.trainer.strategy.compression_stats()["density"])


def fit_unfreezing(rank: int) -> tuple[Tensors, list[float]]:
    """Fit."""
    model = Unfreezing()
    fit_numbered(rank, build(), model)
    return weights(model), model.densities


def test_a_parameter_that_joins_late_is_sent_whole_first(pair: Pool) -> None:
    (one, densities), (other, _) = pair.run(fit_unfreezing)
    assert_same(one, other)
    assert densities[3] < 0.3  # the last layer alone, corrected
    assert densities[4] > 0.4  # half of the elements join
    assert densities[5] > 0.4
    assert densities[-1] < 0.1


class Noting(Small):
    """AdamW at a high rate, noting norms of gradients and of what clipping left of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[tuple[float, float]] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def configure_gradient_clipping(self, optimizer: Any, *clipping: Any, **named_clipping: Any) -> None:
        before = float(nn.utils.get_total_norm([each.grad for each in self.parameters()]))
        super().configure_gradient_clipping(optimizer, *clipping, **named_clipping)
        self.norms.append((before, float(nn.utils.get_total_norm([each.grad for each in self.parameters()]))))

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Rows(128), batch_size=4)


def fit_noting(
    rank: int, strategy: Any, clip: Optional[float], algorithm: str
) -> tuple[list[tuple[float, float]], Tensors]:
    """Fit."""
    model = Noting()
    make_trainer(rank, strategy, gradient_clip_val=clip, gradient_clip_algorithm=algorithm).fit(model)
    return model.norms, weights(model)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradients_are_clipped_before_they_wait_and_never_what_arrives(pair: Pool, algorithm: str) -> None:
    clip = 0.05 if algorithm == "norm" else 1e-3
    clipped, unclipped = (pair.run(fit_noting, build(), each, algorithm) for each in (clip, None))
    for (norms, ours), (_, free) in zip(clipped, unclipped):
        assert all(after < before for before, after in norms[:2])  # sent whole: as with DDP
        assert all(after == before for before, after in norms[2:])  # an update must not be taken for a gradient
        assert any(not torch.equal(ours[name], free[name]) for name in ours)
    assert_same(clipped[0][1], clipped[1][1])


def fit_scaled(rank: int, strategy: Any, fused: bool) -> Tensors:
    """Fit with a real gradient scaler."""

    class Scaled(Small):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01, fused=fused)

    model = Scaled()
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10, growth_interval=3)
    make_trainer(rank, strategy, plugins=[MixedPrecision("16-mixed", DEVICE.type, scaler=scaler)]).fit(model)
    return weights(model)


def test_a_scaler_does_as_well_with_a_fused_optimizer(pair: Pool) -> None:
    apart, fused = (pair.run(fit_scaled, build(), is_fused) for is_fused in (False, True))
    for one, other in zip(apart, fused):
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-3)
    assert_same(fused[0], fused[1])


def fit_precisely(rank: int, precision: str) -> Tensors:
    """Fit with AdamW in some precision; every fifth batch the parameters move to other memory."""

    class Moving(NumberedAdam):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            for parameter in self.parameters() if batch_idx == 4 else ():
                parameter.data = parameter.data.clone()

    model = Moving()
    fit_numbered(rank, build(), model, precision=precision)
    assert all(torch.equal(found, model.history[12][name]) for name, found in weights(model).items())
    before, after = model.history[10], model.history[12]  # with parameters that have moved
    assert any(not torch.equal(before[name], after[name]) for name in before)
    return weights(model)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_replicas_agree_in_every_precision(pair: Pool, precision: str) -> None:
    one, other = pair.run(fit_precisely, precision)
    assert_same(one, other)
    assert all(parameter.isfinite().all() for parameter in one.values())


def step_twice(rank: int) -> tuple[float, Tensors]:
    """Step twice with the same gradient; return the number of steps made, and the parameters."""
    training = corrected_steps(rank, torch.optim.AdamW, {"density": 0.1}, {}, 7)
    ddp, _, optimizer, _ = next(training)
    for _ in training:
        optimizer.step()
    return float(optimizer.state[next(ddp.parameters())]["step"]), parameters_of(ddp)


def test_a_gradient_may_be_stepped_with_twice(pair: Pool) -> None:
    (steps, one), (_, other) = pair.run(step_twice)
    assert steps == 14
    assert_same(one, other)


class Stepless(torch.optim.Adam):
    """An Adam with a step of its own."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return None if closure is None else closure()


class WithOptimizer(Small):
    """A model trained by any optimizer."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.kind(self.parameters(), lr=0.01)


def refused(rank: int, model: Any) -> str:
    """Fit what must be refused; return the message."""
    try:
        make_trainer(rank, build()).fit(model)
    except ValueError as error:
        return str(error)
    return "was not refused"


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.SGD, torch.optim.NAdam, Stepless])
def test_what_cannot_be_corrected_is_refused_where_it_was_asked_for(pair: Pool, kind: type) -> None:
    for answer in pair.run(refused, WithOptimizer(kind)):
        assert f"but {kind.__name__} cannot be corrected: choose torch.optim.AdamW or torch.optim.Adam" in answer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compressor": "qsgd"}, "QSGD sends everything"),
        ({"compressor": "a2sgd"}, "A2SGD lets replicas drift apart"),
        ({"compressor": "dense"}, "Dense sends everything"),
    ],
)
def test_a_method_that_cannot_be_corrected_says_why(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseDDPStrategy(optimizer_correction=AdamCorrection(), **arguments)


@pytest.mark.parametrize("given", [{"dense_steps": 1}, {"fall_steps": -1}, {"refresh_steps": 0}, {"dense_steps": 0.5}])
def test_numbers_out_of_range_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        AdamCorrection(**given)


def test_an_unknown_correction_is_refused() -> None:
    with pytest.raises(ValueError, match=r"optimizer_correction='adam' must be 'auto'"):
        SparseDDPStrategy(optimizer_correction="adam")


class Logging(NumberedAdam):
    """AdamW, with notes of what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Leave out the notes of the class above."""


class NotingLogger(CSVLogger):
    """A logger that keeps what it is told."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.told: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: Optional[int] = None) -> None:  # type: ignore[override]
        self.told.append(dict(metrics))


def fit_logging(rank: int, folder: str) -> list[dict[str, float]]:
    """Fit with a monitor; return what was logged."""
    logger = NotingLogger(folder)
    model = Logging()
    fit_numbered(
        rank, build(), model, logger=logger, callbacks=[CompressionMonitor(by_parameter=True)], log_every_n_steps=1
    )
    return [told for told in logger.told if "sparse/wire_bytes" in told]


def test_what_waits_and_the_age_of_the_second_moment_are_logged(pair: Pool, tmp_path: Path) -> None:
    told, _ = pair.run(fit_logging, str(tmp_path))
    assert len(told) == 12
    told = told[2:]  # the first two steps are DDP's
    assert all(0 < each["sparse/update_error"] < 100 for each in told[2:])
    by_parameter = [{tag for tag in each if re.search("/(update_error|residual_to_gradient)/", tag)} for each in told]
    names = [name for name, _ in Logging().named_parameters()]
    for each, tags in zip(told[2:], by_parameter[2:]):
        assert tags == {f"sparse_parameters/update_error/{name}" for name in names}
        # Of a mean over ranks and parameters.
        assert min(each[tag] for tag in tags) < 1.1 * each["sparse/update_error"]
        assert max(each[tag] for tag in tags) > 0.9 * each["sparse/update_error"]
    assert [each["sparse/second_moment_age"] for each in told] == [1, 0, 1, 0, 1, 0, 1, 0, 1, 0]
    bytes_sent = [each["sparse/wire_bytes"] for each in told]
    assert all(refresh > 1.5 * other for refresh, other in zip(bytes_sent[3::2], bytes_sent[4::2])), bytes_sent


def test_gradients_that_are_learned_from_are_held_as_they_travel() -> None:
    first, second, weight, gradient = torch.ones(4, 1000).unbind()
    moments = AdamMoments(5, 0.9, 0.999, 1e-8, 0.0, first, second, None, weight)
    memory = AdamMemory(2, AdamCorrection(refresh_steps=1))
    memory.compensate(["weight"], [gradient], {"weight": Hyperparameters(0.1, adam=moments)})
    ranks = mock.Mock()
    ranks.mean_gradients.side_effect = lambda gradients, numels: list(gradients.values())
    assert memory.after_exchange([(["weight"], None)], torch.tensor(True), ranks)
    [[gradients, numels]] = [call.args for call in ranks.mean_gradients.call_args_list]
    assert (gradients["weight"].nbytes, numels) == (2 * 1000, [1000])


class InHalves(LightningModule):
    """A model whose loss is backpropagated at once, or in halves of the parameter, before AdamW or Adam steps."""

    def __init__(self, kind: type, is_halved: bool, **arguments: Any) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.kind, self.is_halved, self.arguments = kind, is_halved, arguments
        self.weight = nn.Parameter(torch.linspace(1e-3, 2e-3, 100))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Build the optimizer; with so small a rate, gradients do not depend on what was selected before."""
        optimizer: torch.optim.Optimizer = self.kind(self.parameters(), lr=1e-7, **self.arguments)
        return optimizer

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Rows(36), batch_size=2)

    def training_step(self, batch: Tensor, batch_index: int) -> None:  # type: ignore[override]
        """Backpropagate, and step once; gradients differ from rank to rank and from step to step."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        losses = self.weight * torch.linspace(1, 3, 100, device=self.device) * (1 + batch.mean())
        shared = losses.sum() * 0.1 if self.is_halved else 0.0
        for loss in (losses[:50].sum() + shared, losses[50:].sum() - shared) if self.is_halved else (losses.sum(),):
            self.manual_backward(loss, retain_graph=self.is_halved)
        optimizer.step()


def fit_in_halves(rank: int, is_halved: bool, kind: type, arguments: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Fit; return how far the weight has come, with what is owed to it, in learning rates; and the second moment."""
    model = InHalves(kind, is_halved, **arguments)
    start = model.weight.detach().clone()
    strategy = SparseDDPStrategy("topk", 0.1, warmup_epochs=0, optimizer_correction=CORRECTION)
    trainer = make_trainer(rank, strategy, max_epochs=1)
    trainer.fit(model)
    owed = trainer.strategy._final_state["memory"]["update"]["weight"]
    (state,) = trainer.optimizers[0].state.values()
    return (start - model.weight.detach().cpu()) / 1e-7, owed.cpu(), state["exp_avg_sq"].cpu()


@pytest.mark.parametrize(
    ("kind", "arguments"), [(torch.optim.AdamW, {}), (torch.optim.Adam, {"weight_decay": 200.0})], ids=["AdamW", "Adam"]
)
def test_halves_of_a_step_are_owed_and_teach_as_much_as_the_whole(
    pair: Pool, kind: type, arguments: dict[str, Any]
) -> None:
    (moved, owed, second), (_, others, _) = pair.run(fit_in_halves, False, kind, arguments)
    (halved_moved, halved_owed, halved_second), (_, halved_others, _) = pair.run(fit_in_halves, True, kind, arguments)
    torch.testing.assert_close(halved_second, second, rtol=1e-3, atol=1e-6)
    expected, seen = moved + (owed + others) / 2, halved_moved + (halved_owed + halved_others) / 2
    torch.testing.assert_close(seen, expected, rtol=1e-2, atol=2e-2)


class Turns(LightningModule):
    """Two networks whose optimizers take turns within a batch, freezing each other's parameters or not."""

    def __init__(self, toggles: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.toggles = toggles
        self.networks = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(network.parameters(), lr=1e-3, betas=(0.9, 0.9)) for network in self.networks]

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Rows(128), batch_size=4)

    def training_step(self, batch: Tensor, batch_index: int) -> None:  # type: ignore[override]
        for optimizer, network in zip(self.optimizers(), self.networks):
            if self.toggles:
                self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            # Gradients grow, so that a second moment that is not learned any more is far too small.
            self.manual_backward((network(batch) - batch).square().mean() * (1 + batch_index) ** 2)
            optimizer.step()
            if self.toggles:
                self.untoggle_optimizer(optimizer)


def fit_in_turns(rank: int, toggles: bool) -> tuple[Tensors, list[Tensor]]:
    """Fit; return parameters and second moments."""
    model = Turns(toggles)
    strategy = build(find_unused_parameters=True)
    trainer = make_trainer(rank, strategy)
    trainer.fit(model)
    seconds = [state["exp_avg_sq"] for each in trainer.optimizers for state in each.state.values()]
    return weights(model), [second.clone() for second in seconds]


def test_optimizers_that_toggle_learn_their_second_moments(pair: Pool) -> None:
    (one, seconds), (other, _) = pair.run(fit_in_turns, True)
    (expected, untoggled), _ = pair.run(fit_in_turns, False)
    assert_same(one, other)
    assert_same(one, expected)
    assert_same(seconds, untoggled)


class Pieces(Small):
    """A model whose step is the sum of several backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, betas=(0.9, 0.9))

    def training_step(self, batch: Tensor, batch_index: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for row in batch:
            self.manual_backward((self.network(row) - row).square().mean())
        optimizer.step()


def fit_in_pieces(rank: int, schedule: str) -> tuple[Tensors, list[Tensor]]:
    """Fit; return parameters and second moments."""
    model = Pieces()
    trainer = make_trainer(rank, build(schedule=schedule))
    trainer.fit(model)
    return weights(model), [state["exp_avg_sq"].clone() for state in trainer.optimizers[0].state.values()]


def test_pieces_of_a_step_teach_the_same_in_every_schedule(pair: Pool) -> None:
    expected = pair.run(fit_in_pieces, "single")
    assert_same(expected[0], expected[1])
    assert_same(pair.run(fit_in_pieces, "layerwise"), expected)


def fit_moving(rank: int, moves: bool) -> Tensors:
    """Fit; parameters may get other memory between backward and the optimizer's step."""

    class Moving(Small):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if moves and self.trainer.global_step in (5, 6):
                for parameter in self.parameters():
                    parameter.data = parameter.data.clone()

    model = Moving()
    make_trainer(rank, build()).fit(model)
    return weights(model)


def test_parameters_may_get_other_memory_before_the_step(pair: Pool) -> None:
    assert_same(pair.run(fit_moving, True), pair.run(fit_moving, False))


def fit_with_silence(rank: int, silent: str) -> tuple[list[float], Tensors]:
    """Fit with clipping; rank 1, or every rank, has no gradient in a few steps. Return the factors of clipping."""
    factors = []

    class Silent(NumberedAdam):
        def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
            loss = super().training_step(batch, batch_index)
            is_silent = 2 <= self.trainer.global_step <= 4 and (
                silent == "all" or (silent == "one" and self.global_rank == 1)
            )
            return loss * 0 if is_silent else loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            factor = self.trainer.strategy.engine.memory.statistics().get("local_clip_factor")
            factors.append(1.0 if factor is None else float(factor))

    model = Silent()
    fit_numbered(rank, build(), model, gradient_clip_val=0.05)
    return factors, weights(model)


@pytest.mark.parametrize("silent", ["one", "all"])
def test_a_gradient_of_zero_silences_no_rank(pair: Pool, silent: str) -> None:
    (one, parameters), (other, others) = pair.run(fit_with_silence, silent)
    (usual, _), _ = pair.run(fit_with_silence, "nobody")
    assert_same(parameters, others)
    assert all(parameter.isfinite().all() for parameter in parameters.values())
    # Soon both count alike again, as much as if nothing had been.
    for mine, theirs, expected in zip(one[9:], other[9:], usual[9:]):
        assert mine == pytest.approx(expected, rel=0.3)
        assert theirs == pytest.approx(expected, rel=0.3)
