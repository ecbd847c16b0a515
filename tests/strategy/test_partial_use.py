"""Parameters that are frozen, unfrozen, added late, shared or unused: nobody waits in vain, no replica goes astray."""

from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any, Optional
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import BackboneFinetuning
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.callbacks import AdaptiveDensity, CompressionMonitor, ErrorBudget
from lightning_sparse.compressors import LAGS
from lightning_sparse.strategy.ddp_wrapping import TrainedParameters
from lightning_sparse.testing.equality import assert_same
from lightning_sparse.testing.pool import Pool
from tests.helpers.resuming import Numbered, fit_numbered, resume_exactly
from tests.helpers.sparse_ddp import AGREEING_NAMES, COMPRESSOR_NAMES, DENSITY, EXACT_NAMES, KEEPING_NAMES
from tests.helpers.trainers import run_fit, weights

Tensors = dict[str, Tensor]
FROZEN = range(4, 8)  # of twelve batches


class Parts(Numbered):
    """A model whose two layers have the names that finetuning callbacks want."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.network = nn.Sequential()
        self.backbone = nn.Linear(32, 64)
        self.head = nn.Linear(64, 32)

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        return (self.head(self.backbone(self.rows(batch_index)).relu()) - self.rows(batch_index)).square().mean()


def batches_before(model: Parts) -> int:
    """Return how many batches have been gone through."""
    return 6 * model.current_epoch + model.trainer.fit_loop.epoch_loop.batch_idx


class Freezing(Parts):
    """Its backbone is frozen for a while, by hand."""

    def on_train_batch_start(self, batch: Tensor, batch_index: int) -> None:
        self.backbone.requires_grad_(6 * self.current_epoch + batch_index not in FROZEN)


class Discarding(Parts):
    """What freezing should come to: every gradient is there, and those of the backbone are dropped for a while."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if batches_before(self) in FROZEN:
            for parameter in self.backbone.parameters():
                parameter.grad = None


class Observed(Callback):
    """Copy weights and residuals after every batch."""

    def __init__(self) -> None:
        self.weights: list[Tensors] = []
        self.residuals: list[Tensors] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        self.weights.append(weights(pl_module))
        engine = getattr(trainer.strategy, "engine", None)
        if engine is not None:
            kept = engine.memory.state_dict().get("residual", {})
            self.residuals.append({name: tensor.clone() for name, tensor in kept.items()})


def settings_of(compressor: str, **others: Any) -> dict[str, Any]:
    """Return a strategy's arguments."""
    return {"compressor": compressor, "density": DENSITY[compressor], "warmup_epochs": 0, **others}


def watch(
    rank: int,
    module: Callable[[], Parts],
    settings: Optional[dict[str, Any]],
    callbacks: Callable[[], Iterable[Callback]] = tuple,
    **arguments: Any,
) -> tuple[list[Tensors], list[Tensors]]:
    """Fit twelve batches; return the weights and the residuals after each. Without settings, with plain DDP."""
    strategy = DDPStrategy() if settings is None else SparseDDPStrategy(**settings)
    observed, model = Observed(), module()
    fit_numbered(rank, strategy, model, callbacks=[observed, *callbacks()], **arguments)
    return observed.weights, observed.residuals


def assert_same_weights(answers: list[tuple[list[Tensors], list[Tensors]]]) -> None:
    """Compare the replicas, after every batch, to the bit."""
    assert_same(answers[0][0], answers[1][0])


def assert_close(ours: list[Tensors], expected: list[Tensors]) -> None:
    """Compare weights after every batch."""
    for one, other in zip(ours, expected, strict=True):
        for name in other:
            torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def with_ddp(pools: dict[int, Pool]) -> Callable[[type[Parts]], list[Tensors]]:
    """Return what gives, for a model, its weights after every batch with plain DDP; each is fitted once."""

    @cache
    def fitted(module: type[Parts]) -> list[Tensors]:
        (history, _), _ = pools[2].run(watch, module, None)
        return history

    return fitted


@pytest.mark.parametrize(
    ("compressor", "schedule"),
    [*((name, "merged") for name in EXACT_NAMES), ("topk", "layerwise"), ("exdyna", "layerwise"), ("dgc", "layerwise")],
)
def test_freezing_for_a_while_is_dropping_gradients_for_a_while(
    pair: Pool, with_ddp: Any, compressor: str, schedule: str
) -> None:
    settings = settings_of(compressor, schedule=schedule)
    settings["density"] = None if DENSITY[compressor] is None else 1.0
    answers = pair.run(watch, Freezing, settings)
    assert_same_weights(answers)
    if compressor not in ("dgc", "sdagc"):  # which carry the momentum themselves, also where nothing is sent
        assert_close(answers[0][0], with_ddp(Discarding))


def freeze_with(rank: int, module: type[Parts], ddp: bool, settings: dict[str, Any], arguments: dict[str, Any]) -> Any:
    """Fit with arguments of strategy and Trainer."""
    return watch(rank, module, None if ddp else settings_of("topk", density=1.0, **settings), **arguments)


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({"static_graph": True}, {}),
        ({"find_unused_parameters": True}, {}),
        ({"gradient_as_bucket_view": False}, {}),
        ({}, {"accumulate_grad_batches": 2}),
        ({"gradient_as_bucket_view": False}, {"accumulate_grad_batches": 2}),
        ({}, {"gradient_clip_val": 0.05}),
    ],
    ids=str,
)
def test_freezing_goes_with_all_else(pair: Pool, settings: dict[str, Any], arguments: dict[str, Any]) -> None:
    answers = pair.run(freeze_with, Freezing, False, settings, arguments)
    assert_same_weights(answers)
    if "gradient_clip_val" not in arguments:  # which looks at the gradients that the reference drops
        (expected, _), _ = pair.run(freeze_with, Discarding, True, {}, arguments)
        assert_close(answers[0][0], expected)


@pytest.mark.parametrize("compressor", AGREEING_NAMES)
def test_what_waits_of_a_frozen_parameter_waits_until_it_is_trained_again(pair: Pool, compressor: str) -> None:
    answers = pair.run(watch, Freezing, settings_of(compressor, wire="bfloat16"))  # so that all that can keep do
    assert_same_weights(answers)
    name = "backbone.weight"
    for history, residuals in answers:
        for batch in FROZEN:
            assert torch.equal(history[batch][name], history[batch - 1][name])
        assert not torch.equal(history[FROZEN.stop][name], history[FROZEN.stop - 1][name])
        if compressor in KEEPING_NAMES:
            assert residuals[FROZEN.start - 1][name].any()
            for batch in FROZEN:
                assert torch.equal(residuals[batch][name], residuals[FROZEN.start - 1][name])
            assert not torch.equal(residuals[FROZEN.stop][name], residuals[FROZEN.start - 1][name])


def freeze_within_the_window(rank: int) -> str:
    """Freeze between two batches of one optimizer step; return the error."""
    with pytest.raises(RuntimeError) as raised:
        watch(rank, Freezing, settings_of("topk"), accumulate_grad_batches=3)
    return str(raised.value)


def test_freezing_within_an_accumulation_window_is_refused_with_a_cure(pair: Pool) -> None:
    for message in pair.run(freeze_within_the_window):
        assert message.startswith("frozen: 'backbone.weight', 'backbone.bias', between two batches of one optimizer st")


class Late(Parts):
    """Only the head is in the optimizer, until a callback adds the backbone."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9)


class LateDiscarding(Late):
    """The backbone's gradients are dropped until then."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.current_epoch == 0:
            self.backbone.zero_grad(set_to_none=True)


class NeverFreezing(BackboneFinetuning):
    """The same optimizer and learning rates, but no freezing."""

    def freeze_before_training(self, pl_module: Any) -> None:
        """Do nothing."""


def finetuning(kind: type[BackboneFinetuning]) -> list[Callback]:
    """Unfreeze in the second epoch."""
    return [kind(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.05)]


@pytest.mark.parametrize("compressor", COMPRESSOR_NAMES)
def test_a_finetuning_callback_keeps_replicas_together(pair: Pool, compressor: str) -> None:
    answers = pair.run(watch, Late, settings_of(compressor), partial(finetuning, BackboneFinetuning))
    if compressor in AGREEING_NAMES:
        assert_same_weights(answers)
    history, _ = answers[0]
    assert torch.equal(history[5]["backbone.weight"], weights(Late())["backbone.weight"])
    assert not torch.equal(history[6]["backbone.weight"], history[5]["backbone.weight"])


def test_a_finetuning_callback_trains_what_dense_training_would(pair: Pool) -> None:
    settings = settings_of("topk", density=1.0)
    (ours, _), _ = pair.run(watch, Late, settings, partial(finetuning, BackboneFinetuning))
    (expected, _), _ = pair.run(watch, LateDiscarding, None, partial(finetuning, NeverFreezing))
    assert_close(ours, expected)


def test_plain_ddp_lets_replicas_drift_apart_there(pair: Pool) -> None:
    one, other = (history for history, _ in pair.run(watch, Late, None, partial(finetuning, BackboneFinetuning)))
    assert not torch.equal(one[-1]["backbone.weight"], other[-1]["backbone.weight"])


class Growing(Parts):
    """A layer is added in the middle of training, with weights of this rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ModuleList()

    def on_train_batch_start(self, batch: Tensor, batch_index: int) -> None:
        if (self.current_epoch, batch_index) == (1, 2):
            torch.manual_seed(self.global_rank)
            self.more.append(nn.Linear(32, 32).to(self.device))
            self.trainer.optimizers[0].add_param_group({"params": list(self.more.parameters()), "lr": 0.01})

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        for layer in self.more:
            loss = loss + (layer(self.rows(batch_index)) - self.rows(batch_index)).square().mean()
        return loss


@pytest.mark.parametrize("compressor", ["topk", "dgc", "sdagc", "exdyna", partial(LAGS, error_feedback="update")])
def test_a_layer_that_is_added_late_is_one_layer_on_all_ranks(pair: Pool, compressor: Any) -> None:
    answers = pair.run(grow, compressor)
    assert_same_weights(answers)
    history, _ = answers[0]
    assert not torch.equal(history[-1]["more.0.weight"], history[8]["more.0.weight"])


def grow(rank: int, compressor: Any) -> Any:
    """Fit a model that grows."""
    built = compressor if isinstance(compressor, str) else compressor()
    return watch(rank, Growing, {"compressor": built, "density": 0.05, "warmup_epochs": 0})


def steer(rank: int, module: type[Parts], folder: str) -> Any:
    """Fit with callbacks that look at every parameter by name, after every step."""
    callbacks = [AdaptiveDensity([ErrorBudget(budget=1.0)], every_n_steps=1), CompressionMonitor(by_parameter=True)]
    logger = TensorBoardLogger(folder)
    return watch(rank, module, settings_of("topk"), lambda: callbacks, logger=logger, log_every_n_steps=1)


@pytest.mark.parametrize("module", [Freezing, Growing])
def test_callbacks_follow_what_is_trained(pair: Pool, tmp_path: Path, module: type[Parts]) -> None:
    assert_same_weights(pair.run(steer, module, str(tmp_path)))


class OneSided(Parts):
    """The ranks do not freeze the same."""

    def on_train_batch_start(self, batch: Tensor, batch_index: int) -> None:
        if batch_index == 2:
            (self.backbone, self.head)[self.global_rank].requires_grad_(False)


class OnOneRank(Parts):
    """Only rank 1 freezes."""

    def on_train_batch_start(self, batch: Tensor, batch_index: int) -> None:
        if batch_index == 2 and self.global_rank == 1:
            self.backbone.requires_grad_(False)


def fail(rank: int, module: type[Parts]) -> str:
    """Fit what cannot go well; return the error."""
    with pytest.raises(RuntimeError) as raised:
        watch(rank, module, settings_of("topk", timeout=timedelta(seconds=3)))
    return str(raised.value)


def test_ranks_that_freeze_differently_say_so_at_once(pair: Pool) -> None:
    for message in pair.run(fail, OneSided):
        assert message.startswith(
            "ranks are about to train different parameters. Rank 0: frozen: 'backbone.weight', 'backbone.bias'. Rank 1:"
            " frozen: 'head.weight', 'head.bias'. What is trained has to change on all ranks"
        )


def groups_asked_for(rank: int) -> list[Any]:
    """Freeze and unfreeze; return the backends of the process groups that were made."""
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
        watch(rank, Freezing, settings_of("topk"))
    return [call.kwargs.get("backend") for call in made.call_args_list]


def test_ranks_agree_on_what_is_trained_without_a_backend_of_another_kind(pair: Pool) -> None:
    assert pair.run(groups_asked_for) == [[None, None]] * 2  # for exchanges, and for news of signals


def test_a_rank_that_freezes_alone_does_not_wait_for_ever(forked: dict[int, Pool]) -> None:
    waiting, freezing = forked[2].run(fail, OnOneRank)
    assert freezing.startswith("rank 1: frozen: 'backbone.weight', 'backbone.bias'; but not every other rank came to")
    assert "waited in vain" in waiting
    forked[2].stop()  # gloo's groups are out of step now


class Inside(Parts):
    """The backbone is frozen, or unfrozen, when its gradients are already waited for."""

    def __init__(self, *arguments: Any, unfreezes: bool = False) -> None:
        super().__init__(*arguments)
        self.unfreezes = unfreezes
        self.backbone.requires_grad_(not unfreezes)

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        if batch_index == 2:
            self.backbone.requires_grad_(self.unfreezes)
        return super().training_step(batch, batch_index)


@pytest.mark.parametrize("unfreezes", [True, False])
def test_a_change_inside_training_step_is_refused_with_a_cure(pair: Pool, unfreezes: bool) -> None:
    for message in pair.run(fail, partial(Inside, unfreezes=unfreezes)):
        change = "unfrozen" if unfreezes else "frozen"
        assert message.startswith(f"{change}: 'backbone.weight', 'backbone.bias', inside training_step")
        assert "on_train_batch_start" in message


class TakingTurns(Parts):
    """Two optimizers, each of which freezes what the other one trains."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_index: int) -> None:
        optimizer = self.optimizers()[batch_index % 2]
        self.toggle_optimizer(optimizer)
        self.manual_backward(super().training_step(batch, batch_index))
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.backbone, self.head)]


def test_optimizers_that_take_turns_train_as_with_ddp(pair: Pool) -> None:
    answers = pair.run(watch, TakingTurns, settings_of("topk", density=1.0, find_unused_parameters=True))
    assert_same_weights(answers)
    (expected, _), _ = pair.run(take_turns_with_ddp)
    assert_close(answers[0][0], expected)


def take_turns_with_ddp(rank: int) -> Any:
    """Do the same with plain DDP."""
    observed, model = Observed(), TakingTurns()
    fit_numbered(rank, DDPStrategy(find_unused_parameters=True), model, callbacks=[observed])
    return observed.weights, []


class Tied(Freezing):
    """Both layers have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(32, 32), nn.Linear(32, 32)
        self.head.weight = self.backbone.weight


@pytest.mark.parametrize("compressor", AGREEING_NAMES)
def test_a_shared_parameter_is_frozen_and_trained_as_one(pair: Pool, compressor: str) -> None:
    answers = pair.run(watch, Tied, settings_of(compressor))
    assert_same_weights(answers)
    history, _ = answers[0]
    assert torch.equal(history[FROZEN.stop - 1]["backbone.weight"], history[FROZEN.start - 1]["backbone.weight"])
    assert not torch.equal(history[-1]["backbone.weight"], history[FROZEN.start]["backbone.weight"])


class Words(Parts):
    """An embedding with ``sparse_coo`` gradients that rank 1 does not always use, and that is frozen for a while."""

    def __init__(self, is_frozen: bool = False) -> None:
        super().__init__()
        self.is_frozen = is_frozen
        self.words = nn.Embedding(20, 32, sparse=True)

    def on_train_batch_start(self, batch: Tensor, batch_index: int) -> None:
        if self.is_frozen:
            self.words.requires_grad_(6 * self.current_epoch + batch_index not in FROZEN)

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        looked_up = self.words((self.rows(batch_index).abs() * 100).long() % 20)
        return loss + looked_up.square().mean()

    def configure_optimizers(self) -> Any:
        """Return SGD without momentum and decay, which take no sparse gradients."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("compressor", COMPRESSOR_NAMES)
@pytest.mark.parametrize("is_frozen", [False, True])
def test_an_embedding_with_sparse_gradients_trains_as_with_ddp(
    pair: Pool, with_ddp: Any, compressor: str, is_frozen: bool
) -> None:
    answers = pair.run(watch, partial(Words, is_frozen), settings_of(compressor))
    if compressor in AGREEING_NAMES:
        assert_same_weights(answers)
    if not is_frozen:  # nothing else depends on it, nor it on anything else
        for ours, theirs in zip(answers[0][0], with_ddp(Words), strict=True):
            torch.testing.assert_close(ours["words.weight"], theirs["words.weight"], rtol=1e-5, atol=1e-6)


class Thawing(Parts):
    """The backbone is frozen when the model is built, and unfrozen from a batch on."""

    def __init__(self, *arguments: Any, thaws_at: int) -> None:
        super().__init__(*arguments)
        self.thaws_at = thaws_at
        self.backbone.requires_grad_(False)

    def on_train_batch_start(self, batch: Tensor, batch_index: int) -> None:
        self.backbone.requires_grad_(6 * self.current_epoch + batch_index >= self.thaws_at)


@pytest.mark.parametrize(  # before the save and after it, in turn
    ("compressor", "thaws_at"),
    [*zip(COMPRESSOR_NAMES, cycle([4, 10])), *zip(("topk", "dgc", "exdyna"), cycle([4, 10]))],
)
def test_resumed_it_goes_on_to_the_bit_whatever_was_frozen(
    pair: Pool, tmp_path: Path, compressor: str, thaws_at: int
) -> None:
    settings = settings_of(compressor, schedule="layerwise")
    path, module = str(tmp_path / "mid.ckpt"), partial(Thawing, thaws_at=thaws_at)
    for resumed, found in pair.run(resume_exactly, partial(SparseDDPStrategy, **settings), path, 8, {}, module):
        assert resumed == [9, 10, 11, 12]
        assert found == []


def freeze_alone(rank: int) -> list[Tensors]:
    """Fit in one process, where nothing is exchanged."""
    return watch(rank, Freezing, settings_of("topk"))[0]


def test_one_process_freezes_and_unfreezes_too(forked: dict[int, Pool]) -> None:
    (history,) = forked[1].run(freeze_alone)
    assert torch.equal(history[7]["backbone.weight"], history[3]["backbone.weight"])
    assert not torch.equal(history[8]["backbone.weight"], history[7]["backbone.weight"])


def test_a_density_may_be_given_for_what_is_frozen_at_first(pair: Pool) -> None:
    assert_same_weights(pair.run(thaw_with_densities))


def thaw_with_densities(rank: int) -> Any:
    """Fit with a density for a parameter that is frozen when training starts."""
    compressor = LAGS(densities={"backbone.weight": 0.5})
    return watch(rank, partial(Thawing, thaws_at=4), {"compressor": compressor, "density": 0.05})


class Unused(Parts):
    """One of its layers has no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = nn.Linear(2, 2)


def advice(rank: int, strategy: Any, arguments: dict[str, Any]) -> str:
    """Return what is said of a layer without gradients."""
    with pytest.raises(RuntimeError) as said:
        run_fit(rank, SparseDDPStrategy(**arguments) if strategy is None else strategy, Unused())
    return str(said.value)


@pytest.mark.parametrize(
    ("strategy", "named"), [("sparse_topk", "strategy='sparse_topk_find_unused_parameters_true' or "), (None, "")]
)
def test_the_advice_on_unused_parameters_stays_with_the_strategy(
    pair: Pool, strategy: Optional[str], named: str
) -> None:
    for said in pair.run(advice, strategy, {"compressor": "lags"}):
        assert said.endswith(f"have them looked for: {named}SparseDDPStrategy(..., find_unused_parameters=True)")
        assert "'ddp" not in said


def test_a_parameter_that_is_replaced_is_another_one() -> None:
    model = Parts()
    trained = TrainedParameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert not trained.have_changed([optimizer])
    model.head.weight = nn.Parameter(torch.zeros(32, 64))
    optimizer.add_param_group({"params": [model.head.weight]})
    assert trained.have_changed([optimizer])
    assert trained.changes() == "frozen: 'head.weight'; unfrozen: 'head.weight'"
