"""The network as it is, measured with real collectives inside a job."""

import time
from collections.abc import Sequence

import torch

from lightning_sparse.engine.collectives import Collectives
from lightning_sparse.schedule.cost.model import CostModel, fit
from lightning_sparse.schedule.cost.network import DIRECT_BYTES, Network

_LARGEST_SHORT = 1 << 16  # bytes that each rank hands in
_LONG = (1 << 12, 1 << 18, 1 << 20, 1 << 21)
_REPEATS = 7  # the fastest counts: whatever else the machine or the network does only adds
_WARM_UP = 2  # connections are made when they are first used


def measure_network(collectives: Collectives) -> Network:
    """Measure bandwidth and latency between all ranks; all of them must call. It takes about a second at 1 Gbit/s.

    The latency is that of a small all-gather, the collective of sparse messages; the bandwidth is that of a
    large all-reduce, the collective of DDP. All ranks return the same.

    Raises:
        ValueError: if there is one rank only.
        RuntimeError: if the times do not grow with the size, on a machine that is too busy.
    """
    network = Network(1.0, 0.0, collectives.ranks).checked()
    # As long as everything goes to all ranks at once: longer ones go another way.
    largest = min(_LARGEST_SHORT, DIRECT_BYTES // collectives.ranks)
    startup = _cost(collectives, "all_gather", [largest >> halvings for halvings in (8, 4, 2, 0)]).startup
    per_byte = _cost(collectives, "all_reduce", _LONG).per_unit
    if not per_byte:
        raise RuntimeError(
            "the time of an all-reduce did not grow with its size, so that no bandwidth could be told: the machine or"
            " the network is busy. Try again, or give --bandwidth and --latency"
        )
    latency = startup / network._replace(latency=1.0).seconds("all_gather", 0)
    # The network here has one bit per second: it takes this many times as long.
    return network._replace(latency=latency, bandwidth=network.seconds("all_reduce", 1) / per_byte)


def _cost(collectives: Collectives, name: str, sizes: Sequence[int]) -> CostModel:
    seconds = torch.tensor([_seconds(collectives, name, nbytes) for nbytes in sizes], dtype=torch.float64)
    # Every rank has its own times, and all are to conclude the same.
    of_all = collectives.run("all_gather", seconds.to(collectives.device)).view(-1, len(sizes)).mean(dim=0)
    return fit(list(zip(map(float, sizes), of_all.tolist())), ("line",))


def _seconds(collectives: Collectives, name: str, nbytes: int) -> float:
    tensor = torch.zeros(nbytes // 4, device=collectives.device)
    seconds = []
    for _ in range(_WARM_UP + _REPEATS):
        # All ranks start together: who comes early would count its waiting.
        collectives.run("all_reduce", torch.zeros(1, device=collectives.device)).sum().item()
        begin = time.perf_counter()
        collectives.run(name, tensor).flatten()[0].item()  # an answer from the device, so that it has to be over
        seconds.append(time.perf_counter() - begin)
    return min(seconds[_WARM_UP:])
