"""The two classes of a gradient, what is above zero and what is below: their totals, and a shift for each."""

import torch
from torch import Tensor

_PIECE = 1 << 18  # elements whose temporaries stay in the cache; counts of so few are exact in fp32


def sign_totals(tensor: Tensor) -> Tensor:
    """Add up and count the magnitudes of each sign: float64 ``[2, 2]``, positive above negative, sum beside count.

    A tensor with an element that is not finite has a sum that is not finite.

        >>> sign_totals(torch.tensor([1.0, 0.0, -2.0, 3.0]))
        tensor([[4., 2.],
                [2., 1.]], dtype=torch.float64)
    """
    pieces = [_totals(piece) for piece in tensor.split(_PIECE)]
    return torch.stack(pieces).sum(dim=0)


def _totals(piece: Tensor) -> Tensor:
    positive, signs = piece.clamp(min=0.0), piece.sign()
    positive_signs = signs.clamp(min=0.0)
    sums = [positive.sum(dtype=torch.float64), positive_signs.sum(dtype=torch.float64)]
    # A difference with zero, and of equal numbers, is exact.
    sums += [positive.sub_(piece).sum(dtype=torch.float64), positive_signs.sub_(signs).sum(dtype=torch.float64)]
    return torch.stack(sums).view(2, 2)


def shift_by_sign(tensor: Tensor, above: Tensor, below: Tensor) -> Tensor:
    """Add one number, ``[]``, to positive elements, another to negative ones; not finite, they make all of it so."""
    shifted = torch.empty_like(tensor)
    # A product with zero, and a sum with it, is exact; that of zero and infinity is NaN.
    for piece, out in zip(tensor.split(_PIECE), shifted.split(_PIECE)):
        negative = piece.sign()
        positive = negative.clamp(min=0.0)
        negative.sub_(positive).neg_().mul_(below)
        torch.add(piece, positive.mul_(above).add_(negative), out=out)
    return shifted
