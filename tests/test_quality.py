"""Threads of the quality benchmark give results bitwise identical to processes of the engine."""

from functools import partial

import pytest
import torch

from lightning_sparse import AdamCorrection
from lightning_sparse.engine.settings import Settings
from tests.helpers.devices import DEVICE
from tests.helpers.examples import load
from tests.helpers.sparse_ddp import Edges, batch, corrected_steps, parameters_of

CORRECTION = AdamCorrection(warmup_steps=3, density_decay_steps=2, second_moment_interval=2)
STEPS = 9


virtual = load("virtual")
pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="threads of one process train on the CPU")


def network():
    torch.manual_seed(0)
    return Edges()


OPTIMIZERS = {"AdamW": (torch.optim.AdamW, {}), "SGD": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9})}


def build_optimizer(model, optimizer):
    kind, arguments = OPTIMIZERS[optimizer]
    return kind(model.parameters(), **{"lr": 1e-3, **arguments})


def train(rank, compressor, optimizer):
    settings = {"compressor": compressor, "density": 0.1, "schedule": "single", "wire": "bfloat16"}
    correction = CORRECTION if optimizer == "AdamW" else None
    kind, arguments = OPTIMIZERS[optimizer]
    for ddp, engine, *_ in corrected_steps(rank, correction, kind, settings, arguments, STEPS, learns=False):
        ended = parameters_of(ddp), engine.compression_stats().get("total_wire_bytes")
    return ended


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("compressor", ["topk", "exdyna", "sdagc", "dgc"])
def test_threads_do_what_processes_do(pair, compressor, optimizer):
    more = {"warmup_steps": 0, "optimizer_correction": CORRECTION if optimizer == "AdamW" else None}
    settings = partial(Settings.of, compressor, 0.1, schedule="single", wire="bfloat16", **more)
    ranks = virtual.VirtualRanks(2, network, partial(build_optimizer, optimizer=optimizer), settings, STEPS)
    for step in range(STEPS):
        ranks.step([lambda model, rank=rank, step=step: model(batch(rank, step)) for rank in range(2)])
    ranks.close()
    for member, (expected, sent) in zip(ranks.ranks, pair.run(train, compressor, optimizer)):
        found = dict(member.network.named_parameters())
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert ranks.wire_bytes == sent
