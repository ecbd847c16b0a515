"""Reduce-scatter: each element has an owner rank, which adds up all ranks' selections and selects the largest sums."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.selection import FlatSelection, SelectionSize
from lightning_sparse.compressors.topk import largest_of_each
from lightning_sparse.engine.wire.base import Payload, Transfer, used_anywhere
from lightning_sparse.engine.wire.reduce import Positions, PositionsFormat
from lightning_sparse.functional.elements import (
    add_rows,
    aligned,
    copied_to,
    index_codec,
    message_of,
    read_as,
    repeat_interleave,
    round_to,
    starts_of,
)

MIN_OWNER_NUMEL = 32  # minimum selected elements per owner; with fewer elements, padding costs too many bytes
_KEEP = 4.0  # elements that a step averages / elements that a rank selects; fewer elements raise the loss
_SIGMAS = 4.0  # extra space in a message to an owner, in standard deviations of the number of proposed elements
_MULTIPLIER, _MASK, _SHIFT = 0x9E3779B1, 0x7FFFFFFF, 16  # constants of a multiplicative hash; products fit in int64
_PROPOSED = torch.bfloat16  # dtype of values sent to owners; 16 bits are enough to find the largest sums


class OwnersFormat(PositionsFormat):
    """Average over ranks the elements with the largest sums of all selections, with four collectives.

    1. Each rank proposes elements: it sends selected elements to the owners (all-to-all), as 16-bit values and block
       numbers. A block has one element per owner. A message has space for slightly more proposals than the average.
    2. Each owner adds up the proposals rank by rank, and sends the block numbers of the largest sums (all-gather).
    3. All ranks average their values of these elements, proposed or not (all-to-all and all-gather).

    Owners come from Ok-Topk (Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022,
    arXiv 2201.07598). Differences: The map of owners is fixed. An owner selects an exact number of elements per tensor.
    The sizes of messages follow from the number of selected elements. All ranks send their values of all elements that
    owners selected. If only the proposing ranks sent values, residuals would grow with the number of ranks.
    """

    @override
    def agree(self, selected: FlatSelection, used: Optional[Tensor]) -> Positions:
        shares = _shares_of(selected.numels, selected.counts, self.world_size)
        proposals = yield Payload("all_to_all", _proposals(selected, shares))
        places = _largest(_sums(proposals, shares), shares, self.rank)

        codec = index_codec(shares.extent, shares.final)
        section = codec.encode(places)
        wires = yield Payload("all_gather", message_of([section] if used is None else [section, used]))
        indices = _positions(codec.decode(wires), shares).flatten().sort().values
        counts = tuple(self.world_size * final for final in shares.finals)
        return indices, counts, used_anywhere(used, wires[:, len(section) :])

    @override
    def transfers(self, sizes: Sequence[SelectionSize], flags: int = 0) -> list[Transfer]:
        numels, counts = tuple(size.numel for size in sizes), tuple(size.selected for size in sizes)
        shares = _shares_of(numels, counts, self.world_size)
        message = shares.room * _PROPOSED.itemsize + index_codec(shares.universe, shares.room).nbytes
        averaged = [self.world_size * final for final in shares.finals]
        # PositionsFormat averages unrounded values in one piece. The gradients are assumed to be fp32.
        pieces = [sum(averaged)] if self.dtype is torch.float32 else averaged
        return [
            Transfer("all_to_all", self.world_size * aligned(message)),
            Transfer("all_gather", aligned(index_codec(shares.extent, shares.final).nbytes + flags)),
            *self._values.transfers([SelectionSize(count, count) for count in pieces]),
        ]


class _Shares(NamedTuple):
    """Division of a bucket's elements among owner ranks, and the sizes of messages.

    A block has ``world_size`` consecutive elements of a tensor, one per owner. The place of an element is the number of
    its block in the bucket. Owner and place together identify an element.
    """

    world_size: int
    numels: tuple[int, ...]
    counts: tuple[int, ...]
    blocks: tuple[int, ...]
    rooms: tuple[int, ...]  # number of elements of each tensor that fit in a message to an owner
    finals: tuple[int, ...]  # elements that an owner selects, for each tensor
    extent: int  # number of blocks in the bucket
    room: int  # number of elements in a message to an owner
    universe: int  # ``extent + room``; indices of at least ``extent`` mark empty slots of a message
    final: int  # number of elements that an owner selects

    def owned_blocks(self, rank: int) -> list[int]:
        """Return the number of elements of each tensor that a rank owns. The last block may lack the rank's element."""
        owned = []
        for numel in self.numels:
            block, rest = divmod(numel, self.world_size)
            owned.append(block + ((rank - ((block & _MASK) * _MULTIPLIER >> _SHIFT)) % self.world_size < rest))
        return owned


@lru_cache(maxsize=512)
def _shares_of(numels: tuple[int, ...], counts: tuple[int, ...], world_size: int) -> _Shares:
    """Divide a bucket's tensors among owners. The division of a tensor does not depend on other tensors."""
    blocks = tuple(-(-numel // world_size) for numel in numels)
    rooms, finals = [], []
    for numel, count in zip(numels, counts):
        average = count / world_size
        rooms.append(min(-(-numel // world_size), math.ceil(average + _SIGMAS * math.sqrt(average))))
        # Two limits apply: the average number of proposals to an owner, and the number of elements that an owner has.
        finals.append(max(1, min(numel // world_size, math.ceil(min(_KEEP, world_size) * average))))
    extent, room = sum(blocks), sum(rooms)
    by_tensor = (numels, counts, blocks, tuple(rooms), tuple(finals))
    return _Shares(world_size, *by_tensor, extent, room, extent + room, sum(finals))


def _proposals(selected: FlatSelection, shares: _Shares) -> Tensor:
    """Return a message of proposals for each owner, ascending by place, as uint8 ``[world_size, nbytes]``."""
    index = selected.indices - repeat_interleave(starts_of(shares.numels)[:-1], shares.counts, selected.indices.device)
    block = index // shares.world_size
    owner = index.add_(_skew(block)).remainder_(shares.world_size)
    place = block.add_(repeat_interleave(starts_of(shares.blocks)[:-1], shares.counts, index.device))
    fits = _fitting(selected, owner, shares)

    world_size, room = shares.world_size, shares.room
    owner, order = owner.where(fits, world_size).sort(stable=True)
    first = torch.searchsorted(owner, torch.arange(world_size + 1, device=owner.device))
    number = torch.arange(len(owner), device=owner.device).sub_(first[owner])
    none = world_size * room  # slot of all elements that do not fit; dropped below
    slot = number.add_(owner, alpha=room).clamp_(max=none)
    sent = round_to(selected.values, _PROPOSED)
    values = sent.new_zeros(none + 1).index_copy_(0, slot, sent[order])[:-1].view(world_size, room)
    places = torch.arange(shares.extent, shares.universe, device=owner.device).repeat(world_size + 1)[: none + 1]
    places = places.index_copy_(0, slot, place[order])[:-1].view(world_size, room)
    return message_of([values.view(torch.uint8), index_codec(shares.universe, room).encode(places)])


def _fitting(selected: FlatSelection, owner: Tensor, shares: _Shares) -> Tensor:
    """Return whether each element fits in the message to the owner. The largest elements of a tensor fit first."""
    tensors = len(shares.numels)
    message = repeat_interleave(tuple(range(tensors)), shares.counts, owner.device).add_(owner, alpha=tensors)
    rooms = copied_to(shares.rooms, owner.device).repeat(shares.world_size)
    wanted = torch.zeros_like(rooms).scatter_add_(0, message, torch.ones_like(message))
    filled = torch.ones_like(owner, dtype=torch.bool) if selected.filled is None else selected.filled
    if owner.device.type == "cpu" and bool((wanted <= rooms).all()):
        return filled  # CPU only: on a GPU this check would synchronize
    magnitudes = selected.values.abs().masked_fill_(filled.logical_not(), -1.0)
    order = magnitudes.argsort(descending=True)
    order = order[message[order].argsort(stable=True)]
    first = wanted.cumsum(0).sub_(wanted)
    number = torch.empty_like(owner)
    number[order] = torch.arange(len(order), device=order.device).sub_(first[message[order]])
    return (number < rooms[message]) & filled


def _sums(proposals: Tensor, shares: _Shares) -> Tensor:
    """Return the mean over ranks of the proposals to this rank, fp32 ``[universe]``. Missing proposals are zeros."""
    nbytes = shares.room * _PROPOSED.itemsize
    # The division comes first, so that a sum of large values stays finite.
    values = read_as(proposals[:, :nbytes], _PROPOSED).float().div_(shares.world_size)
    places = index_codec(shares.universe, shares.room).decode(proposals[:, nbytes:])
    return add_rows(values, places, values.new_zeros(shares.universe))


def _largest(sums: Tensor, shares: _Shares, rank: int) -> Tensor:
    """Return the places of the largest sums of each tensor, among the elements that this rank owns."""
    owned, starts = shares.owned_blocks(rank), starts_of(shares.blocks)
    largest = largest_of_each([sums[start : start + blocks] for start, blocks in zip(starts, owned)], shares.finals)
    shifts = tuple(start - laid for start, laid in zip(starts[:-1], starts_of(tuple(owned))))
    return largest.indices.add_(repeat_interleave(shifts, shares.finals, sums.device))


def _positions(places: Tensor, shares: _Shares) -> Tensor:
    """Convert the places that each owner selected, ``[world_size, final]``, to indices in the flattened bucket."""
    block = places - repeat_interleave(starts_of(shares.blocks)[:-1], shares.finals, places.device)
    owner = torch.arange(shares.world_size, device=places.device).unsqueeze(1)
    index = (owner - _skew(block)).remainder_(shares.world_size).add_(block, alpha=shares.world_size)
    return index.add_(repeat_interleave(starts_of(shares.numels)[:-1], shares.finals, places.device))


def _skew(block: Tensor) -> Tensor:
    """Return an offset for each block number in a tensor. The offset rotates the owners of the block's elements."""
    return block.bitwise_and(_MASK).mul_(_MULTIPLIER).bitwise_right_shift_(_SHIFT)
