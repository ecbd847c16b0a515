"""Selections of a tensor's elements (indices and values), and flat selections of all tensors of a bucket.

Many small tensors cost more in kernel launches than in elements. The small gradients of a bucket are therefore
adjacent in memory, and a single call reads, writes or adds all these gradients.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.functional.elements import (
    Counts,
    add_rows,
    copy_elements,
    repeat_interleave,
    runs,
    starts_of,
)


class SelectionSize(NamedTuple):
    """Size of a selection. Ranks compute the size of the message from these numbers before the gradient exists.

    Attributes:
        numel: number of elements of the tensor.
        selected: number of selected elements per rank, padding included.
        is_dense: whether every element is sent, without indices.
    """

    numel: int
    selected: int
    is_dense: bool = False


class Selection(NamedTuple):
    """Some elements of a flat tensor.

    Attributes:
        values: floating point, ``[count]``, or ``[world_size, count]`` for the selections of several ranks.
        indices: int64 of the shape of ``values``, distinct and ascending in each row. ``None`` if all elements are
            selected, in order: ``values`` may then have any shape, and end in padding.
        numel: number of elements of the tensor.
        filled: bool ``[count]``, false for padding, which the message replaces by zero. ``None`` without padding.
    """

    values: Tensor
    indices: Optional[Tensor]
    numel: int
    filled: Optional[Tensor] = None


@dataclass(eq=False)
class FlatSelection(Sequence[Selection]):
    """The selected elements of all tensors of a bucket. Item ``i`` of the sequence is the selection of tensor ``i``.

    ``values`` is a tensor ``[count]``, or ``[world_size, count]`` with a row for each rank. ``indices`` (int64, same
    shape) are indices into the flattened bucket, ascending in each row. Tensor ``i`` has ``numels[i]`` elements, and
    ``counts[i]`` selected elements. ``filled`` is as in :class:`~lightning_sparse.Selection`.
    """

    values: Tensor
    indices: Tensor
    numels: Counts
    counts: Counts
    filled: Optional[Tensor] = None

    @classmethod
    def of(cls, tensors: Sequence[Tensor], indices: Sequence[Tensor]) -> "FlatSelection":
        """Select elements of flat tensors by ascending indices, int64 ``[count]`` for each tensor."""
        numels, counts = tuple(map(Tensor.numel, tensors)), tuple(map(Tensor.numel, indices))
        return cls.at(tensors, torch.cat(list(indices)).add_(_origins(numels, counts, tensors[0].device)), counts)

    @classmethod
    def at(cls, tensors: Sequence[Tensor], indices: Tensor, counts: Counts) -> "FlatSelection":
        """Select elements by indices into the flattened bucket. ``counts[i]`` of the indices are in tensor ``i``."""
        values = tensors[0].new_empty(len(indices))
        selected = cls(values, indices, tuple(map(Tensor.numel, tensors)), counts)
        for flat, places, found in selected.runs(tensors):
            torch.index_select(flat, 0, places, out=found)
        return selected

    def replaced(self, values: Tensor, indices: Tensor) -> "FlatSelection":
        """Return a selection with new values and indices, and with the same counts. All elements count as sent."""
        return FlatSelection(values, indices, self.numels, self.counts)

    @override
    def __len__(self) -> int:
        return len(self.numels)

    @override
    def __getitem__(self, place: Any) -> Any:
        return self._members[place]

    @cached_property
    def _members(self) -> list[Selection]:
        indices = self.indices - _origins(self.numels, self.counts, self.values.device)
        filled = [None] * len(self) if self.filled is None else self.filled.split(self.counts)
        pieces = zip(self.values.split(self.counts, -1), indices.split(self.counts, -1), self.numels, filled)
        return [Selection(*piece) for piece in pieces]

    def runs(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each run of tensors that are adjacent in memory, yield a flat view, the selected indices, and values."""
        starts, columns = starts_of(self.numels), starts_of(self.counts)
        for first, stop, flat in runs(tensors):
            some = slice(columns[first], columns[stop])
            indices = self.indices[..., some]
            yield flat, indices - starts[first] if first else indices, self.values[..., some]


def broken_rule(selection: Selection, numel: int, size: Optional[SelectionSize] = None) -> Optional[str]:
    """Describe a rule that the selection breaks, or return ``None``. ``size`` is the announced size, if there is one.

    Example::

        >>> broken_rule(Selection(torch.ones(2), torch.tensor([3, 1]), 4), 4)
        'with indices that are not distinct and ascending'
    """
    values, indices = selection.values, selection.indices
    if selection.numel != numel:
        return f"with numel={selection.numel} instead of {numel}"
    if indices is None:
        return None
    if indices.dtype is not torch.int64 or indices.dim() != 1 or values.shape != indices.shape:
        return f"of values {tuple(values.shape)} and {indices.dtype} indices {tuple(indices.shape)}, not int64 [count]"
    if size is not None and len(indices) != size.selected:
        return f"with {len(indices)} indices, although selection_size() announces {size.selected}"
    if not len(indices):
        return None
    least, most = map(int, indices.aminmax())
    if least < 0 or most >= numel:
        return f"with an index out of range: {least if least < 0 else most}"
    return None if bool((indices.diff() > 0).all()) else "with indices that are not distinct and ascending"


def whole(tensors: Sequence[Tensor]) -> list[Selection]:
    """Select all elements of flat tensors."""
    return [Selection(tensor, None, tensor.numel()) for tensor in tensors]


def end_to_end(selections: Sequence[Selection]) -> FlatSelection:
    """Concatenate selections of single tensors to one flat selection."""
    if isinstance(selections, FlatSelection):
        return selections
    values = torch.cat([each.values for each in selections], dim=-1)
    rows = [torch.arange(numel, device=values.device) if row is None else row for _, row, numel, _ in selections]
    numels, counts = tuple(each.numel for each in selections), tuple(row.shape[-1] for row in rows)
    filled = None
    if any(each.filled is not None for each in selections):
        ones = values.new_ones(len(values), dtype=torch.bool).split(counts)
        filled = torch.cat([one if each.filled is None else each.filled for one, each in zip(ones, selections)])
    indices = torch.cat(rows, dim=-1) + _origins(numels, counts, values.device)
    return FlatSelection(values, indices, numels, counts, filled)


def grouped(selections: Sequence[Selection]) -> Sequence[Selection]:
    """Concatenate the selections of a bucket. If every selection has all elements, return ``selections`` unchanged."""
    are_dense = not isinstance(selections, FlatSelection) and all(each.indices is None for each in selections)
    return selections if are_dense else end_to_end(selections)


def overwrite(tensors: Sequence[Tensor], selections: Sequence[Selection]) -> None:
    """Write one rank's selected values into flat tensors, in place. ``selections`` is a result of :func:`grouped`."""
    if isinstance(selections, FlatSelection):
        for flat, indices, values in selections.runs(tensors):
            flat.index_copy_(0, indices, values)
    elif all(selection.values.dim() == 1 for selection in selections):
        torch._foreach_copy_(list(tensors), [selection.values for selection in selections])
    else:
        for selection, tensor in zip(selections, tensors):
            copy_elements(selection.values, tensor)


def scatter(tensors: Sequence[Tensor], selections: Sequence[Selection]) -> None:
    """Set flat tensors to the sums of selected values, added rank by rank. Elements without a value become zero."""
    if not isinstance(selections, FlatSelection):
        overwrite(tensors, selections)
        return
    for flat, indices, values in selections.runs(tensors):
        add_rows(values, indices, flat.zero_())


def _origins(numels: Counts, counts: Counts, device: torch.device) -> Tensor:
    """Return, for each selected element, the offset of the element's tensor in the flattened bucket."""
    return repeat_interleave(starts_of(numels)[:-1], counts, device)


def sent_count(selection: Union[Selection, FlatSelection]) -> Union[int, Tensor]:
    """Return the number of elements that a rank sends, without a synchronization."""
    return selection.values.numel() if selection.filled is None else selection.filled.sum()
