"""Selections of many tensors, laid end to end: written into all of them in a few calls instead of one or two for each.

A model's many small tensors cost more in calls than in elements. The gradients that DDP hands over together lie beside
each other in one of its buckets, so what is selected of them can be written there at once.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise
from threading import local
from typing import NamedTuple, Union, overload

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.selection import Selection
from lightning_sparse.functional import add_rows


class Layout(NamedTuple):
    """Where tensors, and what is selected of them, lie when laid end to end.

    Attributes:
        counts: for each tensor the number of elements selected.
        starts: for each tensor where it starts, and where the last one ends.
        columns: the same of what is selected of it.
        device_counts: ``counts`` as int64 ``[tensors]``, where the tensors are.
        device_starts: ``starts`` without the end, likewise.
    """

    counts: tuple[int, ...]
    starts: tuple[int, ...]
    columns: tuple[int, ...]
    device_counts: Tensor
    device_starts: Tensor

    @property
    def numel(self) -> int:
        """Number of elements of all tensors."""
        return self.starts[-1]

    @property
    def selected(self) -> int:
        """Number of elements selected of all tensors."""
        return self.columns[-1]

    def origins(self) -> Tensor:
        """Return for each element selected where its tensor starts, int64 ``[selected]``."""
        # The size is known, so a GPU need not be asked for it.
        return self.device_starts.repeat_interleave(self.device_counts, output_size=self.selected)


def _lay_out(numels: tuple[int, ...], counts: tuple[int, ...], device: torch.device) -> Layout:
    starts, columns = tuple(accumulate(numels, initial=0)), tuple(accumulate(counts, initial=0))
    device_counts, device_starts = (torch.tensor(numbers).to(device) for numbers in (counts, starts[:-1]))
    return Layout(counts, starts, columns, device_counts, device_starts)


class _Known(local):
    """Groups are the same step after step, until a schedule or a density changes.

    Of each thread, and so of each exchange worker: what a device's stream has copied is read by that stream alone.
    """

    def __init__(self) -> None:
        self.lay_out = lru_cache(maxsize=256)(_lay_out)


_known = _Known()


def lay_out(numels: Iterable[int], counts: Iterable[int], device: torch.device) -> Layout:
    """Lay tensors of so many elements each end to end, so many of which are selected; the latest are remembered."""
    return _known.lay_out(tuple(numels), tuple(counts), device)


class MadeWhenAsked(Sequence[Selection]):
    """A sequence whose members are made when somebody asks for one: most steps ask for none."""

    @abstractmethod
    def _make(self) -> Sequence[Selection]: ...

    @cached_property
    def _made(self) -> Sequence[Selection]:
        return self._make()

    @overload
    def __getitem__(self, place: int) -> Selection: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Selection]: ...

    @override
    def __getitem__(self, place: Union[int, slice]) -> Union[Selection, Sequence[Selection]]:
        return self._made[place]


class EndToEnd(MadeWhenAsked):
    """Some elements of each of several tensors; as a sequence, a selection for each of them.

    Attributes:
        values: ``[count]``, or ``[ranks, count]`` where several ranks selected.
        positions: int64 of the same shape, within the tensors laid end to end; ascending in each row.
        layout: where the tensors lie.
    """

    def __init__(self, values: Tensor, positions: Tensor, layout: Layout) -> None:
        self.values = values
        self.positions = positions
        self.layout = layout

    @classmethod
    def laid(cls, values: Tensor, indices: Sequence[Tensor], numels: Iterable[int]) -> "EndToEnd":
        """Lay selections end to end: the values of all, and for each its indices in a tensor of so many elements."""
        layout = lay_out(numels, map(Tensor.numel, indices), values.device)
        return cls(values, torch.cat(list(indices)).add_(layout.origins()), layout)

    @classmethod
    def of(cls, tensors: Sequence[Tensor], indices: Sequence[Tensor]) -> "EndToEnd":
        """Select elements of tensors by their indices, int64 ``[count]`` for each and ascending."""
        values = tensors[0].new_empty(sum(map(Tensor.numel, indices)))
        selected = cls.laid(values, indices, map(Tensor.numel, tensors))
        for run in selected._runs(tensors):
            torch.index_select(run.flat, 0, run.indices, out=run.values)
        return selected

    @override
    def __len__(self) -> int:
        return len(self.layout.counts)

    @property
    def whole(self) -> Selection:
        """All of it as a selection of one tensor."""
        return Selection(self.values, self.positions, self.layout.numel)

    def overwrite(self, tensors: Sequence[Tensor]) -> None:
        """Write the values, of one rank, over what the tensors hold at these places, in place."""
        for run in self._runs(tensors):
            run.flat.index_copy_(0, run.indices, run.values)

    def scatter(self, tensors: Sequence[Tensor]) -> None:
        """Make the tensors, in place, what the ranks' values add up to, rank by rank, and zero elsewhere."""
        for run in self._runs(tensors):
            add_rows(run.values, run.indices, run.flat.zero_())

    @override
    def _make(self) -> Sequence[Selection]:
        indices = (self.positions - self.layout.origins()).split(self.layout.counts, -1)
        starts = self.layout.starts
        numels = [stop - start for start, stop in pairwise(starts)]
        return [Selection(*piece) for piece in zip(self.values.split(self.layout.counts, -1), indices, numels)]

    def _runs(self, tensors: Sequence[Tensor]) -> Iterator["_Run"]:
        starts, columns = self.layout.starts, self.layout.columns
        for first, stop, flat in runs(tensors):
            begin, selected = columns[first], columns[stop] - columns[first]
            positions, values = (each.narrow(-1, begin, selected) for each in (self.positions, self.values))
            yield _Run(flat, positions - starts[first], values)


class Chained(MadeWhenAsked):
    """Several sequences as one.

    Attributes:
        parts: the sequences.
    """

    def __init__(self, parts: Sequence[Sequence[Selection]]) -> None:
        self.parts = parts

    @override
    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @override
    def _make(self) -> Sequence[Selection]:
        return list(chain.from_iterable(self.parts))


def at_once(selections: Sequence[Selection]) -> Sequence[Selection]:
    """Return as few selections as hold the same elements, for those who do not care of which tensor they are."""
    return [selections.whole] if isinstance(selections, EndToEnd) else selections


class _Run(NamedTuple):
    flat: Tensor
    indices: Tensor
    values: Tensor


def runs(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int, Tensor]]:
    """Find tensors that lie beside each other in memory.

    Args:
        tensors: flat, contiguous, of one type, none of them empty.

    Yields:
        the place of the first tensor of a run, that after its last, and the run as one flat tensor that shares their
        memory; in order.

    Example::

        >>> one, other = torch.arange(6.0).split([4, 2])
        >>> [(first, stop, len(flat)) for first, stop, flat in runs([one, other, torch.zeros(3)])]
        [(0, 2, 6), (2, 3, 3)]
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
