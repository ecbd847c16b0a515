import os
from collections import defaultdict
from multiprocessing import get_context
from unittest.mock import patch

import pytest
import torch

from lightning_sparse.engine.requirements import takes_wire
from lightning_sparse.testing.pool import Pool
from lightning_sparse.testing.wrapping import subject_of
from tests.helpers.commands import Interpreter
from tests.helpers.devices import DEVICE
from tests.helpers.faults import GROUP_TIMEOUT
from tests.helpers.pools import forking
from tests.helpers.tiers import sample

# Waiting threads are slow on a busy machine. Pools also use one thread.
torch.set_num_threads(1)

# Modules that every forked process has imported. A forked process cannot use a GPU.
IMPORTED = ["tests.helpers.faults", "tests.helpers.trainers"] if DEVICE.type == "cpu" else []


class FirstApart(Pool):
    """A pool with a launched first process and forked others, so that string hashes, and hence set orders, differ."""

    def _start(self):
        if not self._members:
            alone = self.first(1)
            alone._context = get_context("spawn")
            Pool._start(alone)
        super()._start()


def is_possible(item):
    given = item.callspec.params if hasattr(item, "callspec") else {}
    name, wire = given.get("compressor"), given.get("wire")
    return not (isinstance(name, str) and isinstance(wire, str)) or takes_wire(subject_of(name), wire)


def pytest_collection_modifyitems(items):
    """Drop unsupported cases, and mark the cases outside of a sample as exhaustive."""
    items[:] = filter(is_possible, items)
    tests = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and hasattr(item, "callspec"):
            check = item.callspec.params.get("check")
            tests[item.path, item.originalname, check and check.holds].append(item)
    for cases in tests.values():
        for item in set(cases) - set(sample(cases, *cases[0].get_closest_marker("sampled").args)):
            item.add_marker("exhaustive")


@pytest.fixture(autouse=True)
def environment_of_its_own():
    """Restore the environment after each test. A seed would otherwise affect all later tests."""
    with patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def pools():
    """Pools by number of ranks. Forking all processes except the first saves half a minute of CPU time."""
    largest = FirstApart(4, context=forking(IMPORTED))
    yield {ranks: largest.first(ranks) for ranks in (1, 2, 3, 4)}
    largest.stop()


@pytest.fixture
def pair(pools):
    return pools[2]


@pytest.fixture(scope="session")
def forked():
    """Pools by number of ranks with forked processes, which start fast and may die.

    All these processes order sets alike. Launched processes do not, so tests of invariants use ``pools``.
    """
    pools = {ranks: Pool(ranks, context=forking(IMPORTED), timeout=GROUP_TIMEOUT) for ranks in (1, 2, 3, 4)}
    yield pools
    for pool in pools.values():
        pool.stop()


@pytest.fixture(scope="session")
def interpreter():
    interpreter = Interpreter()
    yield interpreter
    interpreter.stop()
