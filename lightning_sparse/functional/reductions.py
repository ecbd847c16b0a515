"""What many elements come to: norms, totals by sign, histograms of magnitudes, and a fingerprint."""

import math
from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from lightning_sparse.functional.elements import runs


def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of each tensor, in fp32."""
    if tensors[0].device.type == "cpu":
        norms: Tensor = torch.stack(torch._foreach_norm(list(tensors))).float()
        if not norms.isinf().any():
            return norms
    # fp32 squares overflow above a norm of 1.8e19; on a device the host would have to wait to know.
    wide: Tensor = torch.stack(torch._foreach_norm(list(tensors), 2, torch.float64))
    return wide.float()


def norm_of_all(norms: Tensor) -> Tensor:
    """Return the norm of what has these ones laid end to end, in fp32, ``[]``."""
    if norms.device.type == "cpu":
        norm: Tensor = norms.norm()
        if not norm.isinf():
            return norm
    wide: Tensor = norms.norm(dtype=torch.float64)
    return wide.float()


_PIECE = 1 << 18  # elements whose temporaries stay in the cache; counts of so few are exact in fp32
_DEVICE_PIECE = 1 << 26  # on a device launches count more: two temporaries of 256 MiB


def sign_totals(tensor: Tensor) -> Tensor:
    """Add up and count the magnitudes of each sign: float64 ``[2, 2]``, positive above negative, sum beside count.

    A tensor with an element that is not finite has a sum that is not finite. On a CPU pieces of narrow types are added
    up in fp32, which takes half the time, and those sums in float64: they are off by a few roundings of fp32.

        >>> sign_totals(torch.tensor([1.0, 0.0, -2.0, 3.0]))
        tensor([[4., 2.],
                [2., 1.]], dtype=torch.float64)
    """
    is_host = tensor.device.type == "cpu"  # else the host would have to wait to know
    sums = _sums_by_sign(tensor, torch.promote_types(tensor.dtype, torch.float32) if is_host else torch.float64)
    if is_host and not sums.isfinite().all():  # large magnitudes overflow fp32, as in a norm
        sums = _sums_by_sign(tensor, torch.float64)
    positive, negative, signs, positives = sums.double().sum(dim=1)
    return torch.stack([positive, positives, negative.abs(), positives - signs]).view(2, 2)


def _sums_by_sign(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Add up positive elements, negative ones, signs, and the positive signs, of each piece, ``[4, pieces]``."""
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


def shift_by_sign(tensor: Tensor, above: Tensor, below: Tensor, out: Optional[Tensor] = None) -> Tensor:
    """Add one number, ``[]``, to positive elements, another to negative ones; not finite, they make all of it so.

    ``out`` may be the tensor itself.
    """
    shifted = torch.empty_like(tensor) if out is None else out
    # A product with zero, and a sum with it, is exact; that of zero and infinity is NaN.
    if tensor.device.type == "cpu":
        up, down = float(above), float(below)
        positives, negatives = torch.empty_like(tensor[:_PIECE]), torch.empty_like(tensor[:_PIECE])
        for piece, shifted_piece in zip(tensor.split(_PIECE), shifted.split(_PIECE)):
            positive = torch.gt(piece, 0.0, out=positives[: piece.numel()])
            negative = torch.lt(piece, 0.0, out=negatives[: piece.numel()])
            torch.add(piece, positive, alpha=up, out=shifted_piece).add_(negative, alpha=down)
        return shifted
    for piece, shifted_piece in zip(tensor.split(_DEVICE_PIECE), shifted.split(_DEVICE_PIECE)):
        negative = piece.sign()
        positive = negative.clamp(min=0.0)
        negative.sub_(positive).neg_().mul_(below)
        torch.add(piece, positive.mul_(above).add_(negative), out=shifted_piece)
    return shifted


def shift_each_by_sign(tensors: Sequence[Tensor], above: Tensor, below: Tensor) -> list[Tensor]:
    """Return :func:`shift_by_sign` of several flat tensors of one type, on a CPU in their own memory."""
    if tensors[0].device.type == "cpu":
        for _, _, flat in runs(tensors):
            shift_by_sign(flat, above, below, out=flat)
        return list(tensors)
    return [shift_by_sign(tensor, above, below) for tensor in tensors]


# The upper bits of fp32 magnitudes, of exponent and mantissa, order them; those that share them lie within an eighth.
_BIN_BITS = 11
_SHIFT = 31 - _BIN_BITS
_CPU_CHUNK = 1 << 17  # elements binned at a time: their copies (half a MiB each) stay in a second-level cache
_DEVICE_CHUNK = 1 << 23  # 32 MiB each: off the CPU the host waits for every chunk


def magnitude_histogram(tensor: Tensor) -> Tensor:
    """Count magnitudes, int64 ``[2048]``: eight bins a power of two, from zero up; off the CPU the host waits."""
    histogram = torch.zeros(1 << _BIN_BITS, dtype=torch.int64, device=tensor.device)
    for piece in tensor.split(_CPU_CHUNK if tensor.device.type == "cpu" else _DEVICE_CHUNK):
        bins = piece.abs().float().view(torch.int32).bitwise_right_shift_(_SHIFT)
        histogram += torch.bincount(bins, minlength=1 << _BIN_BITS)
    return histogram


def magnitude_quantile(histogram: Tensor, count: int) -> float:
    """Read off a sum of histograms, float64, the magnitude that about ``count`` elements reach; 0 for want of them.

    Within a bin the logarithm of the number reaching a magnitude is taken to be straight in that of the magnitude: at
    densities around 0.001 off by some 2 % of the count for a normal distribution.

        >>> counted = magnitude_histogram(torch.linspace(0, 1, 1001)).double()
        >>> round(magnitude_quantile(counted, 100), 2)
        0.9
    """
    histogram = histogram.cpu()
    reaching = histogram.flip(0).cumsum(0).flip(0)
    # The last bin that enough elements reach; only a bin with elements can be the last.
    chosen = int(torch.searchsorted(-reaching, -count, right=True)) - 1
    if chosen <= 0:
        return 0.0
    edges = torch.tensor([chosen, chosen + 1], dtype=torch.int32).bitwise_left_shift_(_SHIFT).view(torch.float32)
    # The bits beyond the last number are those of infinity and NaN: what float64 holds and fp32 does not.
    limit = torch.finfo(torch.float32).max
    lower, upper = edges.nan_to_num_(nan=limit, posinf=limit).tolist()
    reaching_lower, reaching_upper = (*reaching[chosen : chosen + 2].tolist(), 0.0)[:2]
    # The largest magnitude of all is half an element from the edge that none reaches.
    share = math.log(reaching_lower / count) / math.log(reaching_lower / max(reaching_upper, 0.5))
    return float(lower * (upper / lower) ** share)


_CHUNK = 1 << 20  # elements widened at a time, so that a large tensor needs no copy of its own size
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 over the golden ratio, as int64: multiples of it are spread over all bits
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: Tensor) -> Tensor:
    """Add up the bits of all elements, each multiplied by a number of its place, modulo ``2 ** 64``; int64 ``[]``.

    One changed element always changes it (its factor is odd); several cancel by a chance of one in ``2 ** 64``.
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
