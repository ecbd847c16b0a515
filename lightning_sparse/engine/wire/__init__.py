"""Wire: how a selection is WRITTEN. Payloads, dtypes and exact bytes; no collective is called here."""

from collections.abc import Sequence
from typing import NamedTuple, Optional

import torch

from lightning_sparse.compressors.group_selection import GroupSelection
from lightning_sparse.compressors.selection import SelectionSize
from lightning_sparse.engine.wire.base import Arrival, Payload, Phases, Transfer, WireFormat
from lightning_sparse.engine.wire.codes import CodesFormat
from lightning_sparse.engine.wire.gather import GatherFormat
from lightning_sparse.engine.wire.local import LocalFormat
from lightning_sparse.engine.wire.reduce import ReduceFormat
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


class Wires(NamedTuple):
    """The two ways of a group: tensors that are sent whole may travel by another format than some of their elements.

    A gather hands every rank's part to every rank, ``ranks - 1`` times the volume of a tensor, and its indices; a
    reduction of the whole tensor takes ``2 (ranks - 1) / ranks``. Which way a tensor goes depends on itself alone, so
    that it does not matter which others it travels with.

    Attributes:
        elements: for selections with indices.
        whole: for selections without indices, which stand for every element; the same object where there is one way.
    """

    elements: WireFormat
    whole: WireFormat

    @property
    def collectives(self) -> tuple[str, ...]:
        """Names of the collectives that they ask for."""
        return tuple(dict.fromkeys((*self.elements.collectives, *self.whole.collectives)))

    def wire_for(self, selection: GroupSelection) -> WireFormat:
        """Return the format by which what is selected of a group travels."""
        return self.whole if selection.is_whole else self.elements

    def end_step(self) -> None:
        """End a step."""
        for wire in dict.fromkeys(self):
            wire.end_step()

    def transfers(self, sizes: Sequence[SelectionSize]) -> list[Transfer]:
        """Return what is handed to collectives for a group, see :meth:`WireFormat.transfers`."""
        if self.elements is self.whole:
            return self.elements.transfers(sizes)
        elements = [size for size in sizes if not size.is_whole]
        whole = [size for size in sizes if size.is_whole]
        ways = ((elements, self.elements), (whole, self.whole))
        return [transfer for part, wire in ways if part for transfer in wire.transfers(part)]


def build_wires(name: str, dense_name: Optional[str], dtype: torch.dtype, rank: int, ranks: int) -> Wires:
    """Build the formats of a group.

    Args:
        name: how selections travel.
        dense_name: how a selection without indices travels; ``None`` for the same way.
        dtype: type of the values that travel.
        rank: this rank within its process group.
        ranks: size of the process group.
    """
    wire = WIRE_FORMATS[name](dtype, rank, ranks)
    return Wires(wire, wire if dense_name is None else WIRE_FORMATS[dense_name](dtype, rank, ranks))


__all__ = [
    "WIRE_DTYPES",
    "WIRE_FORMATS",
    "Arrival",
    "Payload",
    "Phases",
    "Transfer",
    "WireFormat",
    "Wires",
    "build_wires",
    "wire_dtype",
]
