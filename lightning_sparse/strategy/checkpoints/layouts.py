"""In which order of its dimensions a parameter lies in memory, and what is kept of it with it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def saved_layouts(parameters: Mapping[str, Tensor]) -> dict[str, list[list[int]]]:
    """Return, by name, the shape of each parameter and its dimensions in the order of memory, the fastest last.

    Example::

        >>> saved_layouts({"weight": torch.zeros(2, 3).t(), "bias": torch.zeros(3)})
        {'weight': [[3, 2], [1, 0]], 'bias': [[3], [0]]}
    """
    return {name: [list(parameter.shape), _order(parameter)] for name, parameter in parameters.items()}


def relaid(flat: Tensor, layout: Any, parameter: Tensor) -> Tensor:
    """Return what was kept of a parameter in the order in which it lies in memory now.

    Args:
        flat: in the order of memory when it was saved.
        layout: as :func:`saved_layouts` returned it then.
        parameter: as it is now.

    Raises:
        ValueError: if the shape has changed, or the layout is none.
    """
    shape, before, now = list(parameter.shape), _order_in(layout), _order(parameter)
    if layout[0] != shape or sorted(before) != list(range(len(shape))):
        raise ValueError(f"it was saved with the shape {layout[0]}, and has {shape} now")
    if before == now:
        return flat
    logical = flat.view([shape[each] for each in before]).permute([before.index(each) for each in range(len(shape))])
    return logical.permute(now).reshape(-1)


def _order_in(layout: Any) -> Sequence[int]:
    is_layout = isinstance(layout, list) and len(layout) == 2 and isinstance(layout[1], list)
    if not (is_layout and all(isinstance(each, int) for each in layout[1])):
        raise ValueError(f"{layout!r} is no layout")
    order: list[int] = layout[1]
    return order


def _order(parameter: Tensor) -> list[int]:
    """Return the order in which DDP lays out the gradient: the parameter's if it fills its memory, else row by row."""
    dimensions, strides = range(parameter.dim()), parameter.stride()
    if not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return list(dimensions)
    return sorted(dimensions, key=lambda each: -strides[each])
