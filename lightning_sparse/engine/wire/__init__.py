"""Wire formats, which encode selections as messages for collectives. Other code runs the collectives."""

import math
from typing import NamedTuple, Optional

import torch

from lightning_sparse.compressors.registry import checked_name
from lightning_sparse.compressors.selection import SelectionSize
from lightning_sparse.engine.wire.base import GatherFormat, LocalFormat, WireFormat
from lightning_sparse.engine.wire.owners import MIN_OWNER_NUMEL, OwnersFormat
from lightning_sparse.engine.wire.reduce import ReduceFormat, UnionFormat

WIRE_FORMATS: dict[str, type[WireFormat]] = {
    "gather": GatherFormat,
    "local": LocalFormat,
    "reduce": ReduceFormat,
    "union": UnionFormat,
}
EXCHANGES = ("auto", "gather", "owners")  # collectives that can exchange selections with indices
_WORTH = 2.0  # minimum factor by which owners or dense gradients must reduce the bytes to replace an all-gather


class WireValues(NamedTuple):
    """Dtype of sent values. With ``bits``, the formats ``gather`` and ``reduce`` send this number of bits per value."""

    dtype: torch.dtype
    bits: Optional[int] = None


WIRES = {
    "float32": WireValues(torch.float32),
    "bfloat16": WireValues(torch.bfloat16),
    "float16": WireValues(torch.float16),
    "4bit": WireValues(torch.bfloat16, 4),
    "2bit": WireValues(torch.bfloat16, 2),
}


def wire_values(wire: str) -> WireValues:
    """Return dtype and bits for a ``wire=`` argument, or raise ``ValueError`` for an unknown name."""
    return WIRES[checked_name("wire", wire, tuple(WIRES))]


class Wires(NamedTuple):
    """Wire formats of a bucket. A tensor's format depends only on its sizes and the world size, so ranks agree."""

    sparse: WireFormat  # format of selections with indices
    dense: WireFormat  # format of all elements without indices; may be the same object as ``sparse``
    unquantized: WireFormat  # format of dense gradients in Adam's first steps
    owners: Optional[OwnersFormat] = None  # alternative format of selections with indices
    chooses: bool = False  # whether ``owners`` or ``dense`` replaces ``sparse`` only if the bytes are halved

    @property
    def formats(self) -> tuple[WireFormat, ...]:
        """The distinct wire formats: first the formats of sparse selections, then the formats of dense selections."""
        wires = (self.sparse, self.owners, self.unquantized, self.dense)
        return tuple(dict.fromkeys(wire for wire in wires if wire is not None))

    def format_for(self, numel: int, count: int) -> WireFormat:
        """Return the format for ``count`` selected of ``numel`` elements. With ``chooses`` the format may be dense."""
        if self.owners is None or numel < self.owners.world_size:  # some rank would own no element
            return self.sparse
        gathered, owned = (self._received(wire, SelectionSize(numel, count)) for wire in (self.sparse, self.owners))
        if not self.chooses:
            has_enough = count >= MIN_OWNER_NUMEL * self.owners.world_size
            return self.owners if has_enough or owned <= gathered else self.sparse
        whole = math.inf
        if self.dense is not self.sparse:
            whole = self._received(self.dense, SelectionSize(numel, numel, is_dense=True))
        if _WORTH * min(whole, owned) > gathered:
            return self.sparse
        return self.dense if whole <= owned else self.owners

    def _received(self, wire: WireFormat, size: SelectionSize) -> float:
        """Return the bytes that a rank receives from each other rank in a message with only this tensor."""
        shares = {"all_gather": 1.0, "all_to_all": 1 / wire.world_size}
        return sum(shares[transfer.collective] * transfer.nbytes for transfer in wire.transfers([size]))


def build_wires(
    name: str,
    dense_name: Optional[str],
    dtype: torch.dtype,
    rank: int,
    world_size: int,
    exchange: str = "gather",
    bits: Optional[int] = None,
) -> Wires:
    """Build the wire formats of a bucket.

    Args:
        name: name of the format of sparse selections.
        dense_name: name of the format of dense selections; ``None`` to use ``name``.
        dtype: dtype of the values.
        rank: this rank within the process group.
        world_size: size of the process group.
        exchange: name in ``EXCHANGES``. With ``"auto"``, the bytes of each tensor decide. For ``name="gather"``.
        bits: bits per quantized value; ``None`` for no quantization.
    """
    wire = WIRE_FORMATS[checked_name("wire_format", name, tuple(WIRE_FORMATS))](dtype, rank, world_size, bits)
    whole = wire if dense_name is None else WIRE_FORMATS[dense_name](dtype, rank, world_size, bits)
    unquantized = whole if bits is None or dense_name is None else WIRE_FORMATS[dense_name](dtype, rank, world_size)
    if exchange == "gather" or not isinstance(wire, GatherFormat):
        return Wires(wire, whole, unquantized)
    return Wires(wire, whole, unquantized, OwnersFormat(dtype, rank, world_size), chooses=exchange == "auto")
