from importlib import import_module
from importlib.util import find_spec
from unittest import mock

import pytest
import torch

from lightning_sparse import AdamCorrection
from lightning_sparse.testing.tensors import assert_same
from tests.helpers.devices import DEVICE
from tests.helpers.entry_points import SAVED, as_hugging_face_wants, through_hugging_face
from tests.helpers.examples import load

CORRECTION = AdamCorrection(warmup_steps=2, density_decay_steps=0, second_moment_interval=2)
each_example = pytest.mark.parametrize("example", ["train_accelerate", "train_hugging_face"])
pytestmark = [
    pytest.mark.skipif(DEVICE.type != "cpu", reason="several ranks share no GPU with Accelerate"),
    pytest.mark.skipif(find_spec("transformers") is None, reason="the extra [examples] is not installed"),
]


def train(rank, example, folder, density, resumes):
    with as_hugging_face_wants(rank):
        module = load(example)
        arguments = {}
        if example == "train_hugging_face":
            arguments = {"use_cpu": True, "max_steps": 8, "save_steps": 5, "logging_steps": 100, "disable_tqdm": True}
            arguments["resume_from"] = folder / "checkpoint-5" if resumes else None
        else:
            arguments = {"steps": 8, "save_at": 5, "resumes": resumes}
        loss, parameters = module.train(folder, density, CORRECTION, **arguments)
    return loss, parameters


@pytest.mark.sampled(1)
@each_example
def test_density_one_ends_where_ddp_does(pair, tmp_path, example):
    ddp = pair.run(train, example, tmp_path / "ddp", None, False)
    for (loss, ours), (ddp_loss, theirs) in zip(pair.run(train, example, tmp_path / "ours", 1.0, False), ddp):
        assert loss == pytest.approx(ddp_loss, rel=1e-4)
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(1)
@each_example
def test_resumed_it_goes_on_to_the_bit(pair, tmp_path, example):
    (_, whole), (_, other) = pair.run(train, example, tmp_path, 0.05, False)
    assert_same(whole, other)
    state = torch.load(next(tmp_path.rglob("rank_00001.pt")), weights_only=True)
    assert any(each.any() for each in state["memory"]["update"].values())  # the file has a residual
    for _, resumed in pair.run(train, example, tmp_path, 0.05, True):
        assert_same(resumed, whole)


def test_a_search_for_hyperparameters_is_refused():
    state = import_module("transformers").TrainerState(is_hyper_param_search=True)
    callback = import_module("lightning_sparse.loop.hugging_face").SparsifyCallback(mock.Mock())
    callback._handle = mock.Mock()
    with pytest.raises(ValueError, match="save_strategy='no'"):
        callback.on_save(None, state, None)


def stopping(event, step):
    left = [step]

    def stop(self, args, state, control, **others):
        if left == [state.global_step]:
            left.clear()
            raise KeyboardInterrupt

    return type("Stopping", (import_module("transformers").TrainerCallback,), {event: stop})()


def stopped_and_resumed(rank, settings, folder, event):
    transformers = import_module("transformers")
    train = transformers.Trainer.train

    def train_twice(trainer, **arguments):
        trainer.add_callback(stopping(event, SAVED + 1))
        with pytest.raises(KeyboardInterrupt):
            train(trainer)
        train(trainer, resume_from_checkpoint=True)

    with mock.patch.object(transformers.Trainer, "train", train_twice):
        return through_hugging_face(rank, settings, folder, False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("settings", "event"),
    [
        ({"density": 0.1, "optimizer_correction": CORRECTION}, "on_step_begin"),
        # The shared model is swapped in during the evaluation.
        ({"compressor": "lags", "density": 0.1, "local_steps": 5}, "on_evaluate"),
    ],
)
def test_stopped_a_trainer_resumes_to_the_bit(pair, tmp_path, settings, event):
    whole = pair.run(through_hugging_face, settings, tmp_path / "whole", False)
    assert_same(pair.run(stopped_and_resumed, settings, tmp_path, event), whole)
