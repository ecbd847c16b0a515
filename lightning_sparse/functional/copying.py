"""Copying between a flat tensor and shards or elements of it, and out of a wire."""

from typing import Optional

import torch
from torch import Tensor

# put_ adds so few in order, in one call for index_add_'s three; of some 30 000 (torch 2.13) threads add in any order.
_FEW = 1 << 12


def read_as(wires: Tensor, dtype: torch.dtype) -> Tensor:
    """Read part of what has arrived, uint8 ``[ranks, nbytes]``, as a type: a copy, and so aligned."""
    if not wires.numel():
        return wires.new_empty(*wires.shape, dtype=dtype)  # torch refuses a view of nothing as a wider type
    return wires.clone(memory_format=torch.contiguous_format).view(dtype)


def laid_flat(tensor: Tensor, like: Optional[Tensor] = None) -> Tensor:
    """Return a tensor flat, in the order of its memory or that of ``like``, as DDP lays its gradient."""
    if like is not None and tensor.stride() != like.stride():
        tensor = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def copy_elements(source: Tensor, out: Tensor) -> Tensor:
    """Copy elements in order from a tensor of any shape, which may end in padding, to a flat one, in place."""
    if source.numel() == out.numel():
        out.view(source.shape).copy_(source)
        return out
    return out.copy_(source.reshape(-1)[: out.numel()])


def add_rows(values: Tensor, indices: Tensor, out: Tensor) -> Tensor:
    """Add to a flat tensor, in place, what several ranks sent of it, rank by rank.

    Indices, int64 ``[ranks, count]`` like the values, are distinct in each row.

        >>> add_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0, 2], [1, 2]]), torch.zeros(3))
        tensor([1., 3., 6.])
    """
    if out.device.type == "cpu":
        if indices.numel() <= _FEW:
            return out.put_(indices, values, accumulate=True)
        return out.index_add_(0, indices.flatten(), values.flatten())
    # One call for all ranks. It sorts by place, and so adds in an order that all ranks share; index_add_ promises none.
    return out.index_put_((indices.flatten(),), values.flatten(), accumulate=True)
