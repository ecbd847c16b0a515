"""Compressors: WHAT is sent. One paper, one file; ``base`` says what a compressor is."""

from lightning_sparse.compressors.base import Agreement, Compressor, element_count
from lightning_sparse.compressors.dense import Dense
from lightning_sparse.compressors.exdyna import ExDyna
from lightning_sparse.compressors.micro import MiCRO
from lightning_sparse.compressors.topk import TopK
from lightning_sparse.named import NamedTable

COMPRESSORS: NamedTable[Compressor] = NamedTable(
    "compressor", Compressor, {"dense": Dense, "exdyna": ExDyna, "micro": MiCRO, "topk": TopK}
)


def available_compressors() -> dict[str, str]:
    """Return the names that ``compressor=`` understands, and for each one line that says what it sends.

    Example::

        >>> available_compressors()["topk"]
        'Send exactly ``max(1, round(density * n))`` largest magnitudes of every parameter of ``n`` elements.'
    """
    return COMPRESSORS.descriptions()


def register_compressor(name: str, compressor: type[Compressor]) -> None:
    """Give a compressor of your own a name that ``compressor=`` understands.

    Args:
        name: new name.
        compressor: class that is built without arguments.

    Raises:
        ValueError: if the name is taken.
        TypeError: if the class is not a :class:`Compressor`.
    """
    COMPRESSORS.register(name, compressor)


__all__ = [
    "COMPRESSORS",
    "Agreement",
    "Compressor",
    "Dense",
    "ExDyna",
    "MiCRO",
    "TopK",
    "available_compressors",
    "element_count",
    "register_compressor",
]
