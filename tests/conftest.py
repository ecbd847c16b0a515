"""Fixtures shared by all tests."""

from collections.abc import Iterator

import pytest

from tests.pool import Pool


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Pool]]:
    """Pools of gloo processes by number of ranks; started when first used."""
    pools = {ranks: Pool(ranks) for ranks in (1, 2, 3, 4)}
    yield pools
    for pool in pools.values():
        pool.stop()


@pytest.fixture
def pair(pools: dict[int, Pool]) -> Pool:
    """Two ranks."""
    return pools[2]
