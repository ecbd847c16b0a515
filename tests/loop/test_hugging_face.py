from importlib import import_module
from importlib.util import find_spec
from unittest import mock

import pytest
import torch

from lightning_sparse import AdamCorrection
from lightning_sparse.testing.tensors import assert_same
from tests.helpers.devices import DEVICE
from tests.helpers.entry_points import as_hugging_face_wants
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


@pytest.mark.parametrize(
    ("arguments", "searches"), [({"auto_find_batch_size": True}, False), ({"save_strategy": "steps"}, True)]
)
def test_trainings_that_start_anew_are_refused(tmp_path, arguments, searches):
    transformers = import_module("transformers")
    callback = import_module("lightning_sparse.loop.hugging_face").SparsifyCallback(mock.Mock())
    state = transformers.TrainerState(is_hyper_param_search=searches)
    with pytest.raises(ValueError, match="save_strategy='no'"):
        callback.on_train_begin(transformers.TrainingArguments(str(tmp_path), **arguments), state, None)
