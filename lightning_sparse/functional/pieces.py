"""Tensors of a group laid end to end: which of them are one flat tensor as they lie, or become one for a moment.

A model's many tensors cost more in calls than in elements. On a CPU those are taken together that lie beside each other
in memory; on a device, where a call costs more than a copy of a few megabytes, others are copied together, a piece of
the group at a time.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from threading import local
from typing import Any, NamedTuple

import torch
from torch import Tensor

Counts = tuple[int, ...]  # of elements, by tensor

_PIECE = 1 << 27  # elements copied together, which bounds the memory of the copy: 512 MiB
_BATCH = 1 << 26  # likewise, of tensors of one size: launches cost more than 256 MiB for a while
_ALONE = 1 << 24  # elements from which on a copy takes longer than the launches that it saves


class Piece(NamedTuple):
    """Some tensors of a group, one after the other, to be one flat tensor."""

    first: int  # place of the first of them in the group
    stop: int  # and that after the last
    lying: list[Tensor]  # flat tensors that share their memory

    def read(self) -> Tensor:
        """Return all of their elements: their memory, or a copy."""
        return self.lying[0] if len(self.lying) == 1 else torch.cat(self.lying)

    def room(self) -> Tensor:
        """Return a tensor for all of their elements, undefined: their memory, or what :meth:`write` copies there."""
        lying = self.lying
        return lying[0] if len(lying) == 1 else lying[0].new_empty(sum(map(Tensor.numel, lying)))

    def write(self, flat: Tensor) -> None:
        """Have their memory hold what :meth:`read` or :meth:`room` has returned."""
        if len(self.lying) > 1:
            torch._foreach_copy_(self.lying, list(flat.split([each.numel() for each in self.lying])))


def batches_alike(forms: Sequence[Any]) -> Iterator[list[int]]:
    """Yield places of tensors that are alike, of a number of elements or that and more, some at a time."""
    alike: defaultdict[Any, list[int]] = defaultdict(list)
    for place, form in enumerate(forms):
        alike[form].append(place)
    for form, members in alike.items():
        size = max(1, _BATCH // (form[0] if isinstance(form, tuple) else form))
        yield from (members[start : start + size] for start in range(0, len(members), size))


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


def pieces(tensors: Sequence[Tensor]) -> Iterator[Piece]:
    """Take flat tensors, see :func:`runs`, together as is fast where they are."""
    found: list[tuple[int, int, Tensor]] = []
    numel = 0
    for first, stop, flat in runs(tensors):
        is_alone = flat.device.type == "cpu" or flat.numel() >= _ALONE
        if found and (is_alone or numel + flat.numel() > _PIECE):
            yield Piece(found[0][0], first, [each for *_, each in found])
            found, numel = [], 0
        if is_alone:
            yield Piece(first, stop, [flat])
        else:
            found.append((first, stop, flat))
            numel += flat.numel()
    if found:
        yield Piece(found[0][0], len(tensors), [each for *_, each in found])


class _Known(local):
    """Groups are the same step after step; by thread, since what a device's stream has copied it alone reads."""

    def __init__(self) -> None:
        self.copied_to = lru_cache(maxsize=512)(lambda numbers, device: torch.tensor(numbers).to(device))


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
