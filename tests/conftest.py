"""Fixtures beside those of ``lightning_sparse.testing.plugin``, which users of the kit have as well."""

from collections.abc import Iterator

import pytest

from lightning_sparse.testing.pool import Pool
from tests.helpers.devices import DEVICE
from tests.helpers.faults import GROUP_TIMEOUT

# What every forked process has imported when it starts. A forked process cannot use a GPU.
IMPORTED = ["tests.helpers.faults", "tests.helpers.trainers"] if DEVICE.type == "cpu" else []


@pytest.fixture(scope="session")
def forked() -> Iterator[dict[int, Pool]]:
    """Pools by number of ranks whose processes start at once, so that they may die, or be needed for one test only.

    They order their sets alike, which processes that a launcher starts do not: laws are held to those of ``pools``.
    """
    pools = {ranks: Pool(ranks, preload=IMPORTED, group_timeout=GROUP_TIMEOUT) for ranks in (1, 2, 3, 4)}
    yield pools
    for pool in pools.values():
        pool.stop()
