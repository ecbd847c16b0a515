"""Integer codes go to every rank: packed to their bits, with the scale of every bucket."""

from collections.abc import Iterator, Sequence
from typing import Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.group_selection import GroupSelection, WholeSelection
from lightning_sparse.compressors.selection import Quantization, Selection, SelectionSize
from lightning_sparse.engine.wire.base import Arrival, Payload, Phases, Transfer, WireFormat, aligned, message_of
from lightning_sparse.functional import bucket_views, pack_codes, packed_nbytes, read_as, unpack_codes


class CodesFormat(WireFormat):
    """Codes and scales of a whole group in one payload.

    The tensors of a group are laid end to end::

        scales  4 bytes a bucket
        codes   ceil(log2(2 * levels + 1)) bits each, eight of them in as many bytes
        used    1 byte a tensor, only where unused parameters are tracked
        padding up to a multiple of 16 bytes

    Contributions are decoded and added rank by rank, so that no more than two tensors of the group's size are held.
    What quantization changed is not kept: it is for methods whose codes are right on average.

    The type of the wire has no effect. Codes are drawn for the very scale that they are multiplied by; rounded on its
    way, it would no longer be right on average, for the sake of 2 bytes a bucket.
    """

    collectives: tuple[str, ...] = ("all_gather",)

    @override
    def exchange(self, selection: GroupSelection, accumulated: Sequence[Tensor], used: Optional[Tensor]) -> Phases:
        quantizations = [_quantization(each, selection[0]) for each in selection]
        scales = torch.cat([quantization.scales for quantization in quantizations])
        levels = quantizations[0].levels
        codes = torch.cat([each.values for each in selection])
        # In unsigned bytes the sum wraps to what it is meant to be.
        packed = pack_codes(codes.view(torch.uint8) + levels, _bits(levels))
        sections = [scales.view(torch.uint8), packed]
        wires = yield Payload("all_gather", message_of(sections if used is None else [*sections, used]))
        return self._read(wires, selection.numels, quantizations, used is not None)

    @override
    def transfers(self, sizes: Sequence[SelectionSize]) -> list[Transfer]:
        buckets = sum(-(-size.numel // size.bucket_size) for size in sizes)
        numel = sum(size.numel for size in sizes)
        return [Transfer("all_gather", aligned(4 * buckets + packed_nbytes(numel, _bits(sizes[0].levels))))]

    def _read(
        self,
        wires: Tensor,
        numels: Sequence[int],
        quantizations: Sequence[Quantization],
        has_used: bool,
    ) -> Arrival:
        buckets = [quantization.scales.numel() for quantization in quantizations]
        _, bucket_size, levels = quantizations[0]
        lengths, counts = map(list, zip(*_stretches(numels, buckets, bucket_size)))
        sizes = [4 * sum(buckets), packed_nbytes(sum(numels), _bits(levels))]
        scale_bytes, codes, rest = wires.split([*sizes, wires.shape[1] - sum(sizes)], dim=1)
        scales = read_as(scale_bytes, torch.float32)
        units = _units(scales / self.ranks, levels)
        mean = torch.zeros(sum(numels), device=wires.device)
        decoded = torch.empty_like(mean)
        for row, unit in zip(codes, units):
            decoded.copy_(unpack_codes(row, _bits(levels), sum(numels))).sub_(levels)
            for tensor, steps in zip(decoded.split(lengths), unit.split(counts)):
                _multiply(tensor, steps, bucket_size)
            mean.add_(decoded)
        nothing = mean.new_zeros(())
        return Arrival(
            finite=scales.isfinite().all(),
            used=rest[:, : len(numels)].bool().any(dim=0) if has_used else None,
            means=WholeSelection.of(mean.split(list(numels))),
            kept=WholeSelection.of([nothing.expand(numel) for numel in numels]),
        )


def _units(scales: Tensor, levels: int) -> Tensor:
    """Return what a level is worth, rounded so that the highest is not above the scale: that may be all that fits."""
    units = scales / levels
    return torch.where(units * levels > scales, torch.nextafter(units, torch.zeros_like(units)), units)


def _stretches(numels: Sequence[int], buckets: Sequence[int], bucket_size: int) -> Iterator[tuple[int, int]]:
    """Yield elements and buckets of tensors laid end to end, as far as none but the last bucket is a short one."""
    elements = whole = 0
    for numel, count in zip(numels, buckets):
        elements, whole = elements + numel, whole + count
        if numel % bucket_size:
            yield elements, whole
            elements = whole = 0
    if elements:
        yield elements, whole


def _multiply(tensor: Tensor, steps: Tensor, bucket_size: int) -> None:
    start = 0
    for rows in bucket_views(tensor, bucket_size):
        rows.mul_(steps[start : start + len(rows)].unsqueeze(1))
        start += len(rows)


def _quantization(selection: Selection, first: Selection) -> Quantization:
    own, shared = selection.quantization, first.quantization
    if own is None or shared is None or own[1:] != shared[1:]:
        raise ValueError(
            f"a selection with quantization={own} cannot travel as wire_format='codes', whose selections all carry"
            " integer codes of one bucket size and one number of levels; set Selection.quantization, or use"
            " wire_format='gather'"
        )
    return own


def _bits(levels: int) -> int:
    return (2 * levels).bit_length()
