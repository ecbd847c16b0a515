"""Adam's arithmetic on flat tensors, with a shortcut for mean gradients that have few non-zero elements.

The result for a tensor does not depend on other tensors (see :func:`~lightning_sparse.functional.elements.in_batches`).
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from lightning_sparse.functional.elements import in_batches

Tensors = Sequence[Tensor]  # flat

# Weight of the squared gradient in the divisor of a gradient; 1 is the weight in Adam. For the GPT of the benchmarks at
# density 0.01, the loss was 1.6, 1.2 and 2.8 % above DDP with weights of 1, 4 and 16. With a weight of 0, some
# trainings did not recover from outliers.
_OUTLIERS = 4.0
_FEW = 12  # elements per non-zero element; above this ratio, only non-zero elements are processed


class AdamScalars(NamedTuple):
    """Adam's constants for one parameter at one step. ``weight = 1 - beta2 ** step`` is the second moment's bias."""

    beta2: float
    weight: float
    eps: float

    @property
    def root_weight(self) -> float:
        """The divisor that corrects the bias of the second moment's square root."""
        return math.sqrt(self.weight)


def accumulate_updates(
    gradients: Tensors, waiting: Tensors, seconds: Tensors, scalars: Sequence[AdamScalars], world_size: int
) -> None:
    """Divide gradients by Adam's divisor and add the residual updates ``r``, in place.

    The result is ``g <- r + g / (sqrt(v + 4 (1 - beta2) g^2 / world_size) + eps)``, with bias correction. The second
    moment ``v`` was computed some steps ago, and has the bias of that step. The second term under the root limits the
    update of a gradient that ``v`` does not contain yet. Non-finite values stay non-finite.

    Args:
        gradients: flat gradients ``g``, overwritten by the result.
        waiting: residual updates ``r``.
        seconds: second moments ``v``.
        scalars: Adam's constants for each parameter.
        world_size: number of ranks.
    """
    squares = [_OUTLIERS * (1 - each.beta2) * each.weight / world_size for each in scalars]
    eps = [each.eps * each.root_weight for each in scalars]
    weights = [each.root_weight for each in scalars]
    for some, rests, olds, factors, added, divisors in in_batches(gradients, waiting, seconds, squares, eps, weights):
        roots = torch._foreach_addcmul(_typed(olds, some), some, some, factors)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, added)
        torch._foreach_mul_(some, divisors)
        torch._foreach_div_(some, roots)
        torch._foreach_add_(some, rests)


class LookedUp(NamedTuple):
    """Indices of a mean gradient's few non-zero elements, and roots of Adam's second moment at these indices."""

    places: Tensor  # flat int64 indices, possibly with duplicates
    roots: Tensor  # roots of the second moment, without bias correction
    divisors: Tensor  # roots with bias correction, plus ``eps``


def look_up(places: Tensors, updates: Tensors, seconds: Tensors, scalars: Sequence[AdamScalars]) -> dict[int, LookedUp]:
    """Read second moments at the non-zero elements of sparse mean gradients. The result is by tensor index.

    Args:
        places: indices of the non-zero elements of each mean.
        updates: flat buffers for the means. A mean with many non-zero elements has no entry in the result.
        seconds: second moments.
        scalars: Adam's constants for each parameter.
    """
    alike: defaultdict[Any, dict[int, Tensor]] = defaultdict(dict)  # one call reads all tensors of a group
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
    """Convert sparse Adam updates to gradients, in place: multiply the non-zero elements by Adam's divisor."""
    if found:
        places = {number: each.places for number, each in found.items()}
        _write(updates, places, torch.cat([each.divisors for each in found.values()]).mul_(_read(updates, places)))


def to_gradients(updates: Tensors, seconds: Tensors, scalars: Sequence[AdamScalars]) -> None:
    """Multiply updates by Adam's divisor, in place."""
    for several, olds, known in in_batches(updates, seconds, scalars):
        roots = torch._foreach_sqrt(_typed(olds, several))
        torch._foreach_mul_(roots, [1 / each.root_weight for each in known])
        torch._foreach_add_(roots, [each.eps for each in known])
        torch._foreach_mul_(several, roots)


def denominator(second: Tensor, scalars: AdamScalars) -> Tensor:
    """Return the divisor of Adam's first moment: the root of the bias-corrected second moment, plus ``eps``."""
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
    """Apply Adam's step in place: ``x <- shrinkage x - rate g / (sqrt(v) + eps)``.

    Args:
        parameters: flat parameters.
        gradients: mean gradients.
        arrived: indices of each gradient's non-zero elements, or ``None``. Ignored if a gradient is non-zero elsewhere.
        seconds: second moments.
        scalars: Adam's constants for each parameter.
        rate: learning rate.
        shrinkage: factor of decoupled weight decay.
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
    for several, means, olds, known in in_batches(*_at(rest, parameters, gradients, seconds, scalars)):
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
    """Return the entries with gradients that are zero outside the entry's indices (a magnitude below 1e-22 is zero)."""
    places = {number: each.places for number, each in found.items()}
    held = _read(gradients, places)
    for number, chosen in places.items():
        gradients[number].index_fill_(0, chosen, 0)
    norms = torch._foreach_norm([gradients[number] for number in places])  # several times faster than counting
    _write(gradients, places, held)
    return {number: found[number] for number, rest in zip(places, torch.stack(norms).tolist()) if rest == 0}


def _read(tensors: Tensors, places: Mapping[int, Tensor]) -> Tensor:
    numels = list(map(Tensor.numel, places.values()))
    values = tensors[next(iter(places))].new_empty(sum(numels))
    for (number, chosen), part in zip(places.items(), values.split(numels)):
        torch.index_select(tensors[number], 0, chosen, out=part)
    return values


def _write(tensors: Tensors, places: Mapping[int, Tensor], values: Tensor) -> None:
    # Duplicate indices are safe, because all writes to an index have the same value.
    for (number, chosen), part in zip(places.items(), values.split(list(map(Tensor.numel, places.values())))):
        tensors[number].index_copy_(0, chosen, part)
