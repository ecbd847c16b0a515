"""Reductions of flat tensors: norms, totals by sign, histograms of magnitudes, and a fingerprint."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sparse.functional.elements import runs


def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of each tensor, in fp32."""
    if tensors[0].device.type == "cpu":
        norms: Tensor = torch.stack(torch._foreach_norm(list(tensors))).float()
        if not norms.isinf().any():
            return norms
    # fp32 overflows above a norm of 1.8e19. A GPU always uses float64, because a check for overflow would synchronize.
    wide: Tensor = torch.stack(torch._foreach_norm(list(tensors), 2, torch.float64))
    return wide.float()


def norm_of_all(norms: Tensor) -> Tensor:
    """Combine the norms of several tensors to the norm of all elements, fp32 ``[]``."""
    return norms_of([norms])[0]


_PIECE = 1 << 18  # elements per piece on a CPU: temporaries fit in the cache, and fp32 counts are exact
_DEVICE_PIECE = 1 << 26  # elements per piece on a GPU: kernel launches are expensive, so temporaries may take 256 MiB


def sign_totals(tensor: Tensor) -> Tensor:
    """Return ``[[sum, count], [sum, count]]`` of magnitudes: first row positive elements, second row negative elements.

    The result is float64 ``[2, 2]``. A non-finite element makes a sum non-finite. For fp32 or narrower tensors, a CPU
    sums within pieces in fp32, and adds the sums of pieces in float64. This takes half the time of float64 alone. The
    error is a few fp32 roundings.

        >>> sign_totals(torch.tensor([1.0, 0.0, -2.0, 3.0]))
        tensor([[4., 2.],
                [2., 1.]], dtype=torch.float64)
    """
    is_host = tensor.device.type == "cpu"  # on a GPU, the check below would synchronize
    sums = _sums_by_sign(tensor, torch.promote_types(tensor.dtype, torch.float32) if is_host else torch.float64)
    if is_host and not sums.isfinite().all():  # large magnitudes overflow fp32
        sums = _sums_by_sign(tensor, torch.float64)
    positive, negative, signs, positives = sums.double().sum(dim=1)
    return torch.stack([positive, positives, negative.abs(), positives - signs]).view(2, 2)


def _sums_by_sign(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return sums over pieces, ``[4, pieces]``: of positive elements, negative elements, signs, and positive signs."""
    parts = tensor.split(_PIECE if tensor.device.type == "cpu" else _DEVICE_PIECE)
    room = torch.empty_like(parts[0])
    sums = torch.empty(4, len(parts), dtype=dtype, device=tensor.device)
    for part, (positive, negative, signs, positives) in zip(parts, sums.unbind(1)):
        used = room[: part.numel()]
        torch.sum(torch.clamp(part, min=0.0, out=used), 0, dtype=dtype, out=positive)
        torch.sum(torch.clamp(part, max=0.0, out=used), 0, dtype=dtype, out=negative)
        torch.sum(torch.sign(part, out=used), 0, dtype=dtype, out=signs)
        torch.sum(used.clamp_(min=0.0), 0, dtype=dtype, out=positives)
    return sums


def shift_by_sign(tensors: Sequence[Tensor], above: Tensor, below: Tensor) -> None:
    """Add ``above`` to positive and ``below`` to negative elements of flat tensors of one dtype, in place.

    Both shifts are scalar tensors ``[]``. A non-finite shift makes all elements non-finite.
    """
    for _, _, flat in runs(tensors):
        for piece in flat.split(_PIECE if flat.device.type == "cpu" else _DEVICE_PIECE):
            # Each shift is multiplied by a mask. If the mask is zero, a finite shift adds zero, an infinite shift NaN.
            negative = piece.sign()
            positive = negative.clamp(min=0.0)
            negative.sub_(positive).neg_().mul_(below)
            piece.add_(positive.mul_(above).add_(negative))


# The upper 11 bits of an fp32 magnitude are the index of a bin. Magnitudes in a bin differ by at most 1/8.
_BIN_BITS = 11
_SHIFT = 31 - _BIN_BITS
_CPU_CHUNK = 1 << 17  # elements per pass on a CPU: copies (half a MiB each) stay in a second-level cache
_DEVICE_CHUNK = 1 << 23  # elements per pass on a GPU, 32 MiB; each pass synchronizes


def magnitude_histogram(tensor: Tensor) -> Tensor:
    """Return a histogram of magnitudes, int64 ``[2048]``, with eight bins per power of two. Synchronizes with a GPU."""
    histogram = torch.zeros(1 << _BIN_BITS, dtype=torch.int64, device=tensor.device)
    for piece in tensor.split(_CPU_CHUNK if tensor.device.type == "cpu" else _DEVICE_CHUNK):
        bins = piece.abs().float().view(torch.int32).bitwise_right_shift_(_SHIFT)
        histogram += torch.bincount(bins, minlength=1 << _BIN_BITS)
    return histogram


def magnitude_quantile(histogram: Tensor, count: int) -> float:
    """Return the magnitude that about ``count`` elements reach, or 0 if fewer elements are non-zero.

    ``histogram`` has dtype float64. Within a bin, the logarithm of the count is interpolated linearly in the logarithm
    of the magnitude. For a normal distribution and a density of 0.001, the error is about 2 % of ``count``.

        >>> counted = magnitude_histogram(torch.linspace(0, 1, 1001)).double()
        >>> round(magnitude_quantile(counted, 100), 2)
        0.9
    """
    histogram = histogram.cpu()
    reaching = histogram.flip(0).cumsum(0).flip(0)
    # At least `count` elements are in the chosen bin or above, and fewer are above. So the chosen bin is not empty.
    chosen = int(torch.searchsorted(-reaching, -count, right=True)) - 1
    if chosen <= 0:
        return 0.0
    edges = torch.tensor([chosen, chosen + 1], dtype=torch.int32).bitwise_left_shift_(_SHIFT).view(torch.float32)
    # An edge of a bin is infinity or NaN if float64 elements exceed the largest fp32 number.
    limit = torch.finfo(torch.float32).max
    lower, upper = edges.nan_to_num_(nan=limit, posinf=limit).tolist()
    reaching_lower, reaching_upper = (*reaching[chosen : chosen + 2].tolist(), 0.0)[:2]
    # A count of zero has no logarithm, so half an element replaces a count of zero.
    share = math.log(reaching_lower / count) / math.log(reaching_lower / max(reaching_upper, 0.5))
    return float(lower * (upper / lower) ** share)


_CHUNK = 1 << 20  # elements per chunk; only a chunk is widened to int64, so no copy has the size of a large tensor
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 over the golden ratio, as int64: multiples spread over all bits
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> Tensor:
    """Return a checksum, int64 ``[]``: the sum modulo ``2 ** 64`` of each element's bits times a weight.

    The weights are odd, and depend on the index. One changed element always changes the sum. Several changes cancel
    with probability 2 ** -64.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    bits = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    places = torch.arange(min(_CHUNK, bits.numel()), device=tensor.device)
    for start, piece in zip(range(0, bits.numel(), _CHUNK), bits.split(_CHUNK)):
        factors = places[: piece.numel()].add(start).mul_(_ODD).bitwise_or_(1)
        total += factors.mul_(piece).sum()
    return total
