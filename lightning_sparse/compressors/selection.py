"""What travels between the nouns: elements of a tensor, with their values; those of a group are one flat thing.

A model's many small tensors cost more in calls than in elements. The small gradients of a group are laid beside each
other, and are read, written and added at once.
"""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from threading import local
from typing import Any, NamedTuple, Optional, TypeVar, Union

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
        is_whole: whether every element is sent, without indices.
    """

    numel: int
    selected: int
    is_whole: bool = False


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


Key = TypeVar("Key", bound=Hashable)
Counts = tuple[int, ...]  # of elements, by tensor


class GroupSelection(Sequence[Selection]):
    """Elements of tensors of ``numels`` each; as a sequence, a selection of each, which most steps do not ask for."""

    is_whole: bool
    _members: Sequence[Selection]

    def __init__(self, numels: Counts) -> None:
        self.numels = numels

    @property
    def numel(self) -> int:
        """Number of elements of all tensors."""
        return sum(self.numels)

    @abstractmethod
    def flat(self) -> "FlatSelection":
        """Return the same as elements of the tensors laid end to end."""

    @abstractmethod
    def overwrite(self, tensors: Sequence[Tensor]) -> None:
        """Write the values, of one rank, over what flat tensors hold at these places, in place."""

    @abstractmethod
    def scatter(self, tensors: Sequence[Tensor]) -> None:
        """Make flat tensors, in place, what the ranks' values add up to, rank by rank, and zero elsewhere."""

    @override
    def __len__(self) -> int:
        return len(self.numels)

    @override
    def __getitem__(self, place: Any) -> Any:
        return self._members[place]


class WholeSelection(GroupSelection):
    """Every element of each tensor."""

    is_whole = True

    def __init__(self, selections: Sequence[Selection]) -> None:
        super().__init__(tuple(selection.numel for selection in selections))
        self._members = list(selections)

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "WholeSelection":
        """Select all of flat tensors."""
        return cls([Selection(tensor, None, tensor.numel()) for tensor in tensors])

    @override
    def flat(self) -> "FlatSelection":
        return FlatSelection.laid(self._members)

    @override
    def overwrite(self, tensors: Sequence[Tensor]) -> None:
        if all(selection.values.dim() == 1 for selection in self._members):
            torch._foreach_copy_(list(tensors), [selection.values for selection in self._members])
            return
        for selection, tensor in zip(self._members, tensors):
            copy_elements(selection.values, tensor)

    scatter = overwrite


class FlatSelection(GroupSelection):
    """Some elements of each tensor.

    ``values`` are ``[count]``, or ``[ranks, count]`` where several ranks selected, ``indices`` int64 of the same shape,
    within the tensors laid end to end and ascending in each row; ``counts`` are how many of a row are each tensor's,
    ``filled`` is as in :class:`~lightning_sparse.Selection`.
    """

    is_whole = False

    def __init__(
        self, values: Tensor, indices: Tensor, numels: Counts, counts: Counts, filled: Optional[Tensor] = None
    ) -> None:
        super().__init__(numels)
        self.values = values
        self.indices = indices
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
        for flat, run_indices, run_values in selected._runs(tensors):
            torch.index_select(flat, 0, run_indices, out=run_values)
        return selected

    @classmethod
    def laid(cls, selections: Sequence[Selection]) -> "FlatSelection":
        """Lay selections of single tensors end to end."""
        each = [_indices(selection) for selection in selections]
        numels, counts = tuple(one.numel for one in selections), tuple(indices.shape[-1] for indices in each)
        values = torch.cat([selection.values for selection in selections], dim=-1)
        filled = None
        if any(selection.filled is not None for selection in selections):
            filled = torch.cat([_filled(selection) for selection in selections])
        return cls(values, torch.cat(each, dim=-1) + _origins(numels, counts, values.device), numels, counts, filled)

    def replaced(self, values: Tensor, indices: Tensor) -> "FlatSelection":
        """Return as many elements of each tensor, of as many rows as there are, all of them sent."""
        return FlatSelection(values, indices, self.numels, self.counts)

    def filled_at(self, filled: Tensor) -> "FlatSelection":
        """Return the same elements, of which only those are sent where ``filled``, bool ``[count]``, is true."""
        return FlatSelection(self.values, self.indices, self.numels, self.counts, filled)

    @override
    def flat(self) -> "FlatSelection":
        return self

    @override
    def overwrite(self, tensors: Sequence[Tensor]) -> None:
        for flat, indices, values in self._runs(tensors):
            flat.index_copy_(0, indices, values)

    @override
    def scatter(self, tensors: Sequence[Tensor]) -> None:
        several = list(self._runs(tensors))
        torch._foreach_zero_([flat for flat, _, _ in several])
        for flat, indices, values in several:
            add_rows(values, indices, flat)

    @cached_property
    def _members(self) -> list[Selection]:  # type: ignore[override]
        indices = self.indices - _origins(self.numels, self.counts, self.values.device)
        filled = [None] * len(self) if self.filled is None else self.filled.split(self.counts)
        pieces = zip(self.values.split(self.counts, -1), indices.split(self.counts, -1), self.numels, filled)
        return [Selection(*piece) for piece in pieces]

    def _runs(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield tensors beside each other as one, with indices and values of what is selected of it."""
        starts, columns = starts_of(self.numels), starts_of(self.counts)
        found = list(runs(tensors))
        numels, counts = (tuple(each[stop] - each[first] for first, stop, _ in found) for each in (starts, columns))
        indices = self.indices
        if len(found) > 1:
            indices = indices - _origins(numels, counts, indices.device)
        return zip((flat for *_, flat in found), indices.split(counts, -1), self.values.split(counts, -1))


def parted(
    selections: Sequence[Selection], key_of: Callable[[int, Optional[int]], Key]
) -> list[tuple[Key, list[int], GroupSelection]]:
    """Part the selections of a group's tensors by how they travel, those with indices before those without.

    ``key_of`` takes the elements of a tensor and how many are selected, ``None`` for all. Returns each part's key,
    places and selection; one that has a single key stays the object that it was.
    """
    places: dict[tuple[bool, Key], list[int]] = {}
    for place, (numel, count) in enumerate(_sizes(selections)):
        places.setdefault((count is None, key_of(numel, count)), []).append(place)
    if len(places) == 1 and isinstance(selections, GroupSelection):
        [((_, key), every)] = places.items()
        return [(key, every, selections)]
    in_order = sorted(places.items(), key=lambda part: part[0][0])  # those without indices come last
    return [(key, some, grouped([selections[place] for place in some])) for (_, key), some in in_order]


def _sizes(selections: Sequence[Selection]) -> Iterable[tuple[int, Optional[int]]]:
    if isinstance(selections, FlatSelection):
        return zip(selections.numels, selections.counts)
    counts = (None if each.indices is None else each.indices.shape[-1] for each in selections)
    return ((each.numel, count) for each, count in zip(selections, counts))


def grouped(selections: Sequence[Selection]) -> GroupSelection:
    """Return the selections of single tensors as that of a group, with indices if any has some."""
    is_whole = all(selection.indices is None for selection in selections)
    return WholeSelection(selections) if is_whole else FlatSelection.laid(selections)


class _Known(local):
    """Groups are the same step after step; by thread, since what a device's stream has copied it alone reads."""

    def __init__(self) -> None:
        self.on_device = lru_cache(maxsize=512)(lambda numbers, device: torch.tensor(numbers).to(device))


_known = _Known()


def on_device(numbers: Counts, device: torch.device) -> Tensor:
    """Return numbers as int64 ``[count]`` on a device; the latest are remembered, so that no copy stops the host."""
    known: Tensor = _known.on_device(numbers, device)
    return known


@lru_cache(maxsize=512)
def starts_of(numels: Counts) -> Counts:
    """Return where tensors of so many elements start when laid end to end, and where the last one ends."""
    return tuple(accumulate(numels, initial=0))


def counts_of(indices: Tensor, numels: Counts) -> Counts:
    """Return how many ascending indices lie in each of tensors laid end to end; the host waits for a GPU."""
    places: list[int] = torch.searchsorted(indices, on_device(starts_of(numels), indices.device)).tolist()
    return tuple(last - first for first, last in pairwise(places))


def cut(selection: Selection, numels: Counts) -> GroupSelection:
    """Return what a selection from tensors laid end to end holds of each; the host waits for a GPU."""
    values, indices, _, filled = selection
    assert indices is not None
    return FlatSelection(values, indices, numels, counts_of(indices, numels), filled)


def of_each(numbers: Counts, counts: Counts, device: torch.device) -> Tensor:
    """Return the number of its tensor for each element, so many of each, int64 ``[sum(counts)]``."""
    # The size is known: a GPU need not be asked for it.
    return on_device(numbers, device).repeat_interleave(on_device(counts, device), output_size=sum(counts))


def _origins(numels: Counts, counts: Counts, device: torch.device) -> Tensor:
    """Return for each element selected where its tensor starts."""
    return of_each(starts_of(numels)[:-1], counts, device)


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
