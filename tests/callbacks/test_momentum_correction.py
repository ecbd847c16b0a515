from functools import partial

import pytest
import torch

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.callbacks import MomentumCorrection
from lightning_sparse.compressors import DGC
from lightning_sparse.testing.tensors import assert_same, differences
from tests.helpers.fits import fits
from tests.helpers.trainers import WithSGD, make_trainer, weights

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


def fit_twice(rank):
    trainer = make_trainer(rank, SparseDDPStrategy(density=0.05), callbacks=[MomentumCorrection()])
    trainer.fit(WithSGD(nesterov=True))
    optimizer = trainer.optimizers[0]
    group, kept = dict(optimizer.param_groups[0]), [each.get("momentum_buffer") for each in optimizer.state.values()]
    trainer.callbacks[:] = [each for each in trainer.callbacks if not isinstance(each, MomentumCorrection)]
    trainer.fit_loop.max_epochs = 2
    later, fresh = WithSGD(), WithSGD()
    trainer.fit(later)
    again = make_trainer(rank, SparseDDPStrategy(density=0.05))
    again.fit_loop.epoch_progress.current.processed = again.fit_loop.epoch_progress.current.completed = 1
    again.fit_loop.max_epochs = 2
    again.fit(fresh)
    return kept, group, [weights(later), weights(fresh)]


def test_it_gives_everything_back(pair):
    for kept, group, (later, fresh) in pair.run(fit_twice):
        assert not any(each is not None for each in kept)  # the optimizer has stepped without momentum
        assert (group["momentum"], group["nesterov"]) == (0.9, True)
        assert all(torch.equal(later[name], fresh[name]) for name in later)
