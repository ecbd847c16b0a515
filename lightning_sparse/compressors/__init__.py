"""Compressors select the elements to send. Each file implements one paper. ``base`` has the interface."""

import inspect

from lightning_sparse.compressors.a2sgd import A2SGD
from lightning_sparse.compressors.base import Compressor, Gather, element_count
from lightning_sparse.compressors.dense import QSGD, Dense
from lightning_sparse.compressors.dgc import DGC
from lightning_sparse.compressors.exdyna import ExDyna, MiCRO
from lightning_sparse.compressors.lags import LAGS
from lightning_sparse.compressors.omgs import OMGS
from lightning_sparse.compressors.sdagc import SDAGC
from lightning_sparse.compressors.topk import TopK

_BUILT_IN: list[type[Compressor]] = [LAGS, OMGS, A2SGD, SDAGC, ExDyna, TopK, DGC, MiCRO, QSGD, Dense]
# Strategy names are built from these names, in this order.
COMPRESSORS = {kind.__name__.lower(): kind for kind in _BUILT_IN}


def available_compressors() -> dict[str, str]:
    """Return a dictionary from each name that ``compressor=`` accepts to a one-line description of the compressor.

    Example::

        >>> available_compressors()["topk"]
        'Send the ``max(1, round(density * n))`` largest magnitudes of every parameter, which has ``n`` elements.'
    """
    return {name: (inspect.getdoc(kind) or "").partition("\n")[0] for name, kind in COMPRESSORS.items()}


__all__ = [
    "A2SGD",
    "COMPRESSORS",
    "DGC",
    "LAGS",
    "OMGS",
    "QSGD",
    "SDAGC",
    "Compressor",
    "Dense",
    "ExDyna",
    "Gather",
    "MiCRO",
    "TopK",
    "available_compressors",
    "element_count",
]
