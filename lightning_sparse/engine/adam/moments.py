"""Adam's state of each parameter, and the updates of second moments."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparse.engine.memory import widened
from lightning_sparse.engine.step.topology import FlatTopology
from lightning_sparse.functional.adam import AdamScalars

_GOLDEN = (math.sqrt(5) - 1) / 2  # golden ratio; multiples modulo 1 spread parameters evenly over an interval
_MIN_ELEMENTS = 1 << 19  # minimum elements per message of mean gradients (1 MiB), so that latency does not dominate
_MESSAGE_ELEMENTS = 1 << 24  # approximate elements per message of mean gradients (32 MiB)
_MIN_KEPT = 0.5  # minimum weight of the old second moment, because an update adds the square of a single mean gradient
_MAX_GROWTH = 16.0  # maximum squared norm of a mean gradient / sum of the second moments, in an update
_MIN_EPS = torch.finfo(torch.float32).tiny  # smallest ``eps``, so that a zero gradient (padding) gives a zero update


class AdamMoments(NamedTuple):
    """Adam's state and settings of a parameter for the next step. Tensors are flat views with the gradient's layout."""

    step: int  # number of the next step, from 1
    first: Tensor  # first moment; in corrected steps zero, and between exchange and optimizer step the mean update
    second: Tensor  # second moment of the mean gradient, equal on all ranks
    parameter: Tensor
    beta1: float
    beta2: float
    eps: float
    decay: float  # coupled weight decay; 0 if decoupled
    numel: int  # number of elements of the whole parameter, not of a shard
    is_begun: bool  # whether an earlier backward of the same step exchanged gradients; equal on all ranks
    continues_step: bool  # whether ``p.grad`` contained the mean of an earlier backward of the same step

    def scalars(self, second_step: int) -> AdamScalars:
        """Return Adam's constants, with the bias of a second moment that was last updated in step ``second_step``."""
        return AdamScalars(self.beta2, 1 - self.beta2**second_step, max(self.eps, _MIN_EPS))


def first_updates(next_step: Mapping[str, AdamMoments], least_steps: int) -> dict[str, int]:
    """Return the step number of each second moment's first update. The updates are spread over several steps."""
    turns = min(least_steps, max(1, sum(each.numel for each in next_step.values()) // _MIN_ELEMENTS))
    return {
        name: moments.step + int(number * _GOLDEN % 1 * turns) * (least_steps // turns)
        for number, (name, moments) in enumerate(next_step.items())
    }


def update_second_moments(
    gradients: dict[str, Tensor],
    next_step: Mapping[str, AdamMoments],
    second_steps: dict[str, int],
    levels: FlatTopology,
) -> None:
    """Average the previous step's requested gradients, and update second moments.

    The average overlaps backward. Gradients of the current step are complete only after backward.

    Args:
        gradients: this rank's flat gradients of the previous step in bfloat16, by name. Sent gradients are removed.
        next_step: Adam's state for the next step, by parameter name.
        second_steps: step number of each second moment's last update, overwritten.
        levels: topology that averages over ranks.
    """
    for together in list(_messages(gradients, next_step)):
        _average({name: gradients.pop(name) for name in together}, next_step, second_steps, levels)


def _average(
    gradients: Mapping[str, Tensor],
    next_step: Mapping[str, AdamMoments],
    second_steps: dict[str, int],
    levels: FlatTopology,
) -> None:
    """Average the gradients in one message, and update the second moments if the means are finite."""
    seconds = [next_step[name].second for name in gradients]
    numels = [each.numel() for each in seconds]
    flat = levels.mean_gradients(gradients, numels)
    is_finite = torch.linalg.vector_norm(flat, math.inf).isfinite()
    rows = []
    for name in gradients:
        beta2, known, step = next_step[name].beta2, second_steps[name], next_step[name].step - 1
        # torch stores second moments without bias correction, so the stored values depend on the number of steps.
        old, new = 1 - beta2**known, 1 - beta2**step
        share = max(_MIN_KEPT, beta2 ** (step - known))
        rows.append((old, share * new / old, new / old, (1 - share) * new))
        second_steps[name] = step
    weights, factors, factors_without_mean, factors_of_mean = zip(*rows)
    _limit(flat.split(numels), seconds, weights)
    means = torch.where(is_finite, flat, 0).to(seconds[0].dtype).split(numels)
    # If the means are not finite, second moments change only by the ratio of the new bias to the old bias.
    either = torch.tensor([factors, factors_without_mean], dtype=widened(seconds[0].dtype))
    finite, non_finite = either.to(flat.device, non_blocking=True)
    torch._foreach_mul_(seconds, torch.where(is_finite, finite, non_finite).unbind())
    torch._foreach_addcmul_(seconds, means, means, factors_of_mean)


def _limit(means: Sequence[Tensor], seconds: list[Tensor], weights: Sequence[float]) -> None:
    """Limit the norms of means in place. A spike would otherwise enlarge a second moment, and updates would vanish."""
    expected = torch.stack(torch._foreach_div(torch._foreach_norm(seconds, 1, torch.float32), weights))
    squares = torch.stack(torch._foreach_norm(list(means), 2, torch.float32)).square_()
    factors = (_MAX_GROWTH * expected / squares).sqrt_().clamp_(max=1.0)
    torch._foreach_mul_(list(means), torch.where(expected > 0, factors, 1.0).to(means[0].dtype).unbind())


def _messages(gradients: Mapping[str, Tensor], next_step: Mapping[str, AdamMoments]) -> Iterator[list[str]]:
    """Yield the gradient names of each message of about 32 MiB. The second moments of a message have one dtype."""
    starts = accumulate([gradient.numel() for gradient in gradients.values()], initial=0)
    places = [(start // _MESSAGE_ELEMENTS, next_step[name].second.dtype) for start, name in zip(starts, gradients)]
    for _, together in groupby(zip(places, list(gradients)), key=lambda each: each[0]):
        yield [name for _, name in together]
