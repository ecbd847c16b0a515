"""Selections go to the owners of their elements, who add them up; the largest sums go to every rank."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.group_selection import FlatSelection, GroupSelection, on_device, starts_of
from lightning_sparse.compressors.selection import SelectionSize
from lightning_sparse.compressors.topk import largest_of_each
from lightning_sparse.engine.wire.base import Arrival, Payload, Phases, Transfer, WireFormat, aligned, message_of
from lightning_sparse.functional import add_rows, index_codec, read_as, round_to

LEAST_FOR_AN_OWNER = 32  # elements, on average; with fewer, the room for an uneven share weighs more than they do
_SIGMAS = 4.0  # room of a message for one owner above its average share, in standard deviations of a random map
_MULTIPLIER, _MASK, _SHIFT = 0x9E3779B1, 0x7FFFFFFF, 16  # of a multiplicative hash; products stay below 2 ** 63


@dataclass(frozen=True)
class Owners:
    """Exchange through owners: every element belongs to one rank, which adds up what all ranks selected there.

    Where a gather hands every rank's selection to every rank, here each rank receives what was selected of its own
    share, and then the largest sums of all shares: about ``(1 + keep)`` selections, however many ranks there are.

    Args:
        keep: how many sums a step applies, as a multiple of what one rank selects. What is not among them stays, whole,
            with those that sent it. Fewer make messages smaller and updates later.

    Raises:
        ValueError: for a ``keep`` below 1.

    Example::

        >>> Owners(keep=2).keep
        2
    """

    keep: float = 4.0

    def __post_init__(self) -> None:
        """Check."""
        if not self.keep >= 1:
            raise ValueError(
                f"keep={self.keep} must be at least 1: how many sums a step applies, as a multiple of what one rank"
                " selects"
            )


class OwnersFormat(WireFormat):
    """The largest sums of what all ranks selected, in two phases of fixed size.

    1. Every element has an owner, by a fixed map. Each rank sends its selected values and their places to their owners
       (all-to-all). A message has room for a little more than an owner's average share of each tensor; of what does not
       fit, the smallest stay, in the residual.
    2. The owner adds what it received rank by rank, chooses the largest sums of its share of each tensor, and sends
       them to everybody (all-gather).

    What is in the final set was sent; everything else stays, whole, with its sender. So the sum of all residuals and of
    what is applied is what it was. With a 16-bit wire, the first rounding stays with the sender, and the second with
    the owner.

    The idea is that of Ok-Topk (Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP
    2022, arXiv 2201.07598). Differs from it in this: the shares are fixed and not balanced anew every 64 steps, since a
    map that looks random is balanced by itself; thresholds are exact, by tensor, and never out of date; all sizes
    follow from the number of elements selected, so that nobody waits for a count; and more sums are applied than one
    rank selects.

    Args:
        dtype: as for :class:`~lightning_sparse.engine.wire.base.WireFormat`.
        rank: likewise.
        ranks: likewise.
        keep: sums that a step applies, as a multiple of what one rank selects.
    """

    collectives: tuple[str, ...] = ("all_to_all", "all_gather")

    def __init__(self, dtype: torch.dtype, rank: int, ranks: int, keep: float) -> None:
        super().__init__(dtype, rank, ranks)
        self._keep = keep

    @override
    def exchange(self, selection: GroupSelection, accumulated: Sequence[Tensor], used: Optional[Tensor]) -> Phases:
        selected = selection.flat()
        shares = _shares_of(selected.numels, selected.counts, self.ranks, self._keep)
        sent = round_to(selected.values, self.dtype)
        addressed = _address(selected, shares)
        parts = yield Payload("all_to_all", _messages(sent, addressed, shares))
        places, sums = _largest(self._mean(parts, shares, selected.values.dtype), shares, self.rank)

        returned, codec = round_to(sums, self.dtype), index_codec(shares.extent, shares.final)
        sections = [returned.view(torch.uint8), codec.encode(places, shares.extent)]
        wires = yield Payload("all_gather", message_of(sections if used is None else [*sections, used]))
        sizes = [section.numel() for section in sections]
        value_bytes, index_bytes, rest = wires.split([*sizes, wires.shape[1] - sum(sizes)], dim=1)
        received = read_as(value_bytes, self.dtype).to(sums.dtype)
        places = codec.decode(index_bytes, shares.extent, shares.final)

        means = FlatSelection(received, _positions(places, shares), shares.numels, shares.finals, is_distinct=True)
        kept = _kept(selected, sent, addressed, places, shares)
        if returned is not sums:
            rounding = (sums - returned.to(sums.dtype)).mul_(self.ranks)
            share = FlatSelection.at(accumulated, means.indices[self.rank], shares.finals)
            kept = _with_rounding(kept, share, rounding, addressed, self.rank)
        return Arrival(
            finite=received.isfinite().all(),
            used=None if used is None else rest[:, : used.numel()].bool().any(dim=0),
            means=means,
            kept=kept.selection,
        )

    @override
    def transfers(self, sizes: Sequence[SelectionSize]) -> list[Transfer]:
        numels, counts = tuple(size.numel for size in sizes), tuple(size.selected for size in sizes)
        shares = _shares_of(numels, counts, self.ranks, self._keep)
        message = shares.room * self.dtype.itemsize
        message += index_codec(shares.universe, shares.room).nbytes(shares.universe, shares.room)
        share = shares.final * self.dtype.itemsize
        share += index_codec(shares.extent, shares.final).nbytes(shares.extent, shares.final)
        return [Transfer("all_to_all", self.ranks * aligned(message)), Transfer("all_gather", aligned(share))]

    def _mean(self, parts: Tensor, shares: "_Shares", dtype: torch.dtype) -> Tensor:
        """Return the mean over ranks of what this rank owns, ``[universe]``, zero where nobody sent anything."""
        nbytes = shares.room * self.dtype.itemsize
        received = read_as(parts[:, :nbytes], self.dtype).to(dtype).div_(self.ranks)
        codec = index_codec(shares.universe, shares.room)
        end = nbytes + codec.nbytes(shares.universe, shares.room)
        places = codec.decode(parts[:, nbytes:end], shares.universe, shares.room)
        return add_rows(received, places, received.new_zeros(shares.universe))


class _Shares(NamedTuple):
    """Shares of a group's tensors among ranks, and the room of its messages.

    Of ``ranks`` elements in a row each has another owner, and which has which looks random; so every rank owns one
    element of each such block. The place of an element is the number of its block, where the blocks of all tensors are
    laid end to end; with its owner it says which element it is.

    Attributes:
        ranks: number of ranks.
        numels: elements of each tensor.
        counts: elements of each that a rank selects.
        blocks: blocks of each.
        rooms: elements of each that a message for one owner has room for.
        finals: sums of each that an owner sends to everybody.
    """

    ranks: int
    numels: tuple[int, ...]
    counts: tuple[int, ...]
    blocks: tuple[int, ...]
    rooms: tuple[int, ...]
    finals: tuple[int, ...]

    @property
    def extent(self) -> int:
        """Number of places."""
        return sum(self.blocks)

    @property
    def room(self) -> int:
        """Elements in a message for one owner."""
        return sum(self.rooms)

    @property
    def universe(self) -> int:
        """Number of places in a message, with those beyond the last block that stand for empty room."""
        return self.extent + self.room

    @property
    def final(self) -> int:
        """Sums that an owner sends."""
        return sum(self.finals)

    def owned_blocks(self, rank: int) -> list[int]:
        """Return in how many blocks of each tensor a rank owns an element: not always in the last."""
        owned = []
        for numel in self.numels:
            block, rest = divmod(numel, self.ranks)
            owned.append(block + ((rank - ((block & _MASK) * _MULTIPLIER >> _SHIFT)) % self.ranks < rest))
        return owned


@lru_cache(maxsize=512)
def _shares_of(numels: tuple[int, ...], counts: tuple[int, ...], ranks: int, keep: float) -> _Shares:
    """Share a group's tensors; of each the same, whichever others there are."""
    blocks = tuple(-(-numel // ranks) for numel in numels)
    rooms, finals = [], []
    for numel, count in zip(numels, counts):
        average = count / ranks
        rooms.append(min(-(-numel // ranks), math.ceil(average + _SIGMAS * math.sqrt(average))))
        # Not more than ranks have sent, nor more than an owner has elements of.
        finals.append(max(1, min(numel // ranks, math.ceil(min(keep, ranks) * average))))
    return _Shares(ranks, numels, counts, blocks, tuple(rooms), tuple(finals))


class _Addressed(NamedTuple):
    """Owners of the selected elements.

    Attributes:
        owner: int64 ``[count]``.
        place: int64 ``[count]``.
        fits: bool ``[count]``: whether there is room for it in the message for its owner.
    """

    owner: Tensor
    place: Tensor
    fits: Tensor


def _address(selected: FlatSelection, shares: _Shares) -> _Addressed:
    """Find the owner of each selected element."""
    index = selected.indices - _of_each(starts_of(shares.numels)[:-1], shares.counts, selected.indices)
    block = index // shares.ranks
    owner = index.add_(_skew(block)).remainder_(shares.ranks)
    place = block.add_(_of_each(starts_of(shares.blocks)[:-1], shares.counts, index))
    return _Addressed(owner, place, _fitting(selected, owner, shares))


def _fitting(selected: FlatSelection, owner: Tensor, shares: _Shares) -> Tensor:
    """Tell which elements there is room for: of each tensor and each owner, the largest."""
    tensors = len(shares.numels)
    message = _of_each(range(tensors), shares.counts, owner).add_(owner, alpha=tensors)
    rooms = on_device(shares.rooms, owner.device).repeat(shares.ranks)
    wanted = torch.zeros_like(rooms).scatter_add_(0, message, torch.ones_like(message))
    filled = torch.ones_like(owner, dtype=torch.bool) if selected.filled is None else selected.filled
    if owner.device.type == "cpu" and bool((wanted <= rooms).all()):
        return filled  # on another device the host would wait for the answer
    magnitudes = selected.values.abs().masked_fill_(filled.logical_not(), -1.0)
    order = magnitudes.argsort(descending=True)
    order = order[message[order].argsort(stable=True)]
    first = wanted.cumsum(0).sub_(wanted)
    number = torch.empty_like(owner)
    number[order] = torch.arange(len(order), device=order.device).sub_(first[message[order]])
    return (number < rooms[message]) & filled


def _messages(sent: Tensor, addressed: _Addressed, shares: _Shares) -> Tensor:
    """Write to each owner what was selected of its share, in the order of places; uint8 ``[ranks, nbytes]``."""
    ranks, room = shares.ranks, shares.room
    owner, order = addressed.owner.where(addressed.fits, ranks).sort(stable=True)
    first = torch.searchsorted(owner, torch.arange(ranks + 1, device=owner.device))
    number = torch.arange(len(owner), device=owner.device).sub_(first[owner])
    slot = number.add_(owner, alpha=room).clamp_(max=ranks * room)  # all that does not fit in one, which is not sent
    values = sent.new_zeros(ranks * room + 1).index_copy_(0, slot, sent[order])[:-1].view(ranks, room)
    places = torch.arange(shares.extent, shares.universe, device=owner.device).repeat(ranks + 1)[: ranks * room + 1]
    places = places.index_copy_(0, slot, addressed.place[order])[:-1].view(ranks, room)
    codec = index_codec(shares.universe, room)
    return message_of([values.view(torch.uint8), codec.encode_rows(places, shares.universe)])


def _largest(mean: Tensor, shares: _Shares, rank: int) -> tuple[Tensor, Tensor]:
    """Return the places and the values of the largest means of a rank's share of each tensor."""
    owned, starts = shares.owned_blocks(rank), starts_of(shares.blocks)
    largest = largest_of_each([mean[start : start + blocks] for start, blocks in zip(starts, owned)], shares.finals)
    shifts = tuple(start - laid for start, laid in zip(starts[:-1], starts_of(tuple(owned))))
    return largest.indices.add_(_of_each(shifts, shares.finals, largest.indices)), largest.values


def _positions(places: Tensor, shares: _Shares) -> Tensor:
    """Return which elements of the tensors laid end to end stand at places, ``[ranks, final]``, of each owner."""
    block = places - _of_each(starts_of(shares.blocks)[:-1], shares.finals, places)
    owner = torch.arange(shares.ranks, device=places.device).unsqueeze(1)
    index = (owner - _skew(block)).remainder_(shares.ranks).add_(block, alpha=shares.ranks)
    return index.add_(_of_each(starts_of(shares.numels)[:-1], shares.finals, places))


class _Kept(NamedTuple):
    """Elements and what stays here of them.

    Attributes:
        selection: with ``filled`` where they were sent.
        column: int64 ``[count]``: the number of each among the sums that its owner sent, where it is among them.
    """

    selection: FlatSelection
    column: Tensor


def _kept(selected: FlatSelection, sent: Tensor, addressed: _Addressed, places: Tensor, shares: _Shares) -> _Kept:
    """Keep what rounding dropped of an element in the final set, and all of every other."""
    owners = torch.arange(shares.ranks, device=places.device).unsqueeze(1)
    final = (places + owners * shares.extent).flatten()
    own = addressed.owner * shares.extent + addressed.place
    found = torch.searchsorted(final, own).clamp_(max=len(final) - 1)
    is_sent = (final[found] == own) & addressed.fits
    values = selected.values.where(is_sent.logical_not(), selected.values - sent.to(selected.values.dtype))
    kept = selected.replaced(values, selected.indices).filled_at(is_sent)
    return _Kept(kept, found.sub_(addressed.owner * shares.final))


def _with_rounding(kept: _Kept, share: FlatSelection, rounding: Tensor, addressed: _Addressed, rank: int) -> _Kept:
    """Keep also what the owner's rounding dropped of the sums of its share, whoever had sent them.

    An element that this rank had selected itself then stands twice among what is kept, with one and the same value.

    Args:
        kept: of the elements that this rank selected.
        share: the elements of which it sent the sums, with what had accumulated of them here.
        rounding: what was dropped of these sums.
        addressed: owners of the elements selected.
        rank: this rank.
    """
    own, filled = kept.selection, kept.selection.filled
    assert filled is not None
    is_both = filled & (addressed.owner == rank)
    column = kept.column.where(is_both, len(rounding))  # a column beyond the last, for all that is not both
    room = own.values.new_zeros(1)
    owned = torch.cat([share.values, room]).index_copy_(0, column, own.values)
    owned[:-1] += rounding
    is_sent = torch.zeros_like(owned, dtype=torch.bool).index_copy_(0, column, is_both)
    merged = FlatSelection(
        _interleaved(own.values.where(is_both.logical_not(), owned[column]), own.counts, owned[:-1], share.counts),
        _interleaved(own.indices, own.counts, share.indices, share.counts),
        own.numels,
        tuple(map(sum, zip(own.counts, share.counts))),
        _interleaved(filled, own.counts, is_sent[:-1], share.counts),
    )
    return _Kept(merged, kept.column)


def _interleaved(first: Tensor, counts: tuple[int, ...], second: Tensor, more: tuple[int, ...]) -> Tensor:
    """Return the elements of each tensor from both, tensor by tensor."""
    return torch.cat([piece for both in zip(first.split(counts), second.split(more)) for piece in both])


def _skew(block: Tensor) -> Tensor:
    """Return by how much owners are turned in a block; the same wherever the tensor lies in its group."""
    return block.bitwise_and(_MASK).mul_(_MULTIPLIER).bitwise_right_shift_(_SHIFT)


def _of_each(numbers: Sequence[int], counts: tuple[int, ...], like: Tensor) -> Tensor:
    """Return the number of its tensor for each element, so many of each, int64 ``[sum(counts)]``."""
    each = on_device(tuple(numbers), like.device)
    # The size is known: a GPU need not be asked for it.
    return each.repeat_interleave(on_device(counts, like.device), output_size=sum(counts))
