"""Quantization to 2 or 4 bits per value, with one scale per block of values or with one mean per bin of values.

SparseLoCo (Sarfi et al., arXiv 2508.15706) sorts the values that top-k selected into bins. The released code rounds to
the nearest of four levels that are not symmetric about the mean. Here the range of three standard deviations above
and below the mean is divided into equal bins. Equal bins have a smaller error for large values of both signs. A zero
stays zero: if a tensor has zeros, the uppermost bin has only zeros, and the largest values are in the bin below.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sparse.functional.elements import Counts, add_rows, copied_to, read_as, repeat_interleave, round_to

BLOCK = 64  # elements that share a 16-bit scale: a quarter of a bit per element
_SCALE = torch.bfloat16  # dtype of scales, with the range of fp32; a value above the rounded scale becomes the scale
_ZERO_BELOW = 0.75  # fraction of a block's mean magnitude; smaller values become 0. Almost optimal (arXiv 1605.04711)
_RANGE = 6.0  # standard deviations covered by all bins together; values beyond go to the outermost bins
BIN_MEANS = torch.bfloat16  # dtype of bin means; the sender adds the rounding error to the residual


def packed_nbytes(count: int, bits: int) -> int:
    """Return the bytes of ``count`` codes of 2 or 4 bits: ``bits`` bytes per eight codes, rounded up."""
    return -(-count // 8) * bits


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes, uint8 ``[count]``, each below ``2 ** bits``. Unused bits are zero."""
    by_byte = torch.nn.functional.pad(codes, (0, -codes.numel() % 8)).view(-1, 8 // bits)
    packed = by_byte[:, 0].clone()
    for place in range(1, 8 // bits):
        packed.bitwise_or_(by_byte[:, place] << (bits * place))
    return packed


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpack codes from :func:`pack_codes`, uint8 ``[count]``."""
    codes = packed.new_empty(packed.numel(), 8 // bits)
    for place in range(8 // bits):
        codes[:, place] = (packed >> (bits * place)) & ((1 << bits) - 1)
    return codes.view(-1)[:count]


def quantized_nbytes(numel: int, bits: int) -> int:
    """Return the bytes of ``numel`` quantized elements. ``numel`` must be a multiple of ``BLOCK``."""
    return numel * bits // 8 + numel // BLOCK * _SCALE.itemsize


def quantize(rows: Tensor, bits: int) -> Tensor:
    """Round the values of each block to ``2 ** bits - 1`` equidistant levels from ``-scale`` to ``scale``.

    The 4-bit scale is the block's largest magnitude. With 2 bits, this scale would round nearly all values to 0, so the
    2-bit scale is the mean magnitude of the larger values: only small values round to 0. ``rows`` is floating
    point ``[rows, numel]``, with ``numel`` a multiple of ``BLOCK``; ``bits`` is 2 or 4. Returns uint8 ``[rows,
    quantized_nbytes(numel, bits)]``, scales first. A non-finite value makes all values of the block non-finite.

        >>> values = torch.tensor([[3.0, -7.0, 0.4, *[0.0] * 61]])
        >>> dequantize(quantize(values, bits=4), bits=4)[0, :4]
        tensor([ 3., -7.,  0.,  0.])
    """
    levels = (1 << bits - 1) - 1
    blocks = rows.view(-1, BLOCK)
    scales = round_to(blocks.abs().amax(dim=1), _SCALE)
    divisors = scales.to(rows.dtype).masked_fill_(scales == 0, 1.0).unsqueeze(1)
    parts = blocks / divisors
    if levels == 1:
        magnitudes = parts.abs()
        magnitudes.masked_fill_(magnitudes < _ZERO_BELOW * magnitudes.mean(dim=1, keepdim=True), 0.0)
        means = magnitudes.sum(dim=1) / magnitudes.count_nonzero(dim=1).clamp_(min=1)
        scales = round_to(means.mul_(divisors.squeeze(1)), _SCALE)
        parts = parts.sign_().where(magnitudes != 0, 0.0)
    codes = parts.mul_(levels).round_().nan_to_num_(nan=0.0).clamp_(-levels, levels).add_(levels)
    packed = pack_codes(codes.to(torch.uint8).flatten(), bits)
    return torch.cat([scales.view(len(rows), -1).view(torch.uint8), packed.view(len(rows), -1)], dim=1)


def dequantize(written: Tensor, bits: int) -> Tensor:
    """Return the values written by :func:`quantize` on one or more ranks, as fp32 ``[rows, numel]``."""
    levels = (1 << bits - 1) - 1
    blocks = written.shape[1] // quantized_nbytes(BLOCK, bits)
    scale_bytes = blocks * _SCALE.itemsize
    scales = read_as(written[:, :scale_bytes], _SCALE).float()
    codes = unpack_codes(written[:, scale_bytes:].reshape(-1), bits, len(written) * blocks * BLOCK)
    values = codes.float().sub_(levels).view(len(written), blocks, BLOCK)
    return values.mul_(scales.div_(levels).unsqueeze(2)).view(len(written), -1)


def bin_values(values: Tensor, counts: Sequence[int], bits: int) -> tuple[Tensor, Tensor]:
    """Sort the values of several concatenated tensors into ``2 ** bits`` bins per tensor.

    Returns codes, uint8 ``[sum(counts)]``, and means, bfloat16 ``[tensors * 2 ** bits]``, zero for an empty bin. A
    non-finite value makes the mean of a bin non-finite. A zero is decoded as zero.

        >>> codes, means = bin_values(torch.tensor([-4.0, -3.0, 3.0, 5.0]), [4], bits=2)
        >>> codes.tolist(), values_of_bins(codes, means, [4], bits=2).tolist()
        ([1, 1, 2, 2], [-3.5, -3.5, 4.0, 4.0])
        >>> codes, means = bin_values(torch.tensor([-4.0, -3.0, 0.0, 3.0, 5.0]), [5], bits=2)
        >>> codes.tolist(), values_of_bins(codes, means, [5], bits=2).tolist()
        ([1, 1, 3, 2, 2], [-3.5, -3.5, 0.0, 4.0, 4.0])
    """
    bins = 1 << bits
    wide, tensor = values.double(), _tensor_of_each(tuple(counts), values.device)
    is_zero = wide == 0
    sizes = _sums(is_zero.logical_not().double(), tensor, len(counts))
    has_zeros = sizes < copied_to(tuple(counts), sizes.device)
    sizes.clamp_(min=1.0)
    centred = wide - (_sums(wide, tensor, len(counts)) / sizes)[tensor]
    width = (
        (_sums(centred.square().masked_fill_(is_zero, 0.0), tensor, len(counts)) / sizes).sqrt_().mul_(_RANGE / bins)
    )
    codes = centred.div_(width[tensor]).add_(bins / 2).floor_().nan_to_num_(nan=0.0).clamp_(min=0)
    codes = codes.minimum(bins - 1 - has_zeros.double()[tensor]).masked_fill_(is_zero, bins - 1)
    place = tensor.mul_(bins).add_(codes.long())
    sizes = _sums(torch.ones_like(wide), place, len(counts) * bins)
    means = _sums(wide, place, len(counts) * bins) / sizes.clamp_(min=1.0)
    return codes.to(torch.uint8), round_to(means, BIN_MEANS)


def values_of_bins(codes: Tensor, means: Tensor, counts: Sequence[int], bits: int) -> Tensor:
    """Return the values written by :func:`bin_values` on one or more ranks, as fp32 in the shape of ``codes``."""
    places = codes.long().add_(_tensor_of_each(tuple(counts), codes.device), alpha=1 << bits)
    return means.float().gather(-1, places)


def _tensor_of_each(counts: Counts, device: torch.device) -> Tensor:
    return repeat_interleave(tuple(range(len(counts))), counts, device)


def _sums(values: Tensor, places: Tensor, number: int) -> Tensor:
    return add_rows(values[None], places[None], values.new_zeros(number))
