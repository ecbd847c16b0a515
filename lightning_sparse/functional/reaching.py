"""The elements whose magnitude is not below a floor, in one tensor or in many at once."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Union

import torch
from torch import Tensor

from lightning_sparse.functional.candidates import WORD, flagged

CPU_CHUNK = 1 << 18  # magnitudes of a chunk (1 MiB) stay in a core's second-level cache between two passes
_FEW = 1 << 12  # elements below which fewer calls are worth more than fewer looks


def indices_reaching(tensor: Tensor, floor: Union[Tensor, float]) -> Tensor:
    """Find where a flat tensor's magnitude is not below a floor, int64, ascending; a NaN never is.

    Off the CPU the host waits for the number.
    """
    if tensor.device.type != "cpu" or tensor.numel() <= _FEW:
        return torch.lt(tensor.abs(), floor).logical_not_().nonzero().squeeze(1)
    chunk = min(CPU_CHUNK, -(-tensor.numel() // WORD) * WORD)
    magnitudes = tensor.new_empty(chunk)
    mask = torch.zeros(chunk, dtype=torch.bool)
    found = []
    for start in range(0, tensor.numel(), chunk):
        piece = tensor[start : start + chunk]
        numel = piece.numel()
        torch.lt(torch.abs(piece, out=magnitudes[:numel]), floor, out=mask[:numel]).logical_not_()
        mask[numel:] = False
        found.append(flagged(mask).add_(start))
    return torch.cat(found)


def indices_reaching_each(tensors: Sequence[Tensor], floor: Union[Tensor, float]) -> list[Tensor]:
    """Find the same in each of some tensors, of one type and device, all of them at once: the host waits twice."""
    several = [tensor for tensor in tensors if tensor.numel()]
    if len(several) < 2:
        nothing = torch.empty(0, dtype=torch.int64, device=tensors[0].device)
        return [indices_reaching(tensor, floor) if tensor.numel() else nothing for tensor in tensors]
    bounds = [0, *accumulate(tensor.numel() for tensor in tensors)]
    found = indices_reaching(torch.cat(several), floor)
    edges = torch.tensor(bounds).to(found.device, non_blocking=True)
    places: list[int] = torch.searchsorted(found, edges).tolist()
    return [found[first:last] - start for start, first, last in zip(bounds, places, places[1:])]
