"""Hugging Face's Accelerate and Trainer, as the examples use them with ``sparsify``."""

import math
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import AdamCorrection
from lightning_sparse.testing.tensors import assert_same
from tests.helpers.devices import DEVICE
from tests.helpers.entry_points import as_hugging_face_wants
from tests.helpers.examples import load

CORRECTION = AdamCorrection(dense_steps=2, fall_steps=0, refresh_steps=2)
each_example = pytest.mark.parametrize("example", ["train_accelerate", "train_hugging_face"])
pytestmark = [
    pytest.mark.skipif(DEVICE.type != "cpu", reason="several ranks share no GPU with Accelerate"),
    pytest.mark.skipif(find_spec("transformers") is None, reason="the extra [examples] is not installed"),
]


def train(rank, example, folder, density, resumes):
    """Train as an example does, in this process as one of those that a launcher has started."""
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
    kept = torch.load(next(tmp_path.rglob("kept-1.pt")), weights_only=True)["rank"]["memory"]
    assert any(each.any() for each in kept["update"].values())  # something waits to be taken up
    for _, resumed in pair.run(train, example, tmp_path, 0.05, True):
        assert_same(resumed, whole)


class Accelerator:
    scaler = None

    def unscale_gradients(self):
        """Do nothing, as without a scaler."""

    def clip_grad_norm_(self, parameters, max_norm):
        return "its own"


def norms_of_two_trainings(rank):
    """Begin a training that raises, then one that makes a step; return norms, before and clipped, what is clipped to
    in between, and what Accelerate's clip returns afterwards.
    """
    from lightning_sparse.loop.hugging_face import SparsifyCallback

    args = SimpleNamespace(world_size=2, process_index=rank, max_grad_norm=0.01, load_best_model_at_end=False)
    state = SimpleNamespace(global_step=0, max_steps=4)
    trainer = SimpleNamespace(accelerator=Accelerator(), model=nn.Linear(4, 4))
    callback = SparsifyCallback(trainer, density=1.0, warmup_epochs=0)
    for _ in range(2):
        trainer.model_wrapped = DistributedDataParallel(trainer.model)
        trainer.model.zero_grad()
        trainer.optimizer = torch.optim.SGD(trainer.model_wrapped.parameters(), lr=0.1)
        callback.on_train_begin(args, state, None)
        trainer.model_wrapped(torch.ones(2, 4)).square().sum().backward()
    parameters = [*trainer.model_wrapped.parameters()]
    before, saved = trainer.accelerator.clip_grad_norm_(parameters, args.max_grad_norm), args.max_grad_norm
    norms = float(before), *(float(trainer.accelerator.clip_grad_norm_(parameters, limit)) for limit in (math.inf,) * 2)
    callback.on_train_end(args, state, None)
    return norms, saved, trainer.accelerator.clip_grad_norm_(parameters, 1.0)


def test_a_training_that_follows_one_that_raised_clips(pair):
    for (before, *clipped), saved, own in pair.run(norms_of_two_trainings):
        assert before > 0.1
        assert clipped == pytest.approx([0.01, 0.01], rel=1e-3)
        assert (saved, own) == (0.01, "its own")
