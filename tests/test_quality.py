"""Threads of the quality benchmark give results bitwise identical to processes of the engine."""

from functools import partial

import pytest
import torch

from lightning_sparse import AdamCorrection
from lightning_sparse.engine.settings import Settings
from lightning_sparse.loop.optimizers import OptimizerView
from tests.helpers.devices import DEVICE
from tests.helpers.examples import load
from tests.helpers.sparse_ddp import Edges, backpropagate, batch, parameters_of, sparse_ddp

CORRECTION = AdamCorrection(warmup_steps=3, density_decay_steps=2, second_moment_interval=2)
STEPS = 9


virtual = load("virtual")
pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="threads of one process train on the CPU")


def network():
    torch.manual_seed(0)
    return Edges()


def build_optimizer(model, is_adam):
    parameters = model.parameters()
    return torch.optim.AdamW(parameters, lr=1e-3) if is_adam else torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def train(rank, compressor, is_adam):
    settings = {"compressor": compressor, "density": 0.1, "schedule": "single", "wire": "bfloat16"}
    with sparse_ddp(network(), correction=CORRECTION if is_adam else None, **settings) as (ddp, engine):
        optimizer = build_optimizer(ddp, is_adam)
        parameters = dict(ddp.module.named_parameters())
        view = OptimizerView(
            parameters, [optimizer], engine.settings.feedback, engine.densities.target, engine.memory, print
        )
        for step in range(STEPS):
            engine.begin_backward(view.next_step())
            backpropagate(ddp, engine, ddp(batch(rank, step)))
            if view.adam is not None:
                view.adam.store_updates(None)
            optimizer.step()
        view.close()
        return parameters_of(ddp), int(engine.compression_stats()["total_wire_bytes"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_adam", [True, False], ids=["AdamW", "SGD"])
@pytest.mark.parametrize("compressor", ["topk", "exdyna", "sdagc", "dgc"])
def test_threads_do_what_processes_do(pair, compressor, is_adam):
    more = {"warmup_steps": 0, "optimizer_correction": CORRECTION if is_adam else None}
    settings = partial(Settings.of, compressor, 0.1, schedule="single", wire="bfloat16", **more)
    ranks = virtual.VirtualRanks(2, network, partial(build_optimizer, is_adam=is_adam), settings, STEPS)
    for step in range(STEPS):
        ranks.step([lambda model, rank=rank, step=step: model(batch(rank, step)) for rank in range(2)])
    ranks.close()
    for member, (expected, sent) in zip(ranks.ranks, pair.run(train, compressor, is_adam)):
        found = dict(member.network.named_parameters())
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert ranks.wire_bytes == sent
