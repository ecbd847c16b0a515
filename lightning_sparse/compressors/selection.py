"""What travels between the nouns: elements of a tensor, with their values; those of a group are one flat thing.

A model's many small tensors cost more in calls than in elements. The small gradients of a group are laid beside each
other, and are read, written and added at once.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from threading import local
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.functional.elements import add_rows, copy_elements


class SelectionSize(NamedTuple):
    """Size of a selection, known before there is a gradient: it says how many bytes sending takes.

    Attributes:
        numel: number of elements of the tensor selected from.
        selected: how many of them are, padding included: by each rank, or by all ranks together where they send at the
            union of their choices.
        is_dense: whether every element is sent, without indices.
    """

    numel: int
    selected: int
    is_dense: bool = False


class Selection(NamedTuple):
    """Some elements of a flat tensor.

    Attributes:
        values: floating point, ``[count]``, or ``[ranks, count]`` where several ranks selected.
        indices: int64 of the same shape, distinct and ascending in each row; ``None`` stands for every element, in
            order; ``values`` may then have any shape, and end in padding.
        numel: number of elements of the tensor selected from.
        filled: bool ``[count]``: which are sent, ``None`` for all; others stay here, a zero in their place.
    """

    values: Tensor
    indices: Optional[Tensor]
    numel: int
    filled: Optional[Tensor] = None


Counts = tuple[int, ...]  # of elements, by tensor


class FlatSelection(Sequence[Selection]):
    """Some elements of each tensor of a group; as a sequence, a selection of each, which most steps do not ask for.

    ``values`` are ``[count]``, or ``[ranks, count]`` where several ranks selected, ``indices`` int64 of the same shape,
    within the tensors, of ``numels`` each, laid end to end and ascending in each row; ``counts`` are how many of a row
    are each tensor's, ``filled`` is as in :class:`~lightning_sparse.Selection`.
    """

    def __init__(
        self, values: Tensor, indices: Tensor, numels: Counts, counts: Counts, filled: Optional[Tensor] = None
    ) -> None:
        self.values = values
        self.indices = indices
        self.numels = numels
        self.counts = counts
        self.filled = filled

    @classmethod
    def of(cls, tensors: Sequence[Tensor], indices: Sequence[Tensor]) -> "FlatSelection":
        """Select elements of flat tensors by their indices, int64 ``[count]`` for each and ascending."""
        numels, counts = tuple(map(Tensor.numel, tensors)), tuple(map(Tensor.numel, indices))
        return cls.at(tensors, torch.cat(list(indices)).add_(_origins(numels, counts, tensors[0].device)), counts)

    @classmethod
    def at(cls, tensors: Sequence[Tensor], indices: Tensor, counts: Counts) -> "FlatSelection":
        """Select elements of flat tensors by indices into all of them laid end to end, so many of each."""
        values = tensors[0].new_empty(len(indices))
        selected = cls(values, indices, tuple(map(Tensor.numel, tensors)), counts)
        for flat, run_indices, run_values in selected.runs(tensors):
            torch.index_select(flat, 0, run_indices, out=run_values)
        return selected

    def replaced(self, values: Tensor, indices: Tensor) -> "FlatSelection":
        """Return as many elements of each tensor, of as many rows as there are, all of them sent."""
        return FlatSelection(values, indices, self.numels, self.counts)

    def filled_at(self, filled: Tensor) -> "FlatSelection":
        """Return the same elements, of which only those are sent where ``filled``, bool ``[count]``, is true."""
        return FlatSelection(self.values, self.indices, self.numels, self.counts, filled)

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
        """Yield tensors beside each other as one, with indices and values of what is selected of it."""
        starts, columns = starts_of(self.numels), starts_of(self.counts)
        found = list(runs(tensors))
        numels, counts = (tuple(each[stop] - each[first] for first, stop, _ in found) for each in (starts, columns))
        indices = self.indices
        if len(found) > 1:
            indices = indices - _origins(numels, counts, indices.device)
        return zip((flat for *_, flat in found), indices.split(counts, -1), self.values.split(counts, -1))


def whole(tensors: Sequence[Tensor]) -> list[Selection]:
    """Select all of flat tensors."""
    return [Selection(tensor, None, tensor.numel()) for tensor in tensors]


def end_to_end(selections: Sequence[Selection]) -> FlatSelection:
    """Lay selections of single tensors end to end."""
    if isinstance(selections, FlatSelection):
        return selections
    each = [_indices(selection) for selection in selections]
    numels, counts = tuple(one.numel for one in selections), tuple(indices.shape[-1] for indices in each)
    values = torch.cat([selection.values for selection in selections], dim=-1)
    filled = None
    if any(selection.filled is not None for selection in selections):
        filled = torch.cat([_filled(selection) for selection in selections])
    indices = torch.cat(each, dim=-1) + _origins(numels, counts, values.device)
    return FlatSelection(values, indices, numels, counts, filled)


def grouped(selections: Sequence[Selection]) -> Sequence[Selection]:
    """Return selections that travel together as they are if all are whole, and else laid end to end."""
    is_flat = isinstance(selections, FlatSelection)
    if is_flat or all(selection.indices is None for selection in selections):
        return selections
    return end_to_end(selections)


def overwrite(tensors: Sequence[Tensor], selections: Sequence[Selection]) -> None:
    """Write the values of :func:`grouped` selections of one rank over flat tensors at these places, in place."""
    if isinstance(selections, FlatSelection):
        for flat, indices, values in selections.runs(tensors):
            flat.index_copy_(0, indices, values)
    elif all(selection.values.dim() == 1 for selection in selections):
        torch._foreach_copy_(list(tensors), [selection.values for selection in selections])
    else:
        for selection, tensor in zip(selections, tensors):
            copy_elements(selection.values, tensor)


def scatter(tensors: Sequence[Tensor], selections: Sequence[Selection]) -> None:
    """Make flat tensors, in place, what the values add up to, rank by rank, and zero where nobody selected."""
    if not isinstance(selections, FlatSelection):
        overwrite(tensors, selections)
        return
    several = list(selections.runs(tensors))
    torch._foreach_zero_([flat for flat, _, _ in several])
    for flat, indices, values in several:
        add_rows(values, indices, flat)


class _Known(local):
    """Groups are the same step after step; by thread, since what a device's stream has copied it alone reads."""

    def __init__(self) -> None:
        self.copied_to = lru_cache(maxsize=512)(
            lambda numbers, device: torch.tensor(numbers).to(device, non_blocking=True)
        )


_known = _Known()


def copied_to(numbers: Counts, device: torch.device) -> Tensor:
    """Return numbers as int64 ``[count]`` on a device; the latest are remembered, so that no copy stops the host."""
    known: Tensor = _known.copied_to(numbers, device)
    return known


@lru_cache(maxsize=512)
def starts_of(numels: Counts) -> Counts:
    """Return where tensors of so many elements start when laid end to end, and where the last one ends."""
    return tuple(accumulate(numels, initial=0))


def counts_of(indices: Tensor, numels: Counts) -> Counts:
    """Return how many ascending indices lie in each of tensors laid end to end; the host waits for a GPU."""
    places: list[int] = torch.searchsorted(indices, copied_to(starts_of(numels), indices.device)).tolist()
    return tuple(last - first for first, last in pairwise(places))


def repeat_each(numbers: Counts, counts: Counts, device: torch.device) -> Tensor:
    """Return the number of its tensor for each element, so many of each, int64 ``[sum(counts)]``."""
    # The size is known: a GPU need not be asked for it.
    return copied_to(numbers, device).repeat_interleave(copied_to(counts, device), output_size=sum(counts))


def _origins(numels: Counts, counts: Counts, device: torch.device) -> Tensor:
    """Return for each element selected where its tensor starts."""
    return repeat_each(starts_of(numels)[:-1], counts, device)


def _indices(selection: Selection) -> Tensor:
    if selection.indices is None:
        return torch.arange(selection.numel, device=selection.values.device)
    return selection.indices


def _filled(selection: Selection) -> Tensor:
    return torch.ones_like(selection.values, dtype=torch.bool) if selection.filled is None else selection.filled


def sent_count(selection: Union[Selection, FlatSelection]) -> Union[int, Tensor]:
    """Return how many elements a rank sends, without asking the device for it."""
    return selection.values.numel() if selection.filled is None else selection.filled.sum()


def runs(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int, Tensor]]:
    """Find tensors, flat, contiguous, of one type, none empty, that lie beside each other in memory, in order.

    Yields the place of a run's first tensor, that after its last, and one flat tensor that shares their memory.
    """
    first = 0
    while first < len(tensors):
        head = tensors[first]
        storage = head.untyped_storage()
        start, stop = head.data_ptr(), first + 1
        end, limit = start + head.nbytes, storage.data_ptr() + storage.nbytes()
        # Memory that only happens to lie behind is not of this storage.
        while stop < len(tensors) and tensors[stop].data_ptr() == end and end < limit:
            end += tensors[stop].nbytes
            stop += 1
        yield first, stop, head if stop == first + 1 else head.as_strided(((end - start) // head.itemsize,), (1,))
        first = stop
