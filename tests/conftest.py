"""Fixtures, and which cases of a test are run."""

import os
from collections import defaultdict
from unittest.mock import patch

import pytest
import torch

from lightning_sparse.engine.requirements import takes_wire
from lightning_sparse.testing.pool import Pool
from lightning_sparse.testing.subjects import subject_of
from tests.helpers.commands import Interpreter
from tests.helpers.devices import DEVICE
from tests.helpers.faults import GROUP_TIMEOUT
from tests.helpers.tiers import sample

# Threads that wait for each other on a machine with other tests take for ever. Those of pools have one, too.
torch.set_num_threads(1)

# What every forked process has imported when it starts. A forked process cannot use a GPU.
IMPORTED = ["tests.helpers.faults", "tests.helpers.trainers"] if DEVICE.type == "cpu" else []


class FirstApart(Pool):
    """Processes of which the first is started as a launcher does, so that it orders its sets unlike those forked."""

    def _start(self):
        if not self._members:
            alone = self.first(1)
            alone._preload = []
            Pool._start(alone)
        super()._start()


def is_possible(item):
    """Tell whether a case's compressor takes its wire."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    name, wire = given.get("compressor"), given.get("wire")
    return not (isinstance(name, str) and isinstance(wire, str)) or takes_wire(subject_of(name), wire)


def pytest_collection_modifyitems(items):
    """Leave out what is refused, and leave to ``make test-all`` what a sample of a test's cases does without."""
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
    """Take back what a test, or Lightning in it, leaves in the environment: a seed would be that of all that follow."""
    with patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def pools():
    """Pools by number of ranks; half a minute of processor time is saved where all but the first are forked."""
    largest = FirstApart(4, preload=IMPORTED)
    yield {ranks: largest.first(ranks) for ranks in (1, 2, 3, 4)}
    largest.stop()


@pytest.fixture
def pair(pools):
    """Two ranks."""
    return pools[2]


@pytest.fixture(scope="session")
def forked():
    """Pools by number of ranks whose processes start at once, so that they may die, or be needed for one test only.

    All order their sets alike, which processes that a launcher starts do not: laws are held to those of ``pools``.
    """
    pools = {ranks: Pool(ranks, preload=IMPORTED, group_timeout=GROUP_TIMEOUT) for ranks in (1, 2, 3, 4)}
    yield pools
    for pool in pools.values():
        pool.stop()


@pytest.fixture(scope="session")
def interpreter():
    """A process of which scripts are forked that begin without Lightning."""
    interpreter = Interpreter()
    yield interpreter
    interpreter.stop()
