"""Bytes of collectives, which are rings. Pure numbers.

Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 2005, 3.1, 3.4.
"""

from collections.abc import Callable

from lightning_sparse.compressors.registry import checked_name

DIRECT_BYTES = 2 << 20  # of an all-gather's result: at 1 Gbit/s and 100 us a ring is as fast from here on


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


# How often a rank sends what it hands in.
_SHARES: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2.0 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: ranks - 1.0,
    "all_to_all": lambda ranks: (ranks - 1.0) / ranks,
}
