"""The few elements that may be among the largest: found by a floor, and separated by unique keys.

On CPU only: to read how many elements reach a floor would stop a GPU.
"""

import torch
from torch import Tensor

WORD = 8  # boolean flags read as one int64
_RANK_BITS = 32


def flagged(mask: Tensor) -> Tensor:
    """Find the true elements of a flat mask, ascending; their number is a multiple of ``WORD``."""
    # Eight flags are one word: most words hold none and are passed over at an eighth of the cost.
    words = torch.nonzero(mask.view(torch.int64)).squeeze(1)
    row, flag = torch.nonzero(mask.view(-1, WORD).index_select(0, words)).unbind(1)
    return words.index_select(0, row).mul_(WORD).add_(flag)


def reaching(magnitudes: Tensor, floors: Tensor) -> Tensor:
    """Find which of ``[rows, width]`` magnitudes are not below their row's floor, ``[rows]``; a NaN never is.

    The result is a bool mask, the rows laid end to end, and false up to the next multiple of ``WORD``.
    """
    numel = magnitudes.numel()
    mask = torch.empty(-(-numel // WORD) * WORD, dtype=torch.bool)
    torch.lt(magnitudes, floors.unsqueeze(1), out=mask[:numel].view(magnitudes.shape)).logical_not_()
    mask[numel:] = False
    return mask


def largest_reaching(magnitudes: Tensor, reaches: Tensor, count: int) -> Tensor:
    """Find the ``count`` largest of each row of magnitudes, fp32 or narrower; int64 ``[rows, count]``, ascending.

    ``reaches`` is of :func:`reaching`, for a floor that at least ``count`` elements of each row reach. Of equal
    magnitudes the first are taken, whatever the other rows hold; a NaN is larger than any number.
    """
    rows, width = magnitudes.shape
    found = flagged(reaches)
    if found.numel() > rows * count:
        found = _without_surplus(found, magnitudes, count)
    return found.view(rows, count) % width


def _without_surplus(found: Tensor, magnitudes: Tensor, count: int) -> Tensor:
    rows, width = magnitudes.shape
    starts = torch.searchsorted(found, torch.arange(rows + 1) * width)
    row = found // width
    slot = torch.arange(found.numel()).sub_(starts.index_select(0, row))
    # Bits of magnitudes are ordered as these. With places below them no keys are equal, so that the row alone decides.
    bits = magnitudes.flatten().index_select(0, found).float().view(torch.int32).long()
    keys = (bits << _RANK_BITS).sub_(slot)
    most = int(starts.diff().max())
    table = torch.full((rows, most), torch.iinfo(torch.int64).min)
    table.view(-1).index_copy_(0, slot.add_(row * most), keys)
    least = torch.topk(table, count, sorted=False).values.amin(dim=1)
    return found[keys >= least.index_select(0, row)]
