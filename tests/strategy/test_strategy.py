import inspect
import re
import threading
import time
from contextlib import suppress
from functools import partial
from itertools import cycle
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelPruning
from pytorch_lightning.strategies import StrategyRegistry
from torch import nn

from lightning_sparse import AdamCorrection, LocalSteps, SparseDDPStrategy
from lightning_sparse.compressors import DGC, LAGS, TopK
from lightning_sparse.strategy.names import VARIANTS, systems
from lightning_sparse.testing.tensors import assert_same, differences
from tests.helpers.fits import fits, one_model, refusals
from tests.helpers.resuming import Numbered
from tests.helpers.statistics import STATS
from tests.helpers.trainers import Failing, Small, WithAdam, make_trainer


@pytest.mark.parametrize(
    ("system", "schedule"),
    [*zip(systems(), cycle(["layerwise", "merged", "single"]))],
    ids=lambda each: getattr(each, "name", each),
)
def test_every_system_is_registered_trains_and_ends_as_one_model(pair, system, schedule):
    first, second = fits(pair, Small, {**system.arguments, "schedule": schedule}, limit_val_batches=1)
    assert_same(first.end, second.end)
    assert all(tensor.isfinite().all() for tensor in first.end.values())
    assert not torch.equal(first.end["network.0.weight"], first.start["network.0.weight"])
    assert first.total.keys() - {"replica_divergence", "local_steps"} == STATS
    assert all(type(value) is float for value in first.total.values())
    assert first.total["total_wire_bytes"] > 0
    for name in (system.name + suffix for suffix in VARIANTS):
        assert StrategyRegistry[name]["description"] == system.description
        assert isinstance(StrategyRegistry.get(name), SparseDDPStrategy)


class Halving(Numbered):
    def __init__(self, when):
        super().__init__()
        self.when = when
        self.hook_at("__init__")

    def hook_at(self, when):
        def halve(parameter):
            time.sleep(0.01)
            parameter.grad.mul_(0.5)

        for parameter in self.parameters() if when == self.when else ():
            parameter.register_post_accumulate_grad_hook(halve)

    def on_train_start(self):
        self.hook_at("on_train_start")

    def on_train_epoch_start(self):
        self.hook_at("on_train_epoch_start" if self.current_epoch == 0 else "")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("when", ["on_train_start", "on_train_epoch_start"])
@pytest.mark.parametrize("local", [{}, {"local_steps": 2}], ids=["each step", "rounds"])
def test_hooks_of_users_come_before_the_exchange_whenever_they_are_registered(pair, when, local):
    settings = {"density": 0.1, "schedule": "layerwise", **local}
    late, early, none = (fits(pair, partial(Halving, at), settings)[0] for at in (when, "__init__", "never"))
    assert_same(late.end, early.end)
    assert differences(late.end, none.end)


class MixedTypes(Small):
    def __init__(self):
        super().__init__()
        self.doubles = nn.Parameter(torch.ones(40, dtype=torch.float64))
        self.halves = nn.Parameter(torch.ones(40, dtype=torch.bfloat16))

    def training_step(self, batch, batch_index):
        extra = self.doubles.sum() * batch.mean() + self.halves.float().square().sum() * batch[0, 0]
        return (self.network(batch) - batch).square().mean() + 1e-3 * extra


def test_density_one_trains_parameters_of_several_types_as_ddp_does(pair):
    ours, ddp = (one_model(fits(pair, MixedTypes, settings)).end for settings in ({"density": 1.0}, None))
    for name in ddp:
        torch.testing.assert_close(ours[name], ddp[name], rtol=1e-2 if name == "halves" else 1e-5, atol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-true", "64-true"])
def test_precisions_train_and_stay_identical(pair, precision):
    one_model(fits(pair, Small, {"density": 0.05}, precision=precision))


TOGETHER = [
    ({"local_steps": 5, "compressor": DGC(momentum=None, clip_norm=1.0)}, "clip_norm="),
    ({"local_steps": 5, "compressor": LAGS(adaptive_density=True)}, "adaptive_density="),
    ({"local_steps": 5, "schedule": "auto"}, "local_steps=.*schedule='auto'"),
    ({"local_steps": LocalSteps(5, residual_decay=0.9), "compressor": "dense"}, "residual_decay="),
    *(({"compressor": name, "optimizer_correction": AdamCorrection()}, "Adam") for name in ("qsgd", "a2sgd", "dense")),
]
KINDS = {"compressor": TopK, "schedule": 3}
NAMES = {
    "densty": "density",
    "find_unused": "find_unused_parameters",
    "outer_momentum": r"LocalSteps\(outer_momentum=",
    "xyz": "omit the argument",
}
ELSEWHERE = [("compressor", "LAGS", "lags"), ("compressor", "sparse_lags", "lags"), ("wire", "fp16", "float16")]
REFUSED = [
    *((arguments, ValueError, message) for arguments, message in TOGETHER),
    *(({name: value}, TypeError, name) for name, value in KINDS.items()),
    *(({name: 1}, TypeError, f"{name}=1 .*{meant}") for name, meant in NAMES.items()),
    *(
        ({name: value}, ValueError, f"{name}={value!r} is unknown.*did you mean {meant!r}")
        for name, value, meant in ELSEWHERE
    ),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_an_argument_that_cannot_be_is_refused_by_its_name_with_what_was_meant(arguments, kind, message):
    with pytest.raises(kind, match=message):
        SparseDDPStrategy(**arguments)


def test_a_default_warm_up_takes_a_tenth_of_a_short_training(pair):
    settings, one_epoch = {"compressor": "dgc", "density": 0.05}, {"max_epochs": 1, "limit_train_batches": 16}
    first, *others = fits(pair, Numbered, settings, **one_epoch)
    stages = [0.05 ** (stage / 5) for stage in range(1, 6)]
    # A tenth is 1.6 steps: time for two of the four stages.
    expected = [stages[0], stages[2], *stages[4:] * 14]
    for each in (first, *others):
        assert [stats["density"] for stats in each.stats] == pytest.approx(expected, rel=0.05)


class Complex(Small):
    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))


def test_what_cannot_be_compressed_is_refused(pair):
    for message in refusals(pair, Complex, "sparse_topk"):
        assert re.match(r"TypeError: .*phase \(torch\.complex64", message)


def test_one_process_trains_and_says_that_nothing_is_compressed(forked):
    (ours,), (ddp,) = (fits(forked[1], Small, settings) for settings in ({"density": 0.01}, None))
    assert_same(ours.batches, ddp.batches)
    assert ours.total == {}
    assert any("one process, so there is nothing to exchange or compress" in line for line in ours.said)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("settings", "module", "arguments", "named"),
    [
        ({"compressor": LAGS(densities={"netwrok.0.weight": 1.0})}, Small, {}, "network.0.weight"),
        ({"compressor": "dgc", "optimizer_correction": None}, WithAdam, {}, "Adam needs gradients"),
        ({"optimizer_correction": AdamCorrection()}, Small, {}, "does not support SGD"),
        ({"local_steps": 2}, Small, {"val_check_interval": "00:00:00:01"}, "val_check_interval"),
        ({"compressor": "a2sgd"}, Small, {"callbacks": [ModelPruning("l1_unstructured")]}, "ModelPruning"),
    ],
    ids=["name of a parameter", "momentum of Adam", "correction of SGD", "clock", "pruned"],
)
def test_one_process_refuses_what_several_refuse(forked, settings, module, arguments, named):
    (alone,), (one, other) = (refusals(forked[ranks], module, settings, **arguments) for ranks in (1, 2))
    assert re.match(f"ValueError.*{named}", alone)
    assert alone == one == other


def groups_given_back(rank, module, backend):
    before, strategy = threading.enumerate(), SparseDDPStrategy()
    distributed = Mock(wraps=dist, get_backend_config=lambda _: f"cpu:{backend}")
    with patch("lightning_sparse.engine.collectives.dist", distributed), suppress(ZeroDivisionError):
        make_trainer(rank, strategy).fit(module())
    threads = [thread.name for thread in threading.enumerate() if thread not in before]
    ours = [name for name in threads if name.startswith("lightning_sparse")]
    return distributed.destroy_process_group.call_count, len(strategy.compression_stats()), ours


@pytest.mark.parametrize(
    ("module", "backend", "groups"), [(Small, "nccl", 1), (Failing, "nccl", 0), (Failing, "gloo", 1)]
)
def test_a_rank_that_fails_does_not_wait_for_others_to_give_a_group_back(pair, module, backend, groups):
    for given_back, statistics, threads in pair.run(groups_given_back, module, backend):
        assert given_back == groups
        assert statistics > 0
        assert threads == []


WHOLE = {"compressor": "topk", "density": 1.0, "warmup_steps": 0}


class Counted(Numbered):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
        self.notes = []

    def training_step(self, batch, batch_index):
        self.note()
        return super().training_step(batch, batch_index)

    def validation_step(self, batch, batch_index):
        self.note()
        self.log("loss", self.network(self.rows(batch_index)).square().mean(), sync_dist=True)

    def note(self):
        self.notes.append(torch.cat([self.network[1].running_mean, self.network[1].running_var]).clone())


@pytest.mark.parametrize("accumulated", [1, 2])
def test_buffers_are_those_of_ddp_in_each_step(pair, accumulated):
    limits = {"limit_val_batches": 2, "val_check_interval": 3, "num_sanity_val_steps": 1}
    more = {"accumulate_grad_batches": accumulated, **limits}
    ours, ddp = (fits(pair, Counted, settings, **more) for settings in (WHOLE, None))
    for one, other in zip(ours, ddp):
        assert len(one.notes) == len(other.notes) > 12
        assert all(map(torch.equal, one.notes, other.notes))


@pytest.mark.parametrize("name", ["broadcast_buffers", "forward_sync_buffers"])
def test_buffers_may_stay_each_ranks_own(pair, name):
    if name not in inspect.signature(nn.parallel.DistributedDataParallel).parameters:
        pytest.skip("this torch has it not")
    first, second = fits(pair, Counted, {**WHOLE, name: False})
    assert torch.equal(first.notes[0], second.notes[0])
    assert not any(map(torch.equal, first.notes[1:], second.notes[1:]))


class Asked(Numbered):
    def on_train_batch_start(self, batch, batch_index):
        assert self.trainer.model is self.trainer.strategy.model is self


@pytest.mark.parametrize("settings", [WHOLE, {**WHOLE, "local_steps": 2}], ids=["each step", "rounds"])
def test_the_model_is_the_lightning_module(pair, settings):
    fits(pair, Asked, settings)


NOTEBOOK = """
import lightning_sparse
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import ModelPruning
from tests.helpers.trainers import Small

quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = Trainer(strategy="sparse_lags_notebook", accelerator="cpu", devices=2, max_epochs=4, **quiet)
trainer.fit(Small())
assert trainer.strategy.engine is None
trainer.save_checkpoint("fitted.ckpt")
assert trainer.strategy.compression_stats() == {}
assert trainer.strategy.exchange_plan() is None
"""


@pytest.mark.exhaustive
def test_weights_of_forked_processes_are_there_after_fit_but_no_statistics(interpreter, tmp_path):
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    done = interpreter.run(tmp_path / "notebook.py")
    assert done.returncode == 0, done.stderr
    saved = torch.load(tmp_path / "fitted.ckpt", weights_only=True)["state_dict"]
    assert not torch.equal(saved["network.0.weight"], Small().network[0].weight)
