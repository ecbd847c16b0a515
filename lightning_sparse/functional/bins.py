"""Values as bins: a code of a few bits for each, and the mean of every bin.

So SparseLoCo (Sarfi et al., arXiv 2508.15706) quantizes what top-k has selected. Its released code rounds to the
nearest of four levels that are not symmetric about the mean; here six standard deviations about the mean are cut into
equal bins, which leaves less behind of values of two signs that are all large.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sparse.functional.copying import add_rows
from lightning_sparse.functional.rounding import round_to

_RANGE = 6.0  # standard deviations that the bins cover; what lies beyond is in the outermost
BIN_MEANS = torch.bfloat16  # what it rounds off stays with the sender, as all else that the code does not say


def bin_values(values: Tensor, counts: Sequence[int], bits: int) -> tuple[Tensor, Tensor]:
    """Sort the values of each of several tensors, laid end to end, into ``2 ** bits`` bins.

    Returns codes, uint8 ``[sum(counts)]``, and means, bfloat16 ``[tensors * 2 ** bits]``, zero where a bin is empty; a
    mean of a tensor with a value that is not finite is not finite either.

        >>> codes, means = bin_values(torch.tensor([-4.0, -3.0, 3.0, 5.0]), [4], bits=2)
        >>> codes.tolist(), values_of_bins(codes, means, [4], bits=2).tolist()
        ([1, 1, 2, 2], [-3.5, -3.5, 4.0, 4.0])
    """
    bins = 1 << bits
    wide, tensor = values.double(), _tensor_of_each(counts, values.device)
    sizes = _sums(torch.ones_like(wide), tensor, len(counts))
    centred = wide - (_sums(wide, tensor, len(counts)) / sizes)[tensor]
    width = (_sums(centred.square(), tensor, len(counts)) / sizes).sqrt_().mul_(_RANGE / bins)
    codes = centred.div_(width[tensor]).add_(bins / 2).floor_().nan_to_num_(nan=0.0).clamp_(0, bins - 1)
    place = tensor.mul_(bins).add_(codes.long())
    sizes = _sums(torch.ones_like(wide), place, len(counts) * bins)
    means = _sums(wide, place, len(counts) * bins) / sizes.clamp_(min=1.0)
    return codes.to(torch.uint8), round_to(means, BIN_MEANS)


def values_of_bins(codes: Tensor, means: Tensor, counts: Sequence[int], bits: int) -> Tensor:
    """Read what :func:`bin_values` wrote, on one rank or on several, as fp32 of the shape of ``codes``."""
    places = codes.long().add_(_tensor_of_each(counts, codes.device), alpha=1 << bits)
    return means.float().gather(-1, places)


def _tensor_of_each(counts: Sequence[int], device: torch.device) -> Tensor:
    numbers = torch.arange(len(counts), device=device)
    # The size is known: a GPU need not be asked for it.
    return numbers.repeat_interleave(torch.tensor(counts).to(device, non_blocking=True), output_size=sum(counts))


def _sums(values: Tensor, places: Tensor, number: int) -> Tensor:
    return add_rows(values[None], places[None], values.new_zeros(number))
