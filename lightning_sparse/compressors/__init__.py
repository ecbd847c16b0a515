"""Compressors: WHAT is sent. One paper, one file; ``base`` says what a compressor is."""

from lightning_sparse.compressors.a2sgd import A2SGD
from lightning_sparse.compressors.base import Compressor, Gather, element_count
from lightning_sparse.compressors.dense import Dense
from lightning_sparse.compressors.dgc import DGC
from lightning_sparse.compressors.exdyna import ExDyna
from lightning_sparse.compressors.lags import LAGS
from lightning_sparse.compressors.micro import MiCRO
from lightning_sparse.compressors.omgs import OMGS
from lightning_sparse.compressors.qsgd import QSGD
from lightning_sparse.compressors.sdagc import SDAGC
from lightning_sparse.compressors.topk import TopK
from lightning_sparse.registry import NamedTable

# The rows of this table are all that strategy names and the command ``plan`` know of compressors, in this order.
COMPRESSORS: NamedTable[Compressor] = NamedTable(
    "compressor",
    Compressor,
    {
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
    },
    group="lightning_sparse.compressors",
)


def available_compressors() -> dict[str, str]:
    """Return the names that ``compressor=`` understands, and for each one line that says what it sends.

    Of one that another installed package brings, the line says which package.

    Example::

        >>> available_compressors()["topk"]
        'Send exactly ``max(1, round(density * n))`` largest magnitudes of every parameter of ``n`` elements.'
    """
    return COMPRESSORS.descriptions()


def register_compressor(name: str, compressor: type[Compressor]) -> None:
    """Give a compressor of your own a name that ``compressor=`` understands, and its strategies theirs.

    ``register_compressor("mine", Mine)`` makes ``Trainer(strategy="sparse_mine")`` work, too, and the same with
    ``_spawn`` and the other suffixes. A package that is installed need not be imported for that, if it names its class
    in the group ``lightning_sparse.compressors`` of its entry points.

    Args:
        name: new name.
        compressor: class that is built without arguments.

    Raises:
        ValueError: if the name, or one of its strategies, is taken.
        TypeError: if the class is not a :class:`Compressor`.
    """
    COMPRESSORS.register(name, compressor)


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
    "register_compressor",
]
