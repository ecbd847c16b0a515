"""A number that tells tensors apart that differ in any bit."""

import torch
from torch import Tensor

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
