"""Copying between a flat tensor and shards or elements of it, and out of a wire."""

from typing import Optional

import torch
from torch import Tensor

# Elements that put_ adds one after the other, in one call where index_add_ needs three. Of many, some 30 000 in torch
# 2.13, its threads add all at once, in an order that no two ranks share.
_FEW = 1 << 12


def read_as(wires: Tensor, dtype: torch.dtype) -> Tensor:
    """Read bytes as another type.

    Args:
        wires: uint8 ``[ranks, nbytes]``, part of what has arrived.
        dtype: type that was written.

    Returns:
        tensor of that type, ``[ranks, nbytes / itemsize]``: a copy, and so aligned, whatever stands beside it.
    """
    if not wires.numel():
        return wires.new_empty(*wires.shape, dtype=dtype)  # torch refuses a view of nothing as a wider type
    return wires.clone(memory_format=torch.contiguous_format).view(dtype)


def laid_flat(tensor: Tensor, like: Optional[Tensor] = None) -> Tensor:
    """Return a tensor flat, in the order of memory, as DDP lays its gradient.

    Args:
        tensor: whose elements fill its memory, each place once, in whatever order.
        like: in whose order they are wanted; ``None`` for its own.

    Returns:
        a view where the tensor lies as ``like`` does, else a copy.

    Example::

        >>> laid_flat(torch.tensor([[1, 2], [3, 4]]).t())
        tensor([1, 2, 3, 4])
    """
    if like is not None and tensor.stride() != like.stride():
        tensor = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def copy_elements(source: Tensor, out: Tensor) -> Tensor:
    """Copy elements in order from a tensor of any shape, which may end in padding, to a flat one.

    Args:
        source: at least as many elements as ``out``.
        out: flat tensor; changed in place.

    Returns:
        ``out``.

    Example::

        >>> copy_elements(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.empty(3))
        tensor([1., 2., 3.])
    """
    if source.numel() == out.numel():
        out.view(source.shape).copy_(source)
        return out
    return out.copy_(source.reshape(-1)[: out.numel()])


def add_rows(values: Tensor, indices: Tensor, out: Tensor) -> Tensor:
    """Add what several ranks sent of a tensor, rank by rank.

    Args:
        values: ``[ranks, count]``.
        indices: int64 of the same shape, distinct in each row, not between rows.
        out: flat tensor; changed in place.

    Returns:
        ``out``.

    Example::

        >>> add_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0, 2], [1, 2]]), torch.zeros(3))
        tensor([1., 3., 6.])
    """
    if out.device.type == "cpu":
        if indices.numel() <= _FEW:
            return out.put_(indices, values, accumulate=True)
        return out.index_add_(0, indices.flatten(), values.flatten())
    # One call, however many ranks there are. It sorts by place, and so adds what is at one place in an order that is
    # the same on all ranks; index_add_ promises none.
    return out.index_put_((indices.flatten(),), values.flatten(), accumulate=True)
