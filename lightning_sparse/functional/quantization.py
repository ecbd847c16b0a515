"""Values in few bits: blocks of them share a scale, which is the block's largest magnitude."""

import torch
from torch import Tensor

from lightning_sparse.functional.copying import read_as
from lightning_sparse.functional.packing import pack_codes, unpack_codes
from lightning_sparse.functional.rounding import round_to

BLOCK = 64  # elements that share a scale, which adds a quarter of a bit to each
_SCALE = torch.bfloat16  # it has the range of fp32; a value above the rounded scale is written as the scale


def quantized_nbytes(numel: int, bits: int) -> int:
    """Return the bytes that whole blocks of so many elements take."""
    return numel * bits // 8 + numel // BLOCK * _SCALE.itemsize


def quantize(rows: Tensor, bits: int) -> Tensor:
    """Round values to the nearest of ``2 ** bits - 1`` multiples of their block's scale.

    ``rows`` is floating point ``[rows, numel]``, a multiple of ``BLOCK``; a code has 2 to 8 bits. Returns uint8
    ``[rows, quantized_nbytes(numel, bits)]``, scales first; a value that is not finite makes its block so.

        >>> values = torch.tensor([[3.0, -7.0, 0.4, *[0.0] * 61]])
        >>> dequantize(quantize(values, bits=4), bits=4)[0, :4]
        tensor([ 3., -7.,  0.,  0.])
    """
    levels = (1 << bits - 1) - 1
    blocks = rows.view(-1, BLOCK)
    scales = round_to(blocks.abs().amax(dim=1), _SCALE)
    divisors = scales.to(rows.dtype).masked_fill_(scales == 0, 1.0).unsqueeze(1)
    codes = (blocks / divisors).mul_(levels).round_().nan_to_num_(nan=0.0).clamp_(-levels, levels).add_(levels)
    packed = pack_codes(codes.to(torch.uint8).flatten(), bits)
    return torch.cat([scales.view(len(rows), -1).view(torch.uint8), packed.view(len(rows), -1)], dim=1)


def dequantize(written: Tensor, bits: int) -> Tensor:
    """Read what :func:`quantize` wrote on one rank or on several, as fp32 ``[rows, numel]``."""
    levels = (1 << bits - 1) - 1
    blocks = written.shape[1] // quantized_nbytes(BLOCK, bits)
    scale_bytes = blocks * _SCALE.itemsize
    scales = read_as(written[:, :scale_bytes], _SCALE).float()
    codes = unpack_codes(written[:, scale_bytes:].reshape(-1), bits, len(written) * blocks * BLOCK)
    values = codes.float().sub_(levels).view(len(written), blocks, BLOCK)
    return values.mul_(scales.div_(levels).unsqueeze(2)).view(len(written), -1)
