from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import AdamCorrection, LocalSteps
from lightning_sparse.testing.tensors import assert_same, differences
from tests.helpers.devices import DEVICE
from tests.helpers.entry_points import (
    ENTRY_POINTS,
    SAVED,
    Net,
    as_it_is,
    tensors_of,
    through_a_plain_loop,
    through_hugging_face,
    through_the_trainer,
)
from tests.helpers.tiers import exhaustive

SETTINGS = {
    "AdamW": {"compressor": "lags", "density": 0.1, "optimizer_correction": AdamCorrection(3, 2, 2)},
    "momentum": {"compressor": "dgc", "density": 0.1, "warmup_steps": 0},
    "lags": {"compressor": "lags", "density": 0.1, "wire": "bfloat16", "local_steps": 5},
    "diloco": {"compressor": "dense", "local_steps": LocalSteps(5, 0.7, 0.9, nesterov=True)},
    "decaying": {"density": 0.1, "wire": "2bit", "local_steps": LocalSteps(5, residual_decay=0.9)},
    "two levels": {"density": 0.1, "levels": 2, "optimizer_correction": AdamCorrection(3, 2, 2)},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", SETTINGS)
def test_a_training_is_the_same_to_the_bit_through_each_entry_point(pools, tmp_path, kind):
    settings = SETTINGS[kind]
    ranks = pools[4 if "levels" in settings else 2]
    expected = ranks.run(through_the_trainer, settings, tmp_path, False)
    first, second, *_ = ({**each} for each in expected)
    if "local_steps" not in settings:  # BatchNorm's statistics are local with local steps
        for name in [name for name in first if "running" in name]:
            del first[name], second[name]
    assert_same(second, first)
    assert differences(first, {name: each for name, each in tensors_of(Net()).items() if name in first})
    for entry_point in ENTRY_POINTS.values():
        if entry_point is through_hugging_face and (DEVICE.type != "cpu" or find_spec("transformers") is None):
            continue
        for resumes in (False, True):
            assert_same(ranks.run(entry_point, settings, tmp_path, resumes), expected)
    assert_same(ranks.run(partial(through_a_plain_loop, handle_first=False), settings, tmp_path, True), expected)


def compiled(net):
    return torch.compile(net, backend="eager")


def compiled_in_ddp(net):
    return DistributedDataParallel(compiled(net))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["AdamW", "decaying"])
@pytest.mark.parametrize("wraps", [(as_it_is, compiled), (compiled_in_ddp, as_it_is)])
def test_compiled_or_not_a_state_is_the_same(pair, tmp_path, wraps, kind):
    whole, resumed = (
        pair.run(partial(through_a_plain_loop, wrap=wrap), SETTINGS[kind], tmp_path, resumes)
        for resumes, wrap in enumerate(wraps)
    )
    assert_same(resumed, whole)


@pytest.mark.skipif(DEVICE.type != "cpu" or find_spec("transformers") is None, reason="as above")
@pytest.mark.parametrize("saves", ["steps", *exhaustive(["epoch"])])
def test_an_evaluation_of_hugging_faces_trainer_ends_a_round_whatever_saves(pair, tmp_path, saves):
    train = partial(through_hugging_face, steps=SAVED, eval_strategy="epoch")
    ended = pair.run(partial(train, save_strategy="no"), SETTINGS["lags"], tmp_path, False)
    for resumes in (False, True):
        assert_same(pair.run(partial(train, save_strategy=saves), SETTINGS["lags"], tmp_path, resumes), ended)
