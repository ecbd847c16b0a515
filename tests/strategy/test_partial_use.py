from datetime import timedelta
from functools import partial

import pytest
import torch
from pytorch_lightning.callbacks import BackboneFinetuning
from torch import nn

from lightning_sparse import AdamCorrection, LocalSteps
from lightning_sparse.compressors import LAGS
from lightning_sparse.testing.tensors import assert_same
from tests.helpers.fits import fits, one_model, refusals
from tests.helpers.resuming import Numbered
from tests.helpers.sparse_ddp import AGREEING_NAMES, DENSITY, DIFFERENT_NAMES, EXACT_NAMES, KEEPING_NAMES
from tests.helpers.trainers import with_optimizer

FROZEN = range(4, 8)  # twelve batches in all
UNUSED = {"find_unused_parameters": True}
OWN_BUCKETS = {"gradient_as_bucket_view": False}
IN_PAIRS = {"accumulate_grad_batches": 2}


class Parts(Numbered):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.network = nn.Sequential()
        self.backbone = nn.Linear(32, 64)
        self.head = nn.Linear(64, 32)
        self.notes = []

    @property
    def batches_before(self):
        return 6 * self.current_epoch + self.trainer.fit_loop.epoch_loop.batch_idx

    def training_step(self, batch, batch_index):
        return (self.head(self.backbone(self.rows(batch_index)).relu()) - self.rows(batch_index)).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        engine = getattr(self.trainer.strategy, "engine", None)
        kept = {} if engine is None else engine.memory.state_dict().get("residual", {})
        self.notes.append({name: tensor.clone() for name, tensor in kept.items()})


class Freezing(Parts):
    def on_train_batch_start(self, batch, batch_index):
        self.backbone.requires_grad_(self.batches_before not in FROZEN)


class Discarding(Parts):
    def on_before_optimizer_step(self, optimizer):
        if self.batches_before in FROZEN:
            self.backbone.zero_grad(set_to_none=True)


def settings_of(compressor, **others):
    return {"compressor": compressor, "density": DENSITY[compressor], "warmup_steps": 0, **others}


def whole(compressor, **others):
    return settings_of(compressor, **{"density": None if DENSITY[compressor] is None else 1.0, **others})


def assert_close(ours, expected):
    torch.testing.assert_close(ours.batches, expected.batches, rtol=1e-4, atol=1e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        *((whole(name), {}) for name in DIFFERENT_NAMES if name in EXACT_NAMES),
        *((whole(name, schedule="layerwise"), {}) for name in ("topk", "exdyna", "dgc")),
        *((whole("topk", **more), {}) for more in ({"static_graph": True}, UNUSED, OWN_BUCKETS)),
        *((whole("topk", **more), IN_PAIRS) for more in ({}, OWN_BUCKETS)),
        (whole("topk"), {"gradient_clip_val": 0.05}),
    ],
    ids=str,
)
def test_freezing_for_a_while_is_dropping_gradients_for_a_while(pair, settings, arguments):
    ours = one_model(fits(pair, Freezing, settings, **arguments))
    # DGC and SDAGC update momentum without messages, and clipping includes the dropped gradients.
    if settings["compressor"] not in ("dgc", "sdagc") and "gradient_clip_val" not in arguments:
        assert_close(ours, fits(pair, Discarding, **arguments)[0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("compressor", "local_world_size"),
    [*((name, 1) for name in DIFFERENT_NAMES if name in AGREEING_NAMES), ("topk", 2)],
)
def test_what_waits_of_a_frozen_parameter_waits_until_it_is_trained_again(pools, compressor, local_world_size):
    # A narrow wire gives every compressor a residual.
    settings, ranks = settings_of(compressor, wire="bfloat16"), 2 * local_world_size
    answers = fits(
        pools[ranks], Freezing, settings, local_world_size=ranks if local_world_size == 1 else local_world_size
    )
    history = [weights["backbone.weight"] for weights in one_model(answers).batches]
    for kept in (history, *([each["backbone.weight"] for each in answer.notes] for answer in answers)):
        assert kept[FROZEN.start - 1].any()
        assert all(torch.equal(kept[batch], kept[FROZEN.start - 1]) for batch in FROZEN)
        assert not torch.equal(kept[FROZEN.stop], kept[FROZEN.start - 1])
        if compressor not in KEEPING_NAMES:
            break


class Late(Parts):
    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9)


class OneSided(Parts):
    def __init__(self):
        super().__init__()
        self.backbone.requires_grad_(False)

    def on_train_batch_start(self, batch, batch_index):
        if batch_index == 2:
            (self.backbone.weight, self.backbone.bias)[self.global_rank].requires_grad_(True)


class OnOneRank(OneSided):
    def on_train_batch_start(self, batch, batch_index):
        if batch_index == 2 and self.global_rank == 1:
            self.backbone.requires_grad_(True)


class FrozenOnOneRank(Parts):
    def on_train_batch_start(self, batch, batch_index):
        self.backbone.requires_grad_(self.global_rank == 0 or self.batches_before not in FROZEN)


SOON = settings_of("topk", timeout=timedelta(seconds=3))


class Succeeding(Numbered):
    def __init__(self, width):
        super().__init__()
        self.width, self.notes = width, []

    def on_train_batch_start(self, batch, batch_index):
        if self.current_epoch == 1 and batch_index == 0:
            torch.manual_seed(self.global_rank)
            self.network[2] = nn.Linear(64, self.width).to(self.device)
            self.notes.append(self.network[2].weight.detach().clone())
            self.trainer.optimizers = [self.configure_optimizers()]

    def training_step(self, batch, batch_index):
        rows = self.rows(batch_index)
        return 0 * self.network(rows).sum() if self.current_epoch else super().training_step(batch, batch_index)


WITH_MOMENTUM = partial(torch.optim.SGD, momentum=0.9)
WITHOUT_DECAY = partial(torch.optim.AdamW, weight_decay=0.0)
EARLY = AdamCorrection(warmup_steps=2, density_decay_steps=0, second_moment_interval=1)
SUCCESSIONS = {
    "residual": ({"density": 0.05}, torch.optim.SGD),
    "rates": ({"compressor": LAGS(error_feedback="update"), "density": 0.05}, torch.optim.SGD),
    "momentum": ({"compressor": "dgc", "density": 0.05}, WITH_MOMENTUM),
    "thresholds": ({"compressor": "sdagc", "density": 0.05}, WITH_MOMENTUM),
    "partitions": ({"compressor": "exdyna", "density": 0.05}, torch.optim.SGD),
    "updates": ({"density": 0.05, "optimizer_correction": EARLY}, WITHOUT_DECAY),
    "rounds": ({"density": 0.05, "local_steps": LocalSteps(3, 0.7, 0.9)}, torch.optim.SGD),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("width", [32, 48], ids=["same size", "wider"])
@pytest.mark.parametrize(("settings", "kind"), SUCCESSIONS.values(), ids=SUCCESSIONS)
def test_a_new_layer_is_not_moved_by_what_is_kept_of_the_one_that_had_its_name(pair, settings, kind, width):
    module = partial(with_optimizer, kind, partial(Succeeding, width), lr=0.01)
    answers = fits(pair, module, {"warmup_steps": 0, **settings})
    (start,) = answers[0].notes
    for each in answers:
        assert all(torch.equal(weights["network.2.weight"], start) for weights in each.batches[6:])
        is_same = torch.equal(each.end["network.0.weight"], each.batches[6]["network.0.weight"])
        assert is_same == ("local_steps" in settings)  # a round moves nothing that no rank has moved
    assert_same(answers[0].end, answers[1].end)


class Moved(Numbered):
    def on_train_batch_start(self, batch, batch_index):
        if self.current_epoch == 1 and batch_index == 0:
            first, activation, last = self.network
            last.added = nn.Linear(2, 2).to(self.device, self.dtype)
            self.network = nn.Sequential(nn.Identity(), first, activation, last)
            self.optimizers().add_param_group({"params": last.added.parameters()})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stored", [name for name in SUCCESSIONS if name != "partitions"])  # follow the order
def test_what_is_stored_follows_a_parameter_to_another_name(pair, stored):
    settings, kind = SUCCESSIONS[stored]
    settings = {"warmup_steps": 0, "schedule": "layerwise", **settings}
    precision = "bf16-true" if "local_steps" in settings else "32-true"  # the shared model stays in fp32
    (renamed, other), (plain, _) = (
        fits(pair, partial(with_optimizer, kind, module, lr=0.01), settings, precision=precision)
        for module in (Moved, Numbered)
    )
    assert_same(renamed.end, other.end)
    for ours, theirs in zip(renamed.batches[6:], plain.batches[6:]):
        assert_same(ours["network.1.weight"], theirs["network.0.weight"])
        assert_same(ours["network.3.weight"], theirs["network.2.weight"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("compressor", ["topk", "dgc", "sdagc"])
def test_a_parameter_that_one_rank_freezes_moves_by_the_gradients_of_others(pair, compressor):
    history = [
        each["backbone.weight"] for each in one_model(fits(pair, FrozenOnOneRank, settings_of(compressor))).batches
    ]
    assert not torch.equal(history[FROZEN.stop - 1], history[FROZEN.start - 1])


def test_ranks_that_unfreeze_differently_say_so_at_once(pair):
    for message in refusals(pair, OneSided, SOON):
        assert message.startswith("RuntimeError: ranks are about to train different parameters")
        assert "Rank 0 changes 'backbone.weight'. Rank 1 changes 'backbone.bias'" in message


def test_a_rank_that_unfreezes_alone_does_not_wait_for_ever(forked):
    waiting, unfreezing = refusals(forked[2], OnOneRank, SOON)
    assert "rank 1 changes 'backbone.weight', 'backbone.bias', but not every other rank" in unfreezing
    assert "waited in vain" in waiting
    forked[2].stop()  # gloo's groups are out of step now


class Thawing(Parts):
    def __init__(self, *arguments, thaws_at):
        super().__init__(*arguments)
        self.thaws_at = thaws_at
        self.backbone.requires_grad_(False)

    def on_train_batch_start(self, batch, batch_index):
        self.backbone.requires_grad_(self.batches_before >= self.thaws_at)


def test_a_density_may_be_given_for_what_is_frozen_at_first(pair):
    compressor = LAGS(densities={"backbone.weight": 0.5})
    one_model(fits(pair, partial(Thawing, thaws_at=4), {"compressor": compressor, "density": 0.05}))


class AddedWithin(Late):
    def training_step(self, batch, batch_index):
        if batch_index == 2:
            self.backbone = nn.Linear(32, 64)
            self.optimizers().add_param_group({"params": list(self.backbone.parameters())})
        return super().training_step(batch, batch_index)


class ThawedWithin(Parts):
    def __init__(self):
        super().__init__()
        self.backbone.requires_grad_(False)

    def training_step(self, batch, batch_index):
        self.backbone.requires_grad_(batch_index >= 2)
        return super().training_step(batch, batch_index)


@pytest.mark.parametrize(("module", "more"), [(AddedWithin, {}), (ThawedWithin, {"local_steps": 3})])
def test_what_is_trained_changes_between_two_steps(pair, module, more):
    for message in refusals(pair, module, {**SOON, **more}):
        assert message.startswith("RuntimeError: the model has other parameters to train")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("compressor", DIFFERENT_NAMES)
def test_a_finetuning_callback_keeps_replicas_together(pair, compressor):
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.05)
    answers = fits(pair, Late, settings_of(compressor), callbacks=[callback])
    first = one_model(answers) if compressor in AGREEING_NAMES else answers[0]
    history = [weights["backbone.weight"] for weights in first.batches]
    assert torch.equal(history[5], first.start["backbone.weight"])
    assert not torch.equal(history[6], history[5])


CORRECTED = {"optimizer_correction": AdamCorrection(3, 2, 2)}
IDLE = {
    "LAGS": (torch.optim.SGD, {"compressor": "lags"}),
    "LAGS, AdamW": (torch.optim.AdamW, {"compressor": "lags", **CORRECTED}),
    "ExDyna": (torch.optim.SGD, {"compressor": "exdyna"}),
    "ExDyna, AdamW": (torch.optim.AdamW, {"compressor": "exdyna", **CORRECTED}),
    "DGC": (torch.optim.SGD, {"compressor": "dgc", "warmup_steps": 0}),
    "auto": (torch.optim.SGD, {"compressor": "lags", "schedule": "auto"}),
    "local steps": (torch.optim.AdamW, {"local_steps": 3}),
}


class Idle(Numbered):
    """A model without a gradient in one batch of all ranks, and in one batch of rank 1."""

    def training_step(self, batch, batch_index):
        if batch_index == 1 or (batch_index == 2 and self.global_rank == 1):
            return torch.zeros((), requires_grad=True, device=self.device)
        return super().training_step(batch, batch_index)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "settings"), IDLE.values(), ids=IDLE)
def test_a_step_without_a_gradient_needs_no_flag(pair, kind, settings):
    trained, other = fits(pair, partial(with_optimizer, kind, Idle, lr=0.01), {"density": 0.1, **settings})
    assert_same(trained.end, other.end)
    if "local_steps" not in settings:
        assert_same(trained.batches, other.batches)
    assert not any(torch.equal(before, trained.end[name]) for name, before in trained.start.items())
