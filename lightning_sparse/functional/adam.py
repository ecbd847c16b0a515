"""Adam's arithmetic on flat tensors: of those of which few elements have arrived at these alone, else over all.

Over all, a CPU takes every tensor by itself, piece by piece, so that its cache holds what several passes need, and the
result does not depend on a tensor's company; a device takes many tensors in a launch, with bounded memory beside them.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from threading import local
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

Tensors = Sequence[Tensor]  # flat

# How much more than in Adam a gradient counts in what it is itself divided by. Tried on the GPT of the benchmarks: with
# 1, 4 and 16 a density of 0.01 ended 1.6, 1.2 and 2.8 % above DDP; without, some trainings did not get over outliers.
_OUTLIERS = 4.0
_CACHED_ELEMENTS = 1 << 16  # of each of four tensors: 1 MiB in all, which a core's share of the cache holds
_BATCH_ELEMENTS = 1 << 26  # that a device takes together, with 256 MiB beside them
_LARGE = 1 << 20  # elements from which on a device passes over a tensor cost more than a launch for it alone
_FEW = 12  # elements are looked up one by one where there is less than one in so many


class AdamScalars(NamedTuple):
    """Numbers of one parameter's step; ``weight``, ``1 - beta2 ** step``, is the bias of the second moment."""

    beta2: float
    weight: float
    eps: float

    @property
    def root_weight(self) -> float:
        """Divisor of the root of the second moment."""
        return math.sqrt(self.weight)


class _Held(local):
    """Memory of a thread for the elements of a piece, by type: a cache holds it, and it need not be asked for anew."""

    def __init__(self) -> None:
        self.by_type: dict[torch.dtype, Tensor] = {}


_held = _Held()


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut flat tensors of one size into pieces that a cache holds, in the first's type, each with undefined memory."""
    dtype = tensors[0].dtype
    if dtype not in _held.by_type:
        _held.by_type[dtype] = torch.empty(_CACHED_ELEMENTS, dtype=dtype)
    memory = _held.by_type[dtype]
    for pieces in zip(*(tensor.to(dtype).split(_CACHED_ELEMENTS) for tensor in tensors)):
        yield (*pieces, memory[: pieces[0].numel()])


def _batches(tensors: Tensors, *others: Sequence[Any]) -> Iterator[tuple[list[Any], ...]]:
    """Yield what a device takes together of tensors, and of lists that are as long; other tensors in their type."""
    starts = accumulate((tensor.numel() for tensor in tensors), initial=0)
    members = zip(starts, zip(tensors, *others))
    for _, batch in groupby(members, key=lambda member: member[0] // _BATCH_ELEMENTS):
        yield tuple(map(list, zip(*(each for _, each in batch))))


def _is_on_cpu(tensors: Tensors) -> bool:
    return tensors[0].device.type == "cpu"


def accumulate_updates(
    gradients: Tensors, waiting: Tensors, seconds: Tensors, scalars: Sequence[AdamScalars], world_size: int
) -> None:
    """Divide gradients by Adam's divisor and add the residual updates ``r``, in place.

    That is ``g <- r + g / (sqrt(v + 4 (1 - beta2) g^2 / world_size) + eps)``: the second moment ``v``, with its
    step's bias, is some steps old, and the second term bounds what it has not seen. What is not finite stays so.
    """
    squares = [_OUTLIERS * (1 - each.beta2) * each.weight / world_size for each in scalars]
    eps = [each.eps * each.root_weight for each in scalars]
    weights = [each.root_weight for each in scalars]
    if _is_on_cpu(gradients):
        for number, tensors in enumerate(zip(gradients, waiting, seconds)):
            for gradient, rest, second, root in _pieces(*tensors):
                torch.addcmul(second, gradient, gradient, value=squares[number], out=root)
                root.sqrt_().add_(eps[number])
                torch.addcdiv(rest, gradient, root, value=weights[number], out=gradient)
        return
    for some, rests, olds, factors, added, divisors in _batches(gradients, waiting, seconds, squares, eps, weights):
        roots = list(torch._foreach_addcmul(_typed(olds, some), some, some, factors))
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, added)
        small = [number for number, gradient in enumerate(some) if gradient.numel() < _LARGE]
        for number in set(range(len(some))) - set(small):  # no list of results is as large as the model
            gradient = some[number]
            torch.addcdiv(rests[number], gradient, roots[number], value=divisors[number], out=gradient)
        if small:
            rests, quotients, roots, divisors = _at(small, rests, some, roots, divisors)
            torch._foreach_copy_(quotients, torch._foreach_addcdiv(rests, quotients, roots, divisors))


class LookedUp(NamedTuple):
    """Of a tensor of which few elements have arrived: where, and there the root of the second moment, and divisors."""

    places: Tensor  # int64, flat; some may occur twice
    roots: Tensor
    divisors: Tensor


def look_up(places: Tensors, updates: Tensors, seconds: Tensors, scalars: Sequence[AdamScalars]) -> dict[int, LookedUp]:
    """Look second moments up where updates have arrived, of those tensors, by number, of which few elements have."""
    alike: defaultdict[Any, dict[int, Tensor]] = defaultdict(dict)  # that can go together
    for number, (chosen, tensor) in enumerate(zip(places, updates)):
        if chosen.numel() * _FEW < tensor.numel():
            alike[scalars[number], tensor.dtype, seconds[number].dtype][number] = chosen
    found: dict[int, LookedUp] = {}
    for (each, dtype, _), few in alike.items():
        roots = _read(seconds, few).to(dtype).sqrt_()
        numels = [chosen.numel() for chosen in few.values()]
        parts = roots.split(numels), (roots * (1 / each.root_weight)).add_(each.eps).split(numels)
        found.update(zip(few, map(LookedUp, few.values(), *parts)))
    return found


def few_to_gradients(updates: Tensors, found: Mapping[int, LookedUp]) -> None:
    """Multiply those updates by Adam's divisor, in place, that are not zero only where it was looked up."""
    if found:
        places = {number: each.places for number, each in found.items()}
        _write(updates, places, torch.cat([each.divisors for each in found.values()]).mul_(_read(updates, places)))


def to_gradients(updates: Tensors, seconds: Tensors, scalars: Sequence[AdamScalars]) -> None:
    """Multiply updates by Adam's divisor, in place."""
    if updates and _is_on_cpu(updates):
        for update, second, one in zip(updates, seconds, scalars):
            for values, squares, root in _pieces(update, second):
                torch.sqrt(squares, out=root)
                values.mul_(root.mul_(1 / one.root_weight).add_(one.eps))
        return
    for several, olds, known in _batches(updates, seconds, scalars):
        roots = torch._foreach_sqrt(_typed(olds, several))
        torch._foreach_mul_(roots, [1 / each.root_weight for each in known])
        torch._foreach_add_(roots, [each.eps for each in known])
        torch._foreach_mul_(several, roots)


def denominator(second: Tensor, scalars: AdamScalars) -> Tensor:
    """Return the divisor of Adam's first moment: the root of the second, without its bias, plus ``eps``."""
    return second.sqrt().mul_(1 / scalars.root_weight).add_(scalars.eps)


def apply_updates(
    parameters: Tensors,
    gradients: Tensors,
    arrived: Sequence[Optional[LookedUp]],
    seconds: Tensors,
    scalars: Sequence[AdamScalars],
    rate: float,
    shrinkage: float,
) -> None:
    """Make the last part of Adam's step, in place: ``x <- shrinkage x - rate g / (sqrt(v) + eps)``.

    ``arrived`` tells where alone gradients are not zero, on a CPU, which looks whether anybody has written elsewhere.
    """
    found = {number: each for number, each in enumerate(arrived) if each is not None}
    if found:
        found = _of_zeros_elsewhere(gradients, found)
    alike: defaultdict[Any, dict[int, LookedUp]] = defaultdict(dict)
    for number, each in found.items():
        alike[scalars[number], gradients[number].dtype][number] = each
    for (one, _), few in alike.items():
        _shrink([parameters[number] for number in few], shrinkage)
        places = {number: each.places for number, each in few.items()}
        roots = torch.cat([each.roots for each in few.values()]).add_(one.eps * one.root_weight)
        weights = _read(parameters, places)
        weights.addcdiv_(_read(gradients, places), roots, value=-rate * one.root_weight)
        _write(parameters, places, weights)
    rest = [number for number in range(len(parameters)) if number not in found]
    if _is_on_cpu(parameters):
        for number in rest:
            one = scalars[number]
            for weight, values, squares, root in _pieces(parameters[number], gradients[number], seconds[number]):
                _shrink([weight], shrinkage)
                torch.sqrt(squares, out=root).add_(one.eps * one.root_weight)
                weight.addcdiv_(values, root, value=-rate * one.root_weight)
        return
    for several, means, olds, known in _batches(*_at(rest, parameters, gradients, seconds, scalars)):
        _shrink(several, shrinkage)
        divisors = torch._foreach_sqrt(_typed(olds, several))
        torch._foreach_add_(divisors, [each.eps * each.root_weight for each in known])
        torch._foreach_addcdiv_(several, means, divisors, [-rate * each.root_weight for each in known])


def _shrink(tensors: Tensors, shrinkage: float) -> None:
    if shrinkage != 1:
        torch._foreach_mul_(list(tensors), shrinkage)


def _at(numbers: Sequence[int], *lists: Sequence[Any]) -> list[list[Any]]:
    return [[each[number] for number in numbers] for each in lists]


def _typed(tensors: Tensors, likes: Tensors) -> list[Tensor]:
    return [tensor.to(like.dtype) for tensor, like in zip(tensors, likes)]


def _of_zeros_elsewhere(gradients: Tensors, found: Mapping[int, LookedUp]) -> dict[int, LookedUp]:
    """Return those whose gradients are zero elsewhere, or so small (1e-22) that their square is."""
    places = {number: each.places for number, each in found.items()}
    held = _read(gradients, places)
    for number, chosen in places.items():
        gradients[number].index_fill_(0, chosen, 0)
    norms = torch._foreach_norm([gradients[number] for number in places])  # several times faster than to count
    _write(gradients, places, held)
    return {number: found[number] for number, rest in zip(places, torch.stack(norms).tolist()) if rest == 0}


def _read(tensors: Tensors, places: Mapping[int, Tensor]) -> Tensor:
    numels = list(map(Tensor.numel, places.values()))
    values = tensors[next(iter(places))].new_empty(sum(numels))
    for (number, chosen), part in zip(places.items(), values.split(numels)):
        torch.index_select(tensors[number], 0, chosen, out=part)
    return values


def _write(tensors: Tensors, places: Mapping[int, Tensor], values: Tensor) -> None:
    # Places that occur twice hold one value, and one value is written there twice.
    for (number, chosen), part in zip(places.items(), values.split(list(map(Tensor.numel, places.values())))):
        tensors[number].index_copy_(0, chosen, part)
