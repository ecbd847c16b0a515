"""Adam's arithmetic on flat tensors, cut so that a processor's cache holds what several passes need.

On a CPU every tensor goes by itself, piece by piece, so that its result does not depend on its company; on a device all
tensors go together, in one launch a pass.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from threading import local
from typing import NamedTuple, Optional

import torch
from torch import Tensor

Tensors = Sequence[Tensor]  # flat

# How much more than in Adam a gradient counts in what it is itself divided by. Tried on the GPT of the benchmarks: with
# 1, 4 and 16 a density of 0.01 ended 1.6, 1.2 and 2.8 % above DDP; without, some trainings did not get over outliers.
_OUTLIERS = 4.0
_CACHED_ELEMENTS = 1 << 16  # of each of four tensors: 1 MiB in all, which a core's share of the cache holds
_FEW = 16  # elements are looked up one by one where there is less than one in so many


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
    """Cut flat tensors of one size and type into pieces that a cache holds, each with as much undefined memory."""
    dtype = tensors[0].dtype
    if dtype not in _held.by_type:
        _held.by_type[dtype] = torch.empty(_CACHED_ELEMENTS, dtype=dtype)
    memory = _held.by_type[dtype]
    for pieces in zip(*(tensor.split(_CACHED_ELEMENTS) for tensor in tensors)):
        yield (*pieces, memory[: pieces[0].numel()])


def accumulate_updates(
    gradients: Tensors, waiting: Tensors, seconds: Tensors, scalars: Sequence[AdamScalars], ranks: int
) -> None:
    """Divide gradients by Adam's divisor and add the residual updates ``r``, in place.

    That is ``g <- r + g / (sqrt(v + 4 (1 - beta2) g^2 / ranks) + eps)``: the second moment ``v``, with its step's bias,
    is some steps old, and the second term bounds what it has not seen. What is not finite stays so.
    """
    squares = [_OUTLIERS * (1 - each.beta2) * each.weight / ranks for each in scalars]
    eps = [each.eps * each.root_weight for each in scalars]
    weights = [each.root_weight for each in scalars]
    if gradients[0].device.type != "cpu":
        roots = torch._foreach_addcmul(list(seconds), list(gradients), list(gradients), squares)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, eps)
        torch._foreach_div_(list(gradients), roots)
        torch._foreach_mul_(list(gradients), weights)
        torch._foreach_add_(list(gradients), list(waiting))
        return
    for number, tensors in enumerate(zip(gradients, waiting, seconds)):
        for gradient, rest, second, root in _pieces(*tensors):
            torch.addcmul(second, gradient, gradient, value=squares[number], out=root)
            root.sqrt_().add_(eps[number])
            torch.addcdiv(rest, gradient, root, value=weights[number], out=gradient)


def to_gradients(
    updates: Tensors, indices: Sequence[Optional[Tensor]], seconds: Tensors, scalars: Sequence[AdamScalars]
) -> None:
    """Multiply updates by Adam's divisor, in place, where ``indices`` (``None``: all) say that they are not zero."""
    if updates[0].device.type != "cpu":
        torch._foreach_mul_(list(updates), _denominators(list(seconds), scalars))
        return
    done: set[int] = set()
    for each, places in _few_places(indices, updates, scalars).items():
        (denominators,) = _denominators([_read(seconds, places)], [each])
        _write(updates, places, denominators.mul_(_read(updates, places)))
        done.update(places)
    for number in set(range(len(updates))) - done:
        each = scalars[number]
        for values, squares, root in _pieces(updates[number], seconds[number]):
            torch.sqrt(squares, out=root)
            values.mul_(root.mul_(1 / each.root_weight).add_(each.eps))


def denominator(second: Tensor, scalars: AdamScalars) -> Tensor:
    """Return the divisor of Adam's first moment: the root of the second, without its bias, plus ``eps``."""
    return _denominators([second], [scalars])[0]


def _denominators(seconds: list[Tensor], scalars: Sequence[AdamScalars]) -> list[Tensor]:
    roots = list(torch._foreach_sqrt(seconds))
    torch._foreach_mul_(roots, [1 / each.root_weight for each in scalars])
    torch._foreach_add_(roots, [each.eps for each in scalars])
    return roots


def apply_updates(
    parameters: Tensors,
    gradients: Tensors,
    indices: Sequence[Optional[Tensor]],
    seconds: Tensors,
    scalars: Sequence[AdamScalars],
    rate: float,
    shrinkage: float,
) -> None:
    """Make the last part of Adam's step, in place: ``x <- shrinkage x - rate g / (sqrt(v) + eps)``.

    ``indices`` are as in :func:`to_gradients`; whether somebody has written elsewhere since is looked for.
    """
    if parameters[0].device.type != "cpu":
        if shrinkage != 1:
            torch._foreach_mul_(list(parameters), shrinkage)
        torch._foreach_addcdiv_(list(parameters), list(gradients), _denominators(list(seconds), scalars), value=-rate)
        return
    done: set[int] = set()
    for each, known in _few_places(indices, gradients, scalars).items():
        held = _read(gradients, known)
        places = _of_zeros_elsewhere(gradients, known, held)
        if not places:
            continue
        if shrinkage != 1:
            torch._foreach_mul_([parameters[number] for number in places], shrinkage)
        values = held if len(places) == len(known) else _read(gradients, places)
        weights, roots = _read(parameters, places), _read(seconds, places).sqrt_()
        _write(parameters, places, _stepped(weights, values, roots, each, rate))
        done.update(places)
    for number in set(range(len(parameters))) - done:
        for weight, values, squares, root in _pieces(parameters[number], gradients[number], seconds[number]):
            if shrinkage != 1:
                weight.mul_(shrinkage)
            _stepped(weight, values, torch.sqrt(squares, out=root), scalars[number], rate)


def _stepped(weight: Tensor, gradient: Tensor, root: Tensor, scalars: AdamScalars, rate: float) -> Tensor:
    root.add_(scalars.eps * scalars.root_weight)
    return weight.addcdiv_(gradient, root, value=-rate * scalars.root_weight)


def _few_places(
    indices: Sequence[Optional[Tensor]], tensors: Sequence[Tensor], scalars: Sequence[AdamScalars]
) -> dict[AdamScalars, dict[int, Tensor]]:
    """Return the places, flat, by a tensor's number, of tensors that have few; those of equal scalars go as one."""
    found: defaultdict[AdamScalars, dict[int, Tensor]] = defaultdict(dict)
    for number, (places, tensor, each) in enumerate(zip(indices, tensors, scalars)):
        if places is not None and places.numel() * _FEW < tensor.numel():
            found[each][number] = places.reshape(-1)
    return found


def _of_zeros_elsewhere(gradients: Sequence[Tensor], places: Mapping[int, Tensor], held: Tensor) -> dict[int, Tensor]:
    """Return the places of those gradients that are zero elsewhere, or so small (1e-22) that their square is."""
    for number, chosen in places.items():
        gradients[number].index_fill_(0, chosen, 0)
    norms = torch._foreach_norm([gradients[number] for number in places])  # several times faster than to count
    _write(gradients, places, held)
    return {number: places[number] for number, rest in zip(places, torch.stack(norms).tolist()) if rest == 0}


def _read(tensors: Sequence[Tensor], places: Mapping[int, Tensor]) -> Tensor:
    return torch.cat([tensors[number].index_select(0, chosen) for number, chosen in places.items()])


def _write(tensors: Sequence[Tensor], places: Mapping[int, Tensor], values: Tensor) -> None:
    # Places that occur twice hold one value, and one value is written there twice.
    for (number, chosen), part in zip(places.items(), values.split(list(map(len, places.values())))):
        tensors[number].index_copy_(0, chosen, part)
