"""Compressors: WHAT is sent. One paper, one file; ``base`` says what a compressor is."""

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

# All that strategy names and the command ``plan`` know of compressors, in this order.
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
STRATEGIES_WITH_SETTINGS = ("auto", "diloco", "loco")  # sparse_<name> is more than a compressor


def available_compressors() -> dict[str, str]:
    """Return the names that ``compressor=`` understands, and for each one line that says what it sends.

    Example::

        >>> available_compressors()["topk"]
        'Send exactly ``max(1, round(density * n))`` largest magnitudes of every parameter of ``n`` elements.'
    """
    return {name: (inspect.getdoc(kind) or "").partition("\n")[0] for name, kind in COMPRESSORS.items()}


def register_compressor(name: str, compressor: type[Compressor]) -> None:
    """Give a compressor of your own a name that ``compressor=`` understands, and its strategies theirs.

    Args:
        name: new name; ``"mine"`` makes ``Trainer(strategy="sparse_mine")`` work, too, also with suffixes.
        compressor: class that is built without arguments.

    Raises:
        ValueError: if the name, or its strategy's, is taken.
        TypeError: if the class is not a :class:`Compressor`.
    """
    if not (isinstance(compressor, type) and issubclass(compressor, Compressor)):
        raise TypeError(f"compressor {name!r} must be a subclass of Compressor, got {compressor!r}")
    if name in COMPRESSORS or name in STRATEGIES_WITH_SETTINGS:
        taken = f"compressor {name!r} is {COMPRESSORS[name]!r}" if name in COMPRESSORS else f"sparse_{name} is ours"
        raise ValueError(f"{taken}: choose another name. Taken: {', '.join(COMPRESSORS)}")
    COMPRESSORS[name] = compressor


__all__ = [
    "A2SGD",
    "COMPRESSORS",
    "DGC",
    "LAGS",
    "OMGS",
    "QSGD",
    "SDAGC",
    "STRATEGIES_WITH_SETTINGS",
    "Compressor",
    "Dense",
    "ExDyna",
    "Gather",
    "MiCRO",
    "TopK",
    "available_compressors",
    "element_count",
    "register_compressor",
]
