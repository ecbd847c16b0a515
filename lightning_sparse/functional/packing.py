"""Packing: small integers written side by side, bit by bit, without a gap."""

import torch
from torch import Tensor

# Eight codes of b bits fill b bytes exactly, for every b.
_CODES_PER_WORD = 8
# Temporaries of a piece stay in the cache, and their memory is used again for the next piece.
_PIECE = 1 << 18


def packed_nbytes(count: int, bits: int) -> int:
    """Return the bytes that ``count`` codes of ``bits`` bits take: ``bits`` for every eight codes begun.

    Example::

        >>> packed_nbytes(count=17, bits=3)
        9
    """
    return -(-count // _CODES_PER_WORD) * bits


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Write codes side by side.

    Args:
        codes: uint8 ``[count]``, each below ``2 ** bits``.
        bits: width of a code, 1 to 8.

    Returns:
        uint8 ``[packed_nbytes(count, bits)]``; bits that no code fills are zero.

    Example::

        >>> packed = pack_codes(torch.tensor([1, 0, 7, 3], dtype=torch.uint8), bits=3)
        >>> packed.numel()
        3
        >>> unpack_codes(packed, bits=3, count=4)
        tensor([1, 0, 7, 3], dtype=torch.uint8)
    """
    packed = codes.new_empty(packed_nbytes(codes.numel(), bits))
    for piece, out in zip(codes.split(_PIECE), packed.split(packed_nbytes(_PIECE, bits))):
        octets = torch.nn.functional.pad(piece, (0, -piece.numel() % _CODES_PER_WORD)).view(-1, _CODES_PER_WORD)
        _write_bytes(_words(octets, bits), out.view(-1, bits), 8)
    return packed


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """Read what :func:`pack_codes` wrote.

    Args:
        packed: uint8 ``[packed_nbytes(count, bits)]``.
        bits: width of a code, 1 to 8.
        count: number of codes.

    Returns:
        uint8 ``[count]``.
    """
    codes = packed.new_empty(packed_nbytes(count, 8))
    for piece, out in zip(packed.split(packed_nbytes(_PIECE, bits)), codes.split(_PIECE)):
        _write_bytes(_words(piece.view(-1, bits), 8), out.view(-1, _CODES_PER_WORD), bits)
    return codes[:count]


def _words(columns: Tensor, width: int) -> Tensor:
    # Shifts, and not a view of the word as bytes: those would depend on the order of bytes in the machine.
    word = columns[:, 0].long()
    for position in range(1, columns.shape[1]):
        word |= columns[:, position].long() << (width * position)
    return word


def _write_bytes(words: Tensor, out: Tensor, width: int) -> None:
    for position in range(out.shape[1]):
        out[:, position] = (words >> (width * position)) & ((1 << width) - 1)
