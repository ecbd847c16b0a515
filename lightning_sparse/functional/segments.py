"""The largest magnitudes of each of a group's tensors, all found at once: for a device, where launches cost most.

What :mod:`~lightning_sparse.functional.topk` finds tensor by tensor, or for tensors of one size, is found here for all
that have few selected: a stable sort, by tensor and by magnitude, puts each tensor's largest in front. Maxima of blocks
leave little to be sorted: of 64 elements first, and where that is still much, of 8 within the blocks that stay.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sparse.functional.elements import Counts, pieces, repeat_each, starts_of

_BLOCK, _SUBBLOCK = 64, 8
_MANY = 1 << 22  # elements that are sorted, with their places, in more time than is taken to find the smaller blocks


def largest_of_few(
    tensors: Sequence[Tensor], starts: Sequence[int], counts: Counts, are_blocked: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Find so many largest magnitudes of each flat tensor; those that ``are_blocked`` have more blocks than that.

    Returns places, int64 ``[sum(counts)]``, of which each tensor's begin at its start, and the values there; in the
    order of the tensors, not of their elements.
    """
    blocked = [place for place, is_blocked in enumerate(are_blocked) if is_blocked]
    device = tensors[0].device
    values: list[Tensor] = []
    places: list[Tensor] = []
    members: list[int] = []
    lengths: list[int] = []
    if blocked:
        of_blocked = tuple(counts[place] for place in blocked)
        heads, head_places = _heads(
            [tensors[place] for place in blocked], of_blocked, [starts[place] for place in blocked]
        )
        if heads.numel() > _MANY:
            heads, head_places = _narrowed(heads, head_places, of_blocked)
        values.append(heads.flatten())
        places.append((head_places.unsqueeze(1) + torch.arange(heads.shape[1], device=device)).flatten())
        members += blocked
        lengths += [count * heads.shape[1] for count in of_blocked]
    # Of the others all elements are looked at, as is what is left over of those in blocks.
    firsts = [
        tensor.numel() // _BLOCK * _BLOCK if is_blocked else 0 for tensor, is_blocked in zip(tensors, are_blocked)
    ]
    rest = [place for place, (tensor, first) in enumerate(zip(tensors, firsts)) if first < tensor.numel()]
    if rest:
        numels = tuple(tensors[place].numel() - firsts[place] for place in rest)
        shifts = tuple(starts[place] + firsts[place] - start for place, start in zip(rest, starts_of(numels)))
        values.append(torch.cat([tensors[place][firsts[place] :] for place in rest]))
        places.append(torch.arange(sum(numels), device=device).add_(repeat_each(shifts, numels, device)))
        members += rest
        lengths += numels
    found, place = torch.cat(values), torch.cat(places)
    chosen = _largest_of_segments(found, tuple(members), tuple(lengths), counts)
    return place[chosen], found[chosen]


def _heads(tensors: Sequence[Tensor], counts: Counts, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return of each tensor the blocks with the largest maxima, ``[sum(counts), block]``, and where they start."""
    bodies = [tensor[: tensor.numel() // _BLOCK * _BLOCK] for tensor in tensors]
    heads: list[Tensor] = []
    places: list[Tensor] = []
    for piece in pieces(bodies):
        of_piece = counts[piece.first : piece.stop]
        blocks = piece.read().view(-1, _BLOCK)
        numbers = tuple(body.numel() // _BLOCK for body in bodies[piece.first : piece.stop])
        # In the order of places, so that which of equal magnitudes are taken is told by places alone.
        chosen = _largest_blocks(blocks, numbers, of_piece).sort().values
        heads.append(blocks.index_select(0, chosen))
        shifts = tuple(
            start - _BLOCK * number for start, number in zip(starts[piece.first : piece.stop], starts_of(numbers))
        )
        places.append(chosen.mul_(_BLOCK).add_(repeat_each(shifts, of_piece, chosen.device)))
    return (heads[0], places[0]) if len(heads) == 1 else (torch.cat(heads), torch.cat(places))


def _narrowed(heads: Tensor, places: Tensor, counts: Counts) -> tuple[Tensor, Tensor]:
    """Return the same of smaller blocks within those."""
    ratio = _BLOCK // _SUBBLOCK
    blocks = heads.view(-1, _SUBBLOCK)
    chosen = _largest_blocks(blocks, tuple(count * ratio for count in counts), counts).sort().values
    return blocks.index_select(0, chosen), places[chosen // ratio].add_((chosen % ratio).mul_(_SUBBLOCK))


def _largest_blocks(blocks: Tensor, numbers: Counts, counts: Counts) -> Tensor:
    # The norm of largest magnitudes is one pass, without magnitudes in memory; a NaN is the largest of all.
    maxima = torch.linalg.vector_norm(blocks, torch.inf, dim=1)
    return _largest_of_segments(maxima, tuple(range(len(numbers))), numbers, counts)


def _largest_of_segments(values: Tensor, members: Counts, lengths: Counts, counts: Counts) -> Tensor:
    """Find so many largest magnitudes of each tensor, whose parts have these lengths; ``members`` names their tensors.

    Returns places in ``values``, tensor after tensor. Of equal ones those in front are taken.
    """
    device = values.device
    order = _ordered(values.abs(), repeat_each(members, lengths, device))
    totals = [0] * len(counts)
    for member, length in zip(members, lengths):
        totals[member] += length
    shifts = tuple(first - taken for first, taken in zip(starts_of(tuple(totals)), starts_of(counts)))[:-1]
    return order[torch.arange(sum(counts), device=device).add_(repeat_each(shifts, counts, device))]


def _ordered(magnitudes: Tensor, owner: Tensor) -> Tensor:
    """Return where elements are, by tensor, and of each tensor the largest first; a NaN is larger than any number."""
    if magnitudes.dtype is torch.float32:  # their bits are ordered as they are, so that one sort does for both
        return owner.mul_(1 << 32).sub_(magnitudes.view(torch.int32)).sort(stable=True).indices
    order = magnitudes.sort(descending=True, stable=True).indices
    return order[owner[order].sort(stable=True).indices]
