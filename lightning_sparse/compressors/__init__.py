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

# Strategy names are built from these names, in this order.
COMPRESSORS: dict[str, type[Compressor]] = {
    "lags": LAGS,
    "omgs": OMGS,
    "a2sgd": A2SGD,
    "sdagc": SDAGC,
    "exdyna": ExDyna,
    "topk": TopK,
    "dgc": DGC,
    "micro": MiCRO,
    "qsgd": QSGD,
    "dense": Dense,
}


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
