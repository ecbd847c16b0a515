"""Wire: how a selection is WRITTEN. Payloads, dtypes and exact bytes; no collective is called here."""

import torch

from lightning_sparse.named import unknown_name
from lightning_sparse.wire.base import Arrival, Payload, Phases, Transfer, WireFormat
from lightning_sparse.wire.codes import CodesFormat
from lightning_sparse.wire.gather import GatherFormat
from lightning_sparse.wire.local import LocalFormat
from lightning_sparse.wire.reduce import ReduceFormat
from lightning_sparse.wire.union import UnionFormat

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


__all__ = ["WIRE_DTYPES", "WIRE_FORMATS", "Arrival", "Payload", "Phases", "Transfer", "WireFormat", "wire_dtype"]
