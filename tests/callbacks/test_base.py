import warnings
from contextlib import nullcontext

import pytest
import torch
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import ModelPruning

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.callbacks import (
    AdaptiveDensity,
    CompressionMonitor,
    ErrorBudget,
    MomentumCorrection,
    OverlapTimeline,
    ReplicaSentinel,
)
from tests.helpers.fits import refusals
from tests.helpers.trainers import Small, WithAdam, WithSGD, accelerator, make_trainer

CALLBACKS = {
    "AdaptiveDensity": lambda: AdaptiveDensity([ErrorBudget(1)]),
    "CompressionMonitor": CompressionMonitor,
    "MomentumCorrection": MomentumCorrection,
    "OverlapTimeline": lambda: OverlapTimeline(),
    "ReplicaSentinel": ReplicaSentinel,
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_another_strategy_is_refused_or_warned_of_and_the_same_callback_twice_is_refused(name):
    build, quiet = CALLBACKS[name], {"logger": False, "enable_checkpointing": False, "devices": 1}
    trainer = Trainer(accelerator=accelerator(), max_epochs=1, callbacks=[build()], **quiet)
    is_warned = name == "CompressionMonitor"
    needs = f"{name} needs a SparseDDPStrategy"
    refused = nullcontext() if is_warned else pytest.raises(TypeError, match=needs)
    with warnings.catch_warnings(record=True) as caught, refused:
        warnings.simplefilter("always")
        trainer.fit(Small())
    assert sum(needs in str(each.message) for each in caught) == is_warned
    twice = Trainer(strategy=SparseDDPStrategy(), accelerator="cpu", callbacks=[build(), build()], **quiet)
    with pytest.raises(ValueError, match=name):
        build().setup(twice, Small(), "fit")


class Other(AdaptiveDensity):
    """Another callback that sets densities."""


ADAPTIVE = AdaptiveDensity([ErrorBudget(1)])
MOMENTUM, MASKED = MomentumCorrection(), MomentumCorrection(masks_momentum=True)
AUTO = {"compressor": "lags", "schedule": "auto"}
# Strategy (a name stands for its compressor), callbacks, model, and part of the error; none if supported.
TOGETHER = [
    *[(name, [ADAPTIVE], Small, "density") for name in ("sdagc", "exdyna", "a2sgd", "dense", "omgs")],
    (AUTO, [ADAPTIVE], Small, "schedule='auto'"),
    ("topk", [ADAPTIVE, Other([ErrorBudget(1)])], Small, "AdaptiveDensity and Other"),
    *[(name, [ADAPTIVE], Small, "") for name in ("topk", "lags", "dgc")],
    ("topk", [MOMENTUM], WithAdam, "SGD"),
    ("topk", [MomentumCorrection(momentum=0.5)], WithSGD, "momentum=0.5"),
    *[(name, [MOMENTUM], WithSGD, name.upper()) for name in ("dgc", "sdagc", "a2sgd")],
    ("omgs", [MASKED], WithSGD, "OMGS"),
    (AUTO, [MOMENTUM], WithSGD, "schedule"),
    ("omgs", [MOMENTUM], WithSGD, ""),
    *[(name, [MASKED], WithSGD, "") for name in ("lags", "exdyna", "dense")],
    ("a2sgd", [ReplicaSentinel()], Small, "ReplicaSentinel"),
    ({"local_steps": 4}, [ReplicaSentinel()], Small, "ReplicaSentinel"),
    ({"local_steps": 4}, [ModelPruning("l1_unstructured")], Small, "ModelPruning"),
    ({"compressor": "dense", "local_steps": 4}, [OverlapTimeline()], Small, "local_steps"),
    *[({"local_steps": 4}, [each], WithSGD, "local_steps") for each in (ADAPTIVE, MOMENTUM)],
]


@pytest.mark.parametrize(("strategy", "callbacks", "module", "named"), TOGETHER)
def test_what_cannot_go_together_is_refused_and_the_rest_is_not(pair, strategy, callbacks, module, named):
    settings = {"compressor": strategy} if isinstance(strategy, str) else strategy
    for answer in refusals(pair, module, settings, callbacks=callbacks, limit_train_batches=2):
        assert named in answer
        assert answer.startswith("ValueError" if named else "was not refused")


def fit_alone(rank, directory):
    timeline = OverlapTimeline(range(100), path=f"{directory}/overlap.json")
    adaptive = AdaptiveDensity([ErrorBudget(1)], every_n_steps=1)
    watching = [CompressionMonitor(progress_bar=True), ReplicaSentinel(1), timeline]
    callbacks = [*watching, adaptive, MomentumCorrection()]
    trainer = make_trainer(rank, SparseDDPStrategy(), callbacks=callbacks, log_every_n_steps=1)
    with pytest.warns(UserWarning, match="OverlapTimeline has recorded nothing"):
        trainer.fit(WithSGD())
    return [group["momentum"] for group in trainer.optimizers[0].param_groups]


def test_one_process_has_nothing_to_look_at_or_to_correct(forked, tmp_path):
    assert forked[1].run(fit_alone, str(tmp_path)) == [[0.9]]
    assert not (tmp_path / "overlap.json").exists()


class Tampered(Small):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 5:
            with torch.no_grad():
                bias = self.network[2].bias
                bias[3] = bias[3].nextafter(bias.new_tensor(9.0))
                self.network[2].weight[0, 0] += 1


def test_a_changed_parameter_is_named_and_ends_training_on_all_ranks(pair):
    for message in refusals(pair, Tampered, {"density": 0.05}, callbacks=[ReplicaSentinel(4)]):
        assert message.startswith("ReplicaError")
        for told in ("after step 7", "'network.2.weight'", "rank 1", "2 of 4 parameters"):
            assert told in message
