"""Stochastic quantization: every element becomes one of a few multiples of a scale, and is right on average."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lightning_sparse.functional.rounding import round_to

# Temporaries of a piece stay in the cache, and their memory is used again for the next piece.
_PIECE = 1 << 18


def _euclidean(rows: Tensor) -> Tensor:
    # The sum of squares of fp32 numbers neither overflows nor vanishes in float64.
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms


def _largest(rows: Tensor) -> Tensor:
    return rows.abs().amax(dim=1)


NORMS: dict[str, Callable[[Tensor], Tensor]] = {"l2": _euclidean, "max": _largest}


def quantize(
    values: Tensor, levels: int, bucket_size: int, norm: str, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Round every element at random to one of the two nearest multiples of ``scale / levels``, right on average.

    With ``u = value / scale * levels``, the code is ``round(u + noise)``, where the noise is uniform in (-1/2, 1/2):
    one of the integers on both sides of ``u``, with the probabilities that make the mean ``u``. Zero is always zero,
    and no code leaves its range.

    The noise is ``(k + 1/2) / 2 ** 16``, where the ``k`` are the consecutive signed 16-bit parts of uniform 64-bit
    integers, which costs a third of ``torch.rand`` and shifts a mean by at most ``2 ** -17`` of a level. It is drawn
    for the whole buckets, 262 144 elements or one bucket at a time, and then for the short one at the end.

    Args:
        values: fp32 ``[numel]``; not changed.
        levels: largest code, 1 to 127.
        bucket_size: consecutive elements that share a scale; the last bucket may be shorter.
        norm: what the scale is of its bucket: ``"l2"``, the Euclidean norm, or ``"max"``, the largest magnitude. One
            beyond the range of fp32 becomes the largest that fits, which is still at least every element.
        generator: source of the noise, on the device of ``values``; moves on.

    Returns:
        ``codes``, int8 ``[numel]`` in ``[-levels, levels]``, and ``scales``, fp32 ``[ceil(numel / bucket_size)]``. The
        scale of a bucket with an element that is not finite is not finite either.

    Example::

        >>> quantize(torch.tensor([3.0, 0.0, -4.0, 9.0]), 5, 3, "l2", torch.Generator().manual_seed(0))
        (tensor([ 3,  0, -4,  5], dtype=torch.int8), tensor([5., 9.]))
    """
    codes = torch.empty_like(values, dtype=torch.int8)
    scales = [values.new_empty(0)]
    for rows, out in zip(_pieces(values, bucket_size), _pieces(codes, bucket_size)):
        scales.append(round_to(NORMS[norm](rows), torch.float32))
        divisors = scales[-1].masked_fill(scales[-1] == 0, 1.0).unsqueeze(1)
        # Quotients are at most one, and only then multiplied: so codes stay in range.
        units = (rows / divisors).mul_(levels)
        out.copy_(units.add_(_noise(rows, generator), alpha=2.0**-16).round_().nan_to_num_(nan=0.0))
    return codes, torch.cat(scales)


def bucket_views(tensor: Tensor, bucket_size: int) -> list[Tensor]:
    """Return the buckets of a flat tensor as rows: a matrix of the whole ones, then one of the short one at its end.

    Either is left out where there is none.

    Example::

        >>> [tuple(view.shape) for view in bucket_views(torch.zeros(7), 3)]
        [(2, 3), (1, 1)]
    """
    whole = tensor.numel() // bucket_size * bucket_size
    views = [tensor[:whole].view(-1, bucket_size), tensor[whole:].view(1, -1)]
    return [view for view in views if view.numel()]


def _pieces(tensor: Tensor, bucket_size: int) -> Iterator[Tensor]:
    for view in bucket_views(tensor, bucket_size):
        yield from view.split(max(1, _PIECE // bucket_size))


def _noise(rows: Tensor, generator: torch.Generator) -> Tensor:
    words = torch.empty(-(-rows.numel() // 4), dtype=torch.int64, device=rows.device)
    parts = words.random_(-(1 << 63), None, generator=generator).view(torch.int16)
    return parts[: rows.numel()].view_as(rows).to(rows.dtype).add_(0.5)
