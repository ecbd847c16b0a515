"""Measuring the network with real collectives."""

import math

import pytest
import torch
import torch.distributed as dist

from lightning_sparse.cli.plan import Network, measure_network
from lightning_sparse.engine.collectives import Collectives
from lightning_sparse.testing.pool import Pool


class SlowCollectives:
    """Three ranks on a clock of their own, at 1 Gbit/s and 100 us."""

    ranks = 3
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.now = 0.0

    def run(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Let the time pass that a collective takes."""
        self.now += Network(1e9, 1e-4, self.ranks).seconds(name, tensor.numel() * 4)
        return tensor


def measured(rank: int) -> Network:
    collectives = Collectives(list(range(dist.get_world_size())), torch.device("cpu"))
    try:
        return measure_network(collectives)
    finally:
        collectives.close()


def test_a_network_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    collectives = SlowCollectives()
    monkeypatch.setattr("time.perf_counter", lambda: collectives.now)
    network = measure_network(collectives)
    assert network == pytest.approx(Network(1e9, 1e-4, 3), rel=1e-6)


def test_real_ranks_conclude_the_same(pair: Pool) -> None:
    networks = pair.run(measured)
    assert networks[0] == networks[1]
    for network in networks:
        assert network.workers == 2
        assert 0 < network.bandwidth < math.inf
        assert 0 <= network.latency < 1


def test_one_rank_is_refused(forked: dict[int, Pool]) -> None:
    failure, _ = forked[1].answers(measured)[0]
    assert "workers=1 must be a whole number of processes, at least 2" in failure
