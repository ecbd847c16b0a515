"""Ranks with large time differences: no deadlock, identical replicas, no lost gradients.

``make faults`` runs the long form with 2000 steps.
"""

import os
import random
import time
from unittest import mock

import pytest
import torch

import lightning_sparse.engine.engine as engine_module
from lightning_sparse.engine.collectives import Communicator
from lightning_sparse.strategy.names import systems
from lightning_sparse.testing.invariants import assert_mass_is_conserved
from lightning_sparse.testing.tensors import assert_same
from lightning_sparse.testing.wrapping import booked_step
from tests.helpers.sluggish import Sluggish
from tests.helpers.sparse_ddp import (
    AGREEING_NAMES,
    COMPRESSOR_NAMES,
    DENSITY,
    KEEPING_NAMES,
    Edges,
    batch,
    parameters_of,
    sparse_ddp,
    watch_gradients,
)

IS_LONG = bool(os.environ.get("LIGHTNING_SPARSE_FAULTS"))
STEPS = -(-2000 // len(COMPRESSOR_NAMES)) if IS_LONG else 8
CHANCE = random.Random(f"{os.getpid()} {time.perf_counter_ns()}")
assert {system.arguments["compressor"] for system in systems()} <= set(COMPRESSOR_NAMES)


def nap(*args):
    if CHANCE.random() < 0.3:
        time.sleep(0.01 * CHANCE.random() ** 4)


def train_out_of_step(rank, settings, steps):
    torch.manual_seed(0)
    book = []
    run = Communicator.issue

    def run_late(self, *args):
        nap()
        return run(self, *args)

    late_worker = mock.patch.object(engine_module, "ExchangeWorker", Sluggish)
    with (
        late_worker,
        mock.patch.object(Communicator, "issue", run_late),
        sparse_ddp(Edges(), **settings) as (ddp, engine),
    ):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
        gradients = watch_gradients(ddp.module)
        for parameter in ddp.parameters():
            parameter.register_hook(nap)
        for step in range(steps):
            entry = booked_step(ddp, engine, gradients, ddp(batch(rank, step)))
            optimizer.step()
            if step % 10 in (0, 9):
                book.append((parameters_of(ddp), entry))
    return book


@pytest.mark.sampled(2)
@pytest.mark.timeout(3600 if IS_LONG else 300)
@pytest.mark.parametrize("compressor", COMPRESSOR_NAMES)
def test_ranks_out_of_step_do_not_deadlock_and_lose_nothing(pools, compressor):
    schedule = "layerwise" if COMPRESSOR_NAMES.index(compressor) % 2 else "merged"
    settings = {"compressor": compressor, "density": DENSITY[compressor], "schedule": schedule}
    books = pools[3].run(train_out_of_step, settings, STEPS, timeout=60 + STEPS)
    if compressor in AGREEING_NAMES:
        for book in books[1:]:
            assert_same([parameters for parameters, _ in book], [parameters for parameters, _ in books[0]])
    if compressor in KEEPING_NAMES:
        assert_mass_is_conserved([[entry for _, entry in book] for book in books])
