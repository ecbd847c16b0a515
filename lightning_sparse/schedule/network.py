"""Costs of a network: two numbers of a link, and seconds of collectives over it. Pure numbers.

A message costs a startup and a time per byte (Hockney 1994), the same for every pair of ranks; collectives are rings:
Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 2005, 3.1, 3.4.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from lightning_sparse.compressors.registry import checked_name

DIRECT_BYTES = 2 << 20  # of an all-gather's result: at 1 Gbit/s and 100 us a ring is as fast from here on
_BITS_PER_SECOND = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "": 1.0}
_A_SECOND = {"us": 1e6, "ms": 1e3, "s": 1.0}


class Network(NamedTuple):
    """Links of equal speed between all workers, or between nodes of several workers each.

    >>> Network(bandwidth=1e9, latency=100e-6, workers=4).seconds("all_gather", 125_000)
    0.0032
    """

    bandwidth: float  # bits per second that a worker, or a node, can send while it receives as many
    latency: float  # seconds that a message takes one way, however short it is
    workers: int
    node_ranks: int = 1  # workers on a node, which share its link
    node_bandwidth: float = 1e11  # of each worker of a node to others there
    node_latency: float = 1e-5  # inside a node

    @property
    def intra(self) -> "Network":
        """The network between the workers of one node."""
        return Network(self.node_bandwidth, self.node_latency, min(self.node_ranks, self.workers))

    @property
    def between(self) -> "Network":
        """Inter-node network as one rank sees it when its node's link is shared."""
        return Network(self.bandwidth / self.node_ranks, self.latency, self.workers // self.node_ranks)

    def seconds(self, collective: str, nbytes: float) -> float:
        """Return how long a collective takes into which every worker hands ``nbytes``.

        With P workers, latency a and b seconds per byte:

        * ``all_reduce``: ``2 (P - 1) a + 2 (P - 1) / P n b``, reduce-scatter and all-gather around a ring;
        * ``all_gather``: ``2 a + (P - 1) n b``, sent to all at once, where at most 2 MiB arrive;
          ``2 (P - 1) a + (P - 1) n b`` above, around a ring;
        * ``all_to_all``: ``2 a + (P - 1) / P n b``: one message for each other worker, all at once.

        The last two count a round trip for each message, as gloo asks whom it sends to first; an all-reduce has asked
        before. A ring crosses the link of a node once; messages for each worker of other nodes share it.
        """
        crossing = sent_bytes(collective, nbytes, self.workers)
        if 1 < self.workers <= self.node_ranks:
            return self.intra.seconds(collective, nbytes)
        if collective == "all_to_all":
            crossing = self.node_ranks * (self.workers - self.node_ranks) / self.workers * nbytes
        is_direct = collective == "all_to_all" or (collective == "all_gather" and self.workers * nbytes <= DIRECT_BYTES)
        return (2.0 if is_direct else 2.0 * (self.workers - 1)) * self.latency + crossing * 8 / self.bandwidth

    def checked(self) -> "Network":
        """Pass through, unless a number is out of range, there are fewer than two workers, or nodes are not full."""
        if not 0 < self.bandwidth < math.inf:
            raise ValueError(f"bandwidth={self.bandwidth} must be finite bits per second above 0; 1e9 is 1 Gbit/s")
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"latency={self.latency} must be finite seconds, at least 0; 1e-4 is 100 us")
        if not isinstance(self.workers, int) or self.workers < 2:
            raise ValueError(
                f"workers={self.workers!r} must be a whole number of processes, at least 2: one has nobody to exchange"
                " gradients with"
            )
        if (
            not isinstance(self.node_ranks, int)
            or self.node_ranks < 1
            or 0 < self.workers % self.node_ranks < self.workers
        ):
            raise ValueError(
                f"node_ranks={self.node_ranks!r} (--ranks-per-node) must be a whole number of workers on each node, of"
                f" which {self.workers} workers fill some"
            )
        return self


def sent_bytes(collective: str, nbytes: float, ranks: int) -> float:
    """Return the bytes that leave each of ``ranks`` ranks in a collective into which each hands ``nbytes``.

    All bytes that are reported are counted by this: an all-to-all and an all-gather of its result send as much as DDP's
    all-reduce, though half as much again is handed in at two ranks.
    """
    if collective not in _SHARES:
        checked_name("collective", collective, tuple(_SHARES))
    return _SHARES[collective](ranks) * nbytes


def dense_bytes(elements: float, ranks: int) -> float:
    """Return the bytes that leave a rank in DDP's all-reduce of so many fp32 elements."""
    return sent_bytes("all_reduce", 4 * elements, ranks)


def parse_bandwidth(text: str, noun: str = "bandwidth") -> float:
    """Return bits per second of a text such as ``"1gbit"``, ``"1Gb/s"`` or ``"1e9"``, given for an argument ``noun``.

    >>> {parse_bandwidth(text) for text in ("1gbit", "1Gbit/s", "1Gbps", "1Gb/s", "1000Mbps", "1e9", "1000000000")}
    {1000000000.0}
    """
    # A capital B would be bytes, which nobody is to be taken for having meant.
    written = re.sub(r"([kmgKMG])(?:[bB]it|b)(?:/s|ps)?$", lambda unit: f"{unit[1].lower()}bit", text)
    number, bits = _parse(noun, written, _BITS_PER_SECOND, "1gbit")
    if number * bits < 1e3:
        raise ValueError(f"{noun}={text!r} must be 1000 bits per second or more, such as '1gbit', '25Gb/s' or '1e9'")
    return number * bits


def parse_latency(text: str, noun: str = "latency", example: str = "100us") -> float:
    """Return seconds of a text such as ``"100us"``, given for an argument ``noun``."""
    if text == "0":
        return 0.0
    number, parts = _parse(noun, text, _A_SECOND, example)
    return number / parts


def _parse(noun: str, text: str, units: Mapping[str, float], example: str) -> tuple[float, float]:
    match = re.fullmatch(rf"(\d+(?:\.\d+)?(?:e\d+)?)({'|'.join(units)})", text)
    if match is None:
        raise ValueError(
            f"{noun}={text!r} must be a number followed, without a space, by one of {', '.join(filter(None, units))},"
            f" such as {example!r}"
        )
    return float(match[1]), units[match[2]]


# How often a rank sends what it hands in.
_SHARES: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2.0 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: ranks - 1.0,
    "all_to_all": lambda ranks: (ranks - 1.0) / ranks,
}
