"""Bytes that a rank sends in ring collectives.

Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 2005,
sections 3.1 and 3.4.
"""

from collections.abc import Callable

from lightning_sparse.compressors.registry import checked_name

DIRECT_BYTES = 2 << 20  # largest tensor sent without a ring on gloo; a ring is as fast for larger tensors (1 Gbit/s)


def sent_bytes(collective: str, nbytes: float, ranks: int) -> float:
    """Return the bytes that each of ``ranks`` ranks sends in a collective with ``nbytes`` of input per rank.

    All reported bytes use this count. An all-reduce of ``nbytes`` sends as much as an all-to-all of ``nbytes`` and an
    all-gather of ``nbytes / ranks``.
    """
    if collective not in _SHARES:
        checked_name("collective", collective, tuple(_SHARES))
    return _SHARES[collective](ranks) * nbytes


def dense_bytes(elements: float, ranks: int) -> float:
    """Return the bytes that a rank sends in DDP's all-reduce of ``elements`` fp32 elements."""
    return sent_bytes("all_reduce", 4 * elements, ranks)


# Bytes that a rank sends per byte of input.
_SHARES: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2.0 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: ranks - 1.0,
    "all_to_all": lambda ranks: (ranks - 1.0) / ranks,
}
