"""Rounding to the type that travels, so that nothing finite becomes infinite on the way."""

import torch
from torch import Tensor


def round_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to a floating-point type; a finite value beyond its range becomes the largest that fits.

    The difference is the caller's to keep: what lies beyond float16's range is late, not lost. Infinities and NaN stay
    what they are, so that a gradient scaler still sees them.

        >>> round_to(torch.tensor([1.0001, -1e6, float("inf")]), torch.float16)
        tensor([ 1.0000e+00, -6.5504e+04,         inf], dtype=torch.float16)
    """
    if values.dtype == dtype:
        return values
    limit = torch.finfo(dtype).max
    values = values.to(torch.promote_types(values.dtype, dtype))  # in which the limit is exact
    return torch.where(values.isinf(), values, values.clamp(-limit, limit)).to(dtype)
