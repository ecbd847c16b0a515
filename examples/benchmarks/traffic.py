"""Count the bytes that an operation of ATen reads and writes in a device's memory, from its arguments alone.

An argument is read once, and what an operation returns or changes is written once, as if nothing of it were in a cache:
what one element costs to look up, a line of 32 bytes or more, is not counted, nor what a sort or a top-k passes over
several times. So it is a measure of what is the model's size, not of time.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

# Of which what is written over is not read.
_OVERWRITTEN = ("copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_", "random_", "normal_", "uniform_")
# Of which as many elements of the first argument are touched as are looked up.
_LOOKS_UP = ("index_select", "gather", "index", "take")
_WRITES_SOME = ("index_copy_", "index_fill_", "index_add_", "index_put_", "_index_put_impl_", "put_", "scatter_")


def moved_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return how many bytes an operation reads and writes."""
    name = func.overloadpacket.__name__
    known = list(zip(func._schema.arguments, args))
    known += [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]
    reads: dict[int, int] = {}
    written = 0
    for place, (argument, value) in enumerate(known):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if place == 0 and name in _LOOKS_UP:
            continue  # as much as is written
        if place == 0 and name in _WRITES_SOME:
            written += _touched(args)
            continue
        for tensor in _tensors(value):
            written += is_written * _nbytes(tensor)
            if not (is_written and (argument.kwarg_only or name in _OVERWRITTEN)):
                reads[id(tensor)] = _nbytes(tensor)
    if not any(argument.alias_info is not None for argument, _ in known):
        written += sum(map(_nbytes, _tensors(result)))
    looked_up = written if name in _LOOKS_UP else 0
    return looked_up + sum(reads.values()) + written


def _touched(args: tuple[Any, ...]) -> int:
    """Return the bytes that are written of an argument in places: as many as there are indices."""
    first = args[0]
    indices = next(tensor for tensor in _tensors(args[1:]) if not tensor.is_floating_point())
    return int(indices.numel()) * int(first.itemsize)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _nbytes(tensor: Tensor) -> int:
    """Return the bytes that a tensor takes in memory; what is repeated is there once."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride()):
        numel *= size if stride else min(size, 1)
    return numel * tensor.itemsize
