"""A residual memory for updates of Adam, and updates of second moments. :class:`AdamCorrection` names the papers."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import override

from lightning_sparse.compressors.selection import Selection
from lightning_sparse.engine.adam.correction import AdamCorrection, WarmUp
from lightning_sparse.engine.memory import (
    Hyperparameters,
    Memory,
    MemoryState,
    cloned,
    in_widened,
    state_like,
    widened,
)
from lightning_sparse.engine.step.topology import FlatTopology
from lightning_sparse.functional.adam import AdamScalars, accumulate_updates, denominators, to_gradients
from lightning_sparse.functional.elements import local_tensor
from lightning_sparse.functional.reductions import norms_of

_GOLDEN = (math.sqrt(5) - 1) / 2  # golden ratio; multiples modulo 1 spread parameters evenly over an interval
_MIN_ELEMENTS = 1 << 19  # minimum elements per message of mean gradients (1 MiB), so that latency does not dominate
_MESSAGE_ELEMENTS = 1 << 24  # approximate elements per message of mean gradients (32 MiB)
_MIN_KEPT = 0.5  # minimum weight of the old second moment, because an update adds the square of a single mean gradient
_MAX_GROWTH = 16.0  # maximum squared norm of a mean gradient / sum of the second moments, in an update
_MIN_EPS = torch.finfo(torch.float32).tiny  # smallest ``eps``, so that a zero gradient (padding) gives a zero update
_GROWTH = 0.1  # interval between two updates / number of steps so far: after step 2000, the interval is 200 steps


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
    continues_step: bool  # whether ``p.grad`` contained the mean of an earlier backward of the same step


class AdamMemory(Memory):
    """Accumulate updates of Adam for corrected parameters, and gradients for all other parameters.

    Args:
        levels: topology, which averages gradients for second moments.
        correction: the user's settings.
        rescale_on_lr_change: whether residuals are rescaled when the learning rate changes.
    """

    corrects_adam = True

    def __init__(self, levels: FlatTopology, correction: AdamCorrection, rescale_on_lr_change: bool = False) -> None:
        super().__init__(None, rescale_on_lr_change)
        self.warm_up: Optional[WarmUp] = None  # lengths of the warm-up, set when the first parameter ends the warm-up
        self._correction = correction
        self._levels = levels
        self.moments: Mapping[str, AdamMoments] = {}  # Adam's state for the next step; empty after a load
        # step number of each second moment's last update; an entry exists while the parameter's residual holds updates
        self.second_steps: dict[str, int] = {}
        self._update_norms: dict[str, Tensor] = {}  # norms of updates, if ``is_watched``
        # step number of the gradient for each second moment's next update; later, if the parameter is then unused
        self._due: dict[str, int] = {}
        self._gradients: dict[str, Tensor] = {}  # gradients of the steps in ``_due``, in bfloat16
        # ``[2]`` each: squared norms before and after clipping, summed over steps with Adam's decay ``beta2``
        self.squared_norms: dict[str, Tensor] = {}
        # 1 if the last exchange was finite, else 0; allocated on the caller's stream, which reads the flag
        self._finite = torch.ones((), device=levels.inter.device)

    @property
    def warm_up_length(self) -> WarmUp:
        """Lengths of the warm-up. Default lengths do not change after a parameter has ended the dense steps."""
        if self.warm_up is None or self._correction.warmup_steps:
            return self._correction.warm_up(self.total_steps)
        return self.warm_up

    @override
    def refresh(self, moments: Mapping[str, AdamMoments]) -> None:
        for name in [name for name in self.second_steps if name not in moments]:
            self._return_to_gradients(name)
        before, self.moments = self.moments, moments
        for name, each in moments.items():
            if name not in self.second_steps:
                self._turn_to_updates(name)
            elif name in before and before[name].second.data_ptr() != each.second.data_ptr():  # after a load
                self.second_steps[name] = each.step - 1
                self._drop_update(name)
        self._update_second_moments()

    def _update_second_moments(self) -> None:
        """Average the requested gradients of completed steps, and update second moments.

        The average overlaps backward. Gradients of the current step are complete only after backward.
        """
        least, gradients = self._correction.second_moment_interval, dict[str, Tensor]()
        for name, moments in self.moments.items():
            if name in self._gradients and self._due[name] < moments.step:
                gradients[name], step = self._gradients.pop(name), moments.step - 1
                self._due[name] = step + max(least, int(_GROWTH * step))
        for names in list(_messages(gradients, self.moments)):
            message = {name: gradients.pop(name) for name in names}
            _average_message(message, self.moments, self.second_steps, self._levels)
        self._due = {**first_updates(self.moments, least), **self._due}

    def _turn_to_updates(self, name: str) -> None:
        self.second_steps[name] = self.moments[name].step - 1
        # ``owed``: sum of the updates that the first moment would cause without new gradients, equal on all ranks.
        beta1, first = self.moments[name].beta1, self.moments[name].first
        owed = in_widened([self._levels.local_share(first)])[0] * (
            beta1 / ((1 - beta1) * (1 - beta1 ** self.second_steps[name]))
        )
        first.zero_()
        if name in self._residuals:
            owed.add_(self._residuals[name])
        state_like(self._residuals, [name], [owed])[0].copy_(owed.div_(self._denominator(name)))

    def _return_to_gradients(self, name: str) -> None:
        if name in self.moments:
            self._residuals[name].mul_(self._denominator(name))
        else:
            del self._residuals[name]  # After a load, a second moment may be missing. No update can be converted then.
        del self.second_steps[name]
        self._drop_update(name)

    @override
    def _accumulate(
        self, names: Sequence[str], gradients: list[Tensor], hyperparameters: Mapping[str, Hyperparameters]
    ) -> None:
        others = dict(zip(names, gradients))
        corrected = {name: others.pop(name) for name in names if name in self.moments}
        super()._accumulate(list(others), list(others.values()), hyperparameters)
        if not corrected:
            return
        names, gradients = list(corrected), list(corrected.values())
        for name, gradient in corrected.items():
            moments = self.moments[name]
            if moments.decay and not moments.continues_step:
                gradient.add_(self._levels.local_share(moments.parameter), alpha=moments.decay)
        self._store_due({name: each for name, each in corrected.items() if self.moments[name].step >= self._due[name]})
        waiting = self._waiting(names, gradients, hyperparameters)
        world_size = self._levels.inter.world_size
        accumulate_updates(gradients, waiting, self._seconds(names), self.scalars(names), world_size)
        if self.is_watched:
            self._update_norms.update(zip(names, torch._foreach_norm(torch._foreach_sub(gradients, waiting))))

    @override
    def reset(self, names: Iterable[str]) -> None:
        for name in self._residuals.keys() & names:  # second moments, which the optimizer stores, do not change
            self._residuals[name].zero_()
            self._gradients.pop(name, None)

    def _drop_update(self, name: str) -> None:
        self._due.pop(name, None)
        self._gradients.pop(name, None)

    def scalars(self, names: Iterable[str]) -> list[AdamScalars]:
        """Return Adam's constants of corrected parameters, with the bias of second moments at their last update."""
        known = [(self.moments[name], self.second_steps[name]) for name in names]
        return [AdamScalars(each.beta2, 1 - each.beta2**step, max(each.eps, _MIN_EPS)) for each, step in known]

    def _seconds(self, names: Iterable[str]) -> list[Tensor]:
        return [self._levels.local_share(self.moments[name].second) for name in names]

    def _denominator(self, name: str) -> Tensor:
        return denominators(self._seconds([name]), self.scalars([name]))[0]

    def _store_due(self, gradients: Mapping[str, Tensor]) -> None:
        """Store gradients in bfloat16. In a continued step, add the gradient to that of earlier backwards."""
        if not gradients:
            return
        numels = [each.numel() for each in gradients.values()]
        narrow = next(iter(gradients.values())).new_empty(sum(numels), dtype=torch.bfloat16).split(numels)
        torch._foreach_copy_(narrow, list(gradients.values()))
        for name, each in zip(gradients, narrow):
            is_added = self.moments[name].continues_step and name in self._gradients
            self._gradients[name] = self._gradients[name].add_(each) if is_added else each
            self._due[name] = self.moments[name].step

    @override
    def write_means(self, names: Sequence[str], gradients: Sequence[Tensor], means: Sequence[Selection]) -> None:
        super().write_means(names, gradients, means)
        corrected = {name: gradient for name, gradient in zip(names, gradients) if name in self.moments}
        to_gradients(list(corrected.values()), self._seconds(corrected), self.scalars(corrected))

    @override
    def on_unused(self, names: Iterable[str]) -> None:
        for name in names:
            self._gradients.pop(name, None)

    @override
    def on_finite(self, finite: Tensor) -> None:
        self._finite.copy_(finite)
        held = list(self._gradients.values())
        if held and not (finite.device.type == "cpu" and finite):  # a GPU always multiplies, to avoid a synchronization
            flag = finite.to(held[0].device, held[0].dtype, non_blocking=True)
            # The factor is 1 or infinity. Zero times infinity is NaN, so that all ranks skip the update.
            torch._foreach_mul_(held, flag.reciprocal())

    def scale_if_finite(self, loss_scale: Optional[Tensor]) -> Optional[Tensor]:
        """Return the loss scale, or 0 after a non-finite exchange, so that a division makes all updates non-finite."""
        finite = self._finite
        if finite.device.type == "cpu" and finite:
            return loss_scale
        return finite if loss_scale is None else finite.to(loss_scale.device, non_blocking=True) * loss_scale

    @override
    def update_norms(self) -> dict[str, Tensor]:
        return {name: norm for name, norm in self._update_norms.items() if name in self.moments}

    @override
    def state_dict(self) -> MemoryState:
        saved = super().state_dict()
        residuals, steps = saved["residual"], self.second_steps
        return {
            **saved,
            "residual": {name: tensor for name, tensor in residuals.items() if name not in steps},
            "update": {name: tensor for name, tensor in residuals.items() if name in steps},
            "second_moment_step": {name: _saved([step]) for name, step in steps.items()},
            "squared_norms": dict(self.squared_norms),
            "refresh_gradient": dict(self._gradients),
            "refresh_due": {name: _saved([step]) for name, step in self._due.items()},
            "warm_up": {} if self.warm_up is None else dict.fromkeys(steps, _saved(self.warm_up)),
        }

    @override
    def load_state_dict(self, state: MemoryState) -> None:
        updates = state.get("update", {})
        super().load_state_dict({**state, "residual": {**state.get("residual", {}), **updates}})
        self.squared_norms = cloned(state.get("squared_norms", {}))
        steps = state.get("second_moment_step", {})
        self.moments, self.second_steps = {}, {name: int(step) for name, step in steps.items() if name in updates}
        self._due = {name: int(step) for name, step in state.get("refresh_due", {}).items()}
        held = state.get("refresh_gradient", {})
        self._gradients = {name: each.to(torch.bfloat16, copy=True) for name, each in held.items()}
        saved = next(iter(state.get("warm_up", {}).values()), None)
        self.warm_up = None if saved is None else WarmUp(*map(int, saved.tolist()))


def first_updates(next_step: Mapping[str, AdamMoments], least_steps: int) -> dict[str, int]:
    """Return the step number of each second moment's first update. The updates are spread over several steps."""
    turns = min(least_steps, max(1, sum(each.numel for each in next_step.values()) // _MIN_ELEMENTS))
    return {
        name: moments.step + int(number * _GOLDEN % 1 * turns) * (least_steps // turns)
        for number, (name, moments) in enumerate(next_step.items())
    }


def _average_message(
    gradients: Mapping[str, Tensor],
    moments: Mapping[str, AdamMoments],
    second_steps: dict[str, int],
    levels: FlatTopology,
) -> None:
    """Average the gradients in one message, and update the second moments if the means are finite."""
    seconds = [moments[name].second for name in gradients]
    numels = [each.numel() for each in seconds]
    flat = levels.mean_gradients(gradients, numels)
    is_finite = torch.linalg.vector_norm(flat, math.inf).isfinite()
    rows = []
    for name in gradients:
        beta2, known, step = moments[name].beta2, second_steps[name], moments[name].step - 1
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


class DenseNorms:
    """Norms of dense mean gradients before and after the user clips gradients, by parameter name.

    Clipping in dense steps reduces Adam's moments. Corrected steps ignore clipping, so :meth:`undo_clipping` converts
    the moments. Otherwise, the divisor of the first corrected updates would be too small.
    """

    def __init__(self, memory: AdamMemory) -> None:
        self.names: dict[Parameter, str] = {}  # parameters whose gradients are exchanged dense in this step
        self._memory = memory
        self._norms: dict[str, Tensor] = {}  # norms after the exchange

    def record(self, loss_scale: Optional[Tensor]) -> None:
        """After an exchange, store the norms of all mean gradients, for a comparison with the clipped gradients."""
        self._norms = self._measured(self.names, loss_scale)

    def compare(self, group: Mapping[str, Any], scale: Optional[Tensor]) -> None:
        """Before the step of a param group, add each gradient's squared norms (unclipped, clipped) to running sums."""
        after, squares = self._measured(group["params"], scale), self._memory.squared_norms
        if names := [name for name in after if name in self._norms]:
            pairs = torch.stack([torch.stack((self._norms.pop(name), after[name])) for name in names]).square_()
            known = torch.stack([squares.get(name, pairs.new_zeros(2)) for name in names])
            pairs = torch.where(pairs.isfinite().all(dim=1, keepdim=True), pairs, 0)
            squares.update(zip(names, (known * float(group["betas"][1]) + pairs).unbind()))

    def _measured(self, parameters: Iterable[Parameter], scale: Optional[Tensor]) -> dict[str, Tensor]:
        dense = {self.names[each]: each.grad for each in parameters if each in self.names and each.grad is not None}
        if not dense:
            return {}
        norms = norms_of(list(map(local_tensor, dense.values())))
        return dict(zip(dense, (norms if scale is None else norms / scale).unbind()))

    def undo_clipping(self, name: str, first: Tensor, second: Tensor) -> None:
        """Convert moments of clipped gradients to moments of gradients, in place, before corrected steps."""
        if (squares := self._memory.squared_norms.pop(name, None)) is not None:
            before, after = squares.unbind()
            ratio = torch.where(after > 0, before / after, 1.0)
            first.mul_(ratio.sqrt())
            second.mul_(ratio)


def _saved(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)  # torch's default dtype may be narrower than float32
