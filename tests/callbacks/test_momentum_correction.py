from functools import partial

import pytest

from lightning_sparse.callbacks import MomentumCorrection
from lightning_sparse.compressors import DGC
from lightning_sparse.testing.tensors import assert_same, differences
from tests.helpers.fits import fits
from tests.helpers.trainers import WithSGD

SPARSE = {"density": 0.05, "warmup_steps": 0}
SETTINGS = {
    "nesterov": ({}, {"nesterov": True}),
    "one cycle": ({}, {"one_cycle": True}),
    "weight decay": ({}, {"weight_decay": 0.01}),
    "clipped": ({"clip_norm": 0.05}, {}),
    "masked": ({"masks_momentum": True}, {}),
    "a number": ({"momentum": 0.8, "nesterov": True}, {"momentum": 0.0}),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("settings", "model"), SETTINGS.values(), ids=SETTINGS)
def test_it_trains_bit_for_bit_as_dgc(pair, settings, model):
    runs = [(DGC(**settings), []), ("topk", [MomentumCorrection(**settings)]), ("topk", [])]
    own, ours, without = (
        fits(pair, partial(WithSGD, **model), {**SPARSE, "compressor": compressor}, callbacks=callbacks)
        for compressor, callbacks in runs
    )
    for one, other, alone in zip(own, ours, without):
        assert_same(one.batches, other.batches)
        assert differences(one.end, alone.end)
