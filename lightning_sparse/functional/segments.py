"""The largest magnitudes of each of a group's tensors, all found at once: for a device, where launches cost most.

What :mod:`~lightning_sparse.functional.topk` finds tensor by tensor, or for tensors of one size, is found here for all
that have few selected: a stable sort, by tensor and by magnitude, puts each tensor's largest in front. Maxima of blocks
leave little to be sorted: of 64 elements first, and where that is still much, of 8 within the blocks that stay.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_sparse.functional.elements import APART, Counts, Piece, pieces, repeat_each, starts_of

_BLOCK, _SUBBLOCK = 64, 8
_MANY_BLOCKS = 1 << 23  # whose maxima are sorted at once, in some 60 bytes for each
_MANY = 1 << 22  # elements that are sorted, with their places, in more time than is taken to find the smaller blocks


def largest_of_few(
    tensors: Sequence[Tensor], starts: Sequence[int], counts: Counts, are_blocked: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Find so many largest magnitudes of each flat tensor; those that ``are_blocked`` have more blocks than that.

    Returns places, int64 ``[sum(counts)]``, of which each tensor's begin at its start, and the values there; in the
    order of the tensors, not of their elements.
    """
    blocked = [place for place, is_blocked in enumerate(are_blocked) if is_blocked]
    blocked.sort(key=lambda place: tensors[place].numel() >= APART)  # the others are copied beside each other
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
    chosen = _largest_of_segments(found.abs(), tuple(members), tuple(lengths), counts)
    return place[chosen], found[chosen]


def _heads(tensors: Sequence[Tensor], counts: Counts, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return of each tensor the blocks with the largest maxima, ``[sum(counts), block]``, and where they start."""
    bodies = [tensor[: tensor.numel() // _BLOCK * _BLOCK] for tensor in tensors]
    numbers = tuple(body.numel() // _BLOCK for body in bodies)
    firsts = starts_of(numbers)
    heads: list[Tensor] = []
    places: list[Tensor] = []
    for together in _looked_at_together(bodies):
        some = slice(together[0].first, together[-1].stop)
        blocks = [piece.read().view(-1, _BLOCK) for piece in together]
        maxima = blocks[0].new_empty(firsts[some.stop] - firsts[some.start])
        for each, out in zip(blocks, maxima.split(list(map(len, blocks)))):
            # The norm of largest magnitudes is one pass, without magnitudes in memory; a NaN is the largest of all.
            torch.linalg.vector_norm(each, torch.inf, dim=1, out=out)
        # In the order of places, so that which of equal magnitudes are taken is told by places alone.
        of_some = counts[some]
        chosen = _largest_of_segments(maxima, tuple(range(len(of_some))), numbers[some], of_some).sort().values
        heads += _rows_of(blocks, chosen, [sum(counts[piece.first : piece.stop]) for piece in together])
        shifts = tuple(
            start - _BLOCK * (first - firsts[some.start]) for start, first in zip(starts[some], firsts[some])
        )
        places.append(chosen.mul_(_BLOCK).add_(repeat_each(shifts, of_some, chosen.device)))
    return torch.cat(heads), places[0] if len(places) == 1 else torch.cat(places)


def _looked_at_together(bodies: Sequence[Tensor]) -> Iterator[list[Piece]]:
    """Yield pieces of which the maxima are sorted at once; those of large tensors are not copied."""
    together: list[Piece] = []
    blocks = 0
    for piece in pieces(bodies, APART):
        numel = sum(map(Tensor.numel, piece.lying))
        is_copied = len(piece.lying) > 1
        if together and (blocks + numel // _BLOCK > _MANY_BLOCKS or (is_copied and len(together[-1].lying) > 1)):
            yield together
            together, blocks = [], 0
        together.append(piece)
        blocks += numel // _BLOCK
    if together:
        yield together


def _rows_of(blocks: Sequence[Tensor], chosen: Tensor, counts: Sequence[int]) -> Iterator[Tensor]:
    """Yield rows of matrices that are numbered through, so many of each."""
    starts = starts_of(tuple(map(len, blocks)))[:-1]
    within = chosen
    if len(blocks) > 1:
        within = chosen - repeat_each(starts, tuple(counts), chosen.device)
    for rows, some in zip(blocks, within.split(list(counts))):
        yield rows.index_select(0, some)


def _narrowed(heads: Tensor, places: Tensor, counts: Counts) -> tuple[Tensor, Tensor]:
    """Return the same of smaller blocks within those."""
    ratio = _BLOCK // _SUBBLOCK
    blocks = heads.view(-1, _SUBBLOCK)
    maxima = torch.linalg.vector_norm(blocks, torch.inf, dim=1)
    numbers = tuple(count * ratio for count in counts)
    chosen = _largest_of_segments(maxima, tuple(range(len(counts))), numbers, counts).sort().values
    return blocks.index_select(0, chosen), places[chosen // ratio].add_((chosen % ratio).mul_(_SUBBLOCK))


def _largest_of_segments(magnitudes: Tensor, members: Counts, lengths: Counts, counts: Counts) -> Tensor:
    """Find so many of the largest of each tensor, whose parts have these lengths; ``members`` names their tensors.

    Returns places in ``magnitudes``, tensor after tensor. Of equal ones those in front are taken.
    """
    order = _ordered(magnitudes, members, lengths)
    totals = [0] * len(counts)
    for member, length in zip(members, lengths):
        totals[member] += length
    firsts = starts_of(tuple(totals))
    return torch.cat([order[first : first + count] for first, count in zip(firsts, counts)])


def _ordered(magnitudes: Tensor, members: Counts, lengths: Counts) -> Tensor:
    """Return where elements are, by tensor, and of each tensor the largest first; a NaN is larger than any number."""
    if magnitudes.dtype is torch.float32:  # their bits are ordered as they are, so that one sort does for both
        owner = repeat_each(tuple(member << 32 for member in members), lengths, magnitudes.device)
        return owner.sub_(magnitudes.view(torch.int32)).sort(stable=True).indices
    owner = repeat_each(members, lengths, magnitudes.device)
    order = magnitudes.sort(descending=True, stable=True).indices
    return order[owner[order].sort(stable=True).indices]
