"""Operations on elements of flat tensors: copy, round, add, and write indices in few bytes.

An index is written as an offset in a block. Each block also has a count, the number of indices in the block. With
blocks of 65 536 elements, an offset takes 2 bytes and a count 4. Above a density of about 0.8 %, blocks of 256 elements
take less: 1 byte per offset and 2 per count. Below 0.003 %, an index takes 4 bytes, because most blocks would be empty.
Sizes follow from ``numel`` and ``count``, so ranks need not exchange sizes. One call processes tensors that are
adjacent in memory, because kernel launches cost more than the elements of small tensors.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, repeat
from threading import local
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

Counts = tuple[int, ...]  # number of elements of each tensor

_FEW_ROWS = 16  # rows; up to 16 rows, one index_add_ per row is faster than one index_put_, which sorts
_CPU_BATCH = 1 << 16  # elements; pieces of four tensors take 1 MiB, a core's share of the cache
_DEVICE_BATCH = 1 << 26  # elements; temporaries take 256 MiB
_ALIGNMENT = 16  # bytes; NCCL is far slower if addresses are not multiples of 16


def read_as(wires: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy bytes, uint8 ``[world_size, nbytes]``, and view the copy as another dtype. The copy's address is aligned."""
    if not wires.numel():
        return wires.new_empty(*wires.shape, dtype=dtype)  # torch cannot view an empty tensor as a wider dtype
    return wires.clone(memory_format=torch.contiguous_format).view(dtype)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, or a plain tensor detached. The result shares the memory of ``tensor``."""
    if not hasattr(tensor, "to_local"):
        return tensor.detach()
    with torch.no_grad():
        local: Tensor = tensor.to_local()
    return local


def local_tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return the :func:`local_tensor` of each parameter of a model, by name."""
    return {name: local_tensor(parameter) for name, parameter in module.named_parameters()}


def as_dtensor(held: Tensor, like: Any) -> Tensor:
    """Return ``held`` as the local shard of a new DTensor like ``like``. If ``like`` is no DTensor, return ``held``."""
    if not hasattr(like, "to_local"):
        return held
    form = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    whole: Tensor = type(like).from_local(held.to(like.device), like.device_mesh, like.placements, **form)
    return whole


def flatten_as(tensor: Tensor, like: Optional[Tensor] = None) -> Tensor:
    """Flatten a tensor in the memory order of ``like``. Default: the tensor's own memory order, as in DDP."""
    if like is not None and not has_layout_of(tensor, like):
        tensor = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def has_layout_of(tensor: Tensor, like: Tensor) -> bool:
    """Return whether two tensors of one shape have the same memory layout. Strides along a size of 1 do not count.

    For a 1x1 convolution, these strides differ between the parameter and a channels_last gradient.
    """
    own, others = tensor.stride(), like.stride()
    return own == others or all(one == other for size, one, other in zip(tensor.shape, own, others) if size > 1)


def laid_as(tensor: Tensor, like: Tensor) -> Tensor:
    """If layouts agree, return a view with the strides of ``like``. Unequal strides disable fused ``_foreach`` code."""
    is_same = tensor.stride() == like.stride() or not has_layout_of(tensor, like)
    return tensor if is_same else tensor.as_strided(tensor.shape, like.stride())


def copy_elements(source: Tensor, out: Tensor) -> Tensor:
    """Copy a tensor of any shape into the flat tensor ``out``, in order. Surplus elements of ``source`` are padding."""
    if source.numel() == out.numel():
        out.view(source.shape).copy_(source)
        return out
    return out.copy_(source.reshape(-1)[: out.numel()])


def shard_numel(numel: int, world_size: int, multiple: int = 1) -> int:
    """Return the size of each rank's shard of ``numel`` elements, rounded up to a multiple of ``multiple``."""
    return -(-numel // (world_size * multiple)) * multiple


def cut_into(rows: Tensor, tensors: Sequence[Tensor], multiple: int = 1) -> Tensor:
    """Divide each flat tensor into one shard per rank, and write each rank's shards into one row of ``rows``, in place.

    The end of each tensor and the last columns are padded with zeros.

        >>> cut_into(torch.empty(2, 4), [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0])])
        tensor([[1., 2., 4., 0.],
                [3., 0., 0., 0.]])
    """
    world_size, parts = len(rows), list[Tensor]()
    for tensor in tensors:
        padding = world_size * shard_numel(tensor.numel(), world_size, multiple) - tensor.numel()
        parts.append((torch.nn.functional.pad(tensor, (0, padding)) if padding else tensor).view(world_size, -1))
    parts.append(rows.new_zeros(world_size, rows.shape[1] - sum(part.shape[1] for part in parts)))
    return torch.cat(parts, dim=1, out=rows)


def mean_of_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mean of rows in ``dtype``, added in order. If ``rows`` has this dtype, ``rows`` is overwritten."""
    # Each row is divided before the addition, so that a sum of large values stays finite.
    if rows.dtype is dtype:  # a single division for all rows is faster with many ranks
        mean, *rest = rows.div_(len(rows)).unbind()
        for row in rest:
            mean += row
        return mean
    mean = rows[0].to(dtype).div_(len(rows))
    for row in rows[1:]:
        mean += row.to(dtype).div_(len(rows))
    return mean


def add_rows(values: Tensor, indices: Tensor, out: Tensor) -> Tensor:
    """Add sparse values of several ranks to the flat tensor ``out``, in place, one rank after another.

    ``indices`` (int64) and ``values`` have shape ``[world_size, count]``. The indices of a row are distinct.

        >>> add_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0, 2], [1, 2]]), torch.zeros(3))
        tensor([1., 3., 6.])
    """
    if out.device.type == "cpu":
        return out.index_add_(0, indices.flatten(), values.flatten())
    if len(indices) > _FEW_ROWS:
        # index_put_ sorts by index, so all ranks add in the same order. index_add_ of all rows has no fixed order.
        return out.index_put_((indices.flatten(),), values.flatten(), accumulate=True)
    for row, row_values in zip(indices, values):
        out.index_add_(0, row, row_values)
    return out


def round_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to a floating-point dtype. A finite value out of range becomes the largest finite value.

    The caller adds the difference to the residual, so that the part beyond the range of float16 is sent later.
    Infinities and NaN do not change, so that a gradient scaler detects a non-finite gradient.

        >>> round_to(torch.tensor([1.0001, -1e6, float("inf")]), torch.float16)
        tensor([ 1.0000e+00, -6.5504e+04,         inf], dtype=torch.float16)
    """
    if values.dtype == dtype:
        return values
    limit = torch.finfo(dtype).max
    values = values.to(torch.promote_types(values.dtype, dtype))  # the promoted dtype represents the limit exactly
    return torch.where(values.isinf(), values, values.clamp(-limit, limit)).to(dtype)


def all_finite(values: Tensor) -> Tensor:
    """Return whether all elements are finite, bool ``[]``, in one pass."""
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    least, most = torch.aminmax(values)
    return torch.maximum(most, -least) < torch.inf


def aligned(nbytes: int) -> int:
    """Round the size of a message up to a multiple of 16 bytes, so that the next message in memory is aligned."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def message_of(sections: Sequence[Tensor]) -> Tensor:
    """Concatenate the sections of a message, uint8 ``[..., nbytes]``, and pad the message to an aligned size."""
    nbytes = sum(section.shape[-1] for section in sections)
    padding = sections[0].new_zeros(*sections[0].shape[:-1], aligned(nbytes) - nbytes)
    return torch.cat([*sections, padding], dim=-1)


class IndexCodec(NamedTuple):
    """Encoding of ``room`` ascending indices, each below ``numel``, in blocks of ``2 ** block_bits`` elements."""

    block_bits: int
    offset_dtype: torch.dtype
    count_dtype: torch.dtype
    numel: int
    room: int

    @property
    def nbytes(self) -> int:
        """The number of bytes of the encoded indices."""
        return self.room * self.offset_dtype.itemsize + self._blocks * self.count_dtype.itemsize

    def encode(self, indices: Tensor) -> Tensor:
        """Encode indices, int64 ``[..., room]``, as uint8 ``[..., nbytes]``."""
        starts = torch.arange(self._blocks + 1, device=indices.device) << self.block_bits
        edges = starts.expand(*indices.shape[:-1], -1).contiguous()
        counts = torch.searchsorted(indices, edges).diff().to(self.count_dtype)
        offsets = ((indices & self._mask) + torch.iinfo(self.offset_dtype).min).to(self.offset_dtype)
        return torch.cat([offsets.view(torch.uint8), counts.view(torch.uint8)], dim=-1)

    def decode(self, wires: Tensor) -> Tensor:
        """Decode the indices of all ranks, uint8 ``[world_size, nbytes or more]``, to int64 ``[world_size, room]``."""
        world_size, count = len(wires), self.room
        offset_bytes = count * self.offset_dtype.itemsize
        offsets = read_as(wires[:, :offset_bytes], self.offset_dtype)
        counts = read_as(wires[:, offset_bytes : self.nbytes], self.count_dtype).long()
        starts = torch.arange(self._blocks, device=wires.device) << self.block_bits
        starts -= torch.iinfo(self.offset_dtype).min
        # output_size avoids a synchronization with the GPU.
        total = world_size * count
        block_starts = torch.repeat_interleave(starts.repeat(world_size), counts.flatten(), output_size=total)
        return block_starts.view(world_size, count).add_(offsets)

    @property
    def _mask(self) -> int:
        return (1 << self.block_bits) - 1

    @property
    def _blocks(self) -> int:
        return (self.numel + self._mask) >> self.block_bits if self.room else 0


_FORMS = ((16, torch.int16, torch.int32), (8, torch.uint8, torch.int16), (32, torch.int32, torch.int32))


def index_codec(numel: int, count: int) -> IndexCodec:
    """Return the codec that encodes ``count`` indices below ``numel`` in the fewest bytes."""
    return min((IndexCodec(*form, numel, count) for form in _FORMS), key=lambda codec: codec.nbytes)


def runs(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int, Tensor]]:
    """Find runs of tensors that are adjacent in memory. The tensors are flat, contiguous, nonempty, of one dtype.

    Yields for each run the index of the first tensor, the index after the last tensor, and a flat view of the run.
    """
    first = 0
    while first < len(tensors):
        head = tensors[first]
        storage = head.untyped_storage()
        start, stop = head.data_ptr(), first + 1
        end, limit = start + head.nbytes, storage.data_ptr() + storage.nbytes()
        # The memory after a storage may by chance belong to the next tensor's storage. A run ends with the storage.
        while stop < len(tensors) and tensors[stop].data_ptr() == end and end < limit:
            end += tensors[stop].nbytes
            stop += 1
        yield first, stop, head if stop == first + 1 else head.as_strided(((end - start) // head.itemsize,), (1,))
        first = stop


def in_batches(tensors: Sequence[Tensor], *others: Sequence[Any]) -> Iterator[tuple[list[Any], ...]]:
    """Yield batches of pieces of flat tensors, for ``torch._foreach`` calls with small temporaries.

    Args:
        tensors: flat tensors.
        others: lists with one entry per tensor. A tensor is cut like ``tensors``. Other objects repeat for each piece.
    """
    limit = _CPU_BATCH if tensors and tensors[0].device.type == "cpu" else _DEVICE_BATCH
    batch, numel = list[tuple[Any, ...]](), 0
    for row in zip(tensors, *others):
        for pieces in zip(*(each.split(limit) if isinstance(each, Tensor) else repeat(each) for each in row)):
            if batch and numel + pieces[0].numel() > limit:
                yield tuple(map(list, zip(*batch)))
                batch, numel = [], 0
            batch.append(pieces)
            numel += pieces[0].numel()
    if batch:
        yield tuple(map(list, zip(*batch)))


class _Known(local):
    """A per-thread cache of numbers copied to a device. Only the CUDA stream that made a copy may read the copy."""

    def __init__(self) -> None:
        self.copied_to = lru_cache(maxsize=512)(
            lambda numbers, device: torch.tensor(numbers).to(device, non_blocking=True)
        )


_known = _Known()


def copied_to(numbers: Counts, device: torch.device) -> Tensor:
    """Return numbers as int64 ``[count]`` on a device. The latest copies are cached to avoid synchronizations."""
    known: Tensor = _known.copied_to(numbers, device)
    return known


@lru_cache(maxsize=512)
def starts_of(numels: Counts) -> Counts:
    """Return the offset of each tensor in a concatenation of tensors, followed by the total number of elements."""
    return tuple(accumulate(numels, initial=0))


def counts_of(indices: Tensor, numels: Counts) -> Counts:
    """Count the sorted indices that lie in each tensor of a concatenation. Synchronizes with a GPU."""
    places: list[int] = torch.searchsorted(indices, copied_to(starts_of(numels), indices.device)).tolist()
    return tuple(last - first for first, last in pairwise(places))


def repeat_interleave(numbers: Counts, counts: Counts, device: torch.device) -> Tensor:
    """Repeat ``numbers[i]`` ``counts[i]`` times, as int64 ``[sum(counts)]``."""
    # output_size avoids a synchronization with the GPU.
    return copied_to(numbers, device).repeat_interleave(copied_to(counts, device), output_size=sum(counts))
