"""Packing: small integers written side by side, bit by bit, without a gap."""

import math

import torch
from torch import Tensor

# A piece's temporaries stay in a CPU's cache. On a device few launches count more: 8 bytes a code are 64 MiB.
_CPU_PIECE, _DEVICE_PIECE = 1 << 18, 1 << 23


def packed_nbytes(count: int, bits: int) -> int:
    """Return the bytes that ``count`` codes of ``bits`` bits take: ``bits`` for every eight codes begun."""
    return -(-count // 8) * bits


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Write codes, uint8 ``[count]``, each below ``2 ** bits``, side by side; bits that no code fills are zero."""
    codes_each, bytes_each = _word_sizes(bits)
    packed = codes.new_empty(packed_nbytes(codes.numel(), bits))
    size = _piece(codes)
    for piece, out in zip(codes.split(size), packed.split(packed_nbytes(size, bits))):
        padded = torch.nn.functional.pad(piece, (0, -piece.numel() % 8))
        _write_parts(_words(padded.view(-1, codes_each), bits, bytes_each), out.view(-1, bytes_each), 8)
    return packed


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """Read what :func:`pack_codes` wrote, uint8 ``[count]``."""
    codes_each, bytes_each = _word_sizes(bits)
    codes = packed.new_empty(packed_nbytes(count, 8))
    size = _piece(packed)
    for piece, out in zip(packed.split(packed_nbytes(size, bits)), codes.split(size)):
        _write_parts(_words(piece.view(-1, bytes_each), 8, bytes_each), out.view(-1, codes_each), bits)
    return codes[:count]


def _piece(tensor: Tensor) -> int:
    return _CPU_PIECE if tensor.device.type == "cpu" else _DEVICE_PIECE


def _word_sizes(bits: int) -> tuple[int, int]:
    """Return the fewest codes that fill whole bytes, and these bytes."""
    shared = math.gcd(bits, 8)
    return 8 // shared, bits // shared


def _words(parts: Tensor, width: int, nbytes: int) -> Tensor:
    # Shifts, and not a view of the word as bytes: that would depend on the order of bytes in the machine.
    dtype = torch.uint8 if nbytes == 1 else torch.int64
    word = parts[:, 0].to(dtype)
    for position in range(1, parts.shape[1]):
        word = word | parts[:, position].to(dtype) << (width * position)
    return word


def _write_parts(words: Tensor, out: Tensor, width: int) -> None:
    for position in range(out.shape[1]):
        out[:, position] = (words >> (width * position)) & ((1 << width) - 1)
