"""Wire: how a selection is WRITTEN. Payloads, dtypes and exact bytes; no collective is called here."""

from typing import Optional

import torch

from lightning_sparse.engine.wire.base import Arrival, Payload, Phases, Transfer, WireFormat
from lightning_sparse.engine.wire.codes import CodesFormat
from lightning_sparse.engine.wire.gather import GatherFormat
from lightning_sparse.engine.wire.local import LocalFormat
from lightning_sparse.engine.wire.reduce import ReduceFormat
from lightning_sparse.engine.wire.routed import RoutedFormat
from lightning_sparse.engine.wire.union import UnionFormat
from lightning_sparse.registry import unknown_name

WIRE_FORMATS: dict[str, type[WireFormat]] = {
    "codes": CodesFormat,
    "gather": GatherFormat,
    "local": LocalFormat,
    "reduce": ReduceFormat,
    "union": UnionFormat,
}
WIRE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def wire_dtype(wire: str) -> torch.dtype:
    """Return the type that a ``wire`` argument names.

    Raises:
        ValueError: if the name is unknown.
    """
    if wire not in WIRE_DTYPES:
        raise ValueError(unknown_name("wire", str(wire), WIRE_DTYPES))
    return WIRE_DTYPES[wire]


def build_wire(name: str, dense_name: Optional[str], dtype: torch.dtype, rank: int, ranks: int) -> WireFormat:
    """Build the format of a name.

    Args:
        name: how selections travel.
        dense_name: how a selection without indices travels; ``None`` for the same way.
        dtype: type of the values that travel.
        rank: this rank within its process group.
        ranks: size of the process group.
    """
    wire = WIRE_FORMATS[name](dtype, rank, ranks)
    return wire if dense_name is None else RoutedFormat(wire, WIRE_FORMATS[dense_name](dtype, rank, ranks))


__all__ = [
    "WIRE_DTYPES",
    "WIRE_FORMATS",
    "Arrival",
    "Payload",
    "Phases",
    "RoutedFormat",
    "Transfer",
    "WireFormat",
    "build_wire",
    "wire_dtype",
]
