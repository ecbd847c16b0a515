"""A residual memory for updates of Adam. :class:`AdamCorrection` documents the method and the papers."""

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.selection import Selection
from lightning_sparse.engine.adam.correction import AdamCorrection, WarmUp
from lightning_sparse.engine.memory.residual import (
    Averages,
    Clip,
    Hyperparameters,
    MemoryState,
    Renaming,
    ResidualMemory,
    cloned,
    factors_to,
    in_widened,
    kept_like,
    rename_in,
    widened,
)
from lightning_sparse.functional.adam import AdamScalars, accumulate_updates, denominator, to_gradients

_GROWTH = 0.1  # interval between two updates per step made: after 2000 steps, an interval of 200 steps
_GOLDEN = (math.sqrt(5) - 1) / 2  # golden ratio; multiples modulo 1 spread parameters evenly over an interval
_MIN_ELEMENTS = 1 << 19  # minimum elements per message of mean gradients (1 MiB), so that latency does not dominate
_LEARNED_TOGETHER = 1 << 24  # approximate elements per message of mean gradients (32 MiB)
_MIN_EPS = torch.finfo(torch.float32).tiny  # smallest ``eps``, so that a zero gradient (padding) gives a zero update
_MIN_KEPT = 0.5  # minimum weight of the old second moment in an average with the square of a single mean gradient


class AdamSettings(NamedTuple):
    """Adam's settings for a param group."""

    beta1: float
    beta2: float
    eps: float
    decay: float  # coupled weight decay; 0 if decoupled


class AdamTensors(NamedTuple):
    """Adam's tensors of a parameter: flat views of the optimizer's tensors, with the layout of the gradient."""

    first: Tensor  # first moment, zero during correction
    second: Tensor  # second moment of the mean gradient, equal on all ranks
    parameter: Tensor


class AdamMoments(NamedTuple):
    """Adam's state of a parameter for the next step."""

    step: int  # number of the next step, from 1
    settings: AdamSettings
    tensors: AdamTensors
    numel: int  # number of elements of the whole parameter, not of a shard
    is_begun: bool  # whether an earlier backward of the next step had an exchange; equal on all ranks


@dataclass
class AdamState:
    """State of a corrected parameter."""

    moments: Optional[AdamMoments]  # Adam's state for the next step; ``None`` after a load
    second_step: int  # step number of the last update of the second moment
    is_update: bool = False  # whether the residual holds updates, not gradients
    is_continued: bool = False  # whether the gradient holds a mean of an earlier backward of this step
    update_norm: Optional[Tensor] = None  # norm of this step's update, if ``is_watched``

    @property
    def known(self) -> AdamMoments:
        """The attribute ``moments``, which must not be ``None`` here."""
        assert self.moments is not None
        return self.moments

    def take_other(self, second: Tensor, step: int) -> bool:
        """Return whether the optimizer's second moment was replaced. If so, set ``second_step`` to ``step``.

        Args:
            second: the optimizer's current second moment. Directly after a load, no tensor counts as replaced.
            step: the optimizer's step count.
        """
        known = second if self.moments is None else self.moments.tensors.second
        is_other = known.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
        self.second_step = step if is_other else self.second_step
        return is_other

    @property
    def scalars(self) -> AdamScalars:
        """Numbers for the next update. The bias correction is computed for the last update of the second moment."""
        settings = self.known.settings
        return AdamScalars(settings.beta2, 1 - settings.beta2**self.second_step, max(settings.eps, _MIN_EPS))


@dataclass
class OwnClips:
    """Clip each rank's gradient to the user's limit times a ratio, so that the mean is clipped approximately.

    The ratio is the norm of a rank's gradient divided by the norm of the mean. Updates of second moments measure both.
    """

    world_size: int
    total_of: Callable[[Tensor], Tensor]
    clips: Sequence[Clip] = ()
    factors: Optional[Tensor] = None  # clip factors of this step's gradients, one per maximum norm
    squared_norms: dict[str, Tensor] = field(default_factory=dict)  # ``[2]``: squared norms of rank's gradient and mean
    _together: list[list[str]] = field(default_factory=list)  # for each limit, names of the gradients that share a norm

    @property
    def limits(self) -> list[tuple[float, frozenset[str]]]:
        """Maximum norms for clipping, each with the names of the parameters that are clipped together."""
        return [(clipping.norm, names) for clipping, names in self.clips if clipping.norm is not None]

    def clipped_together(self, names: Sequence[str]) -> list[list[str]]:
        """Return and store groups of gradient names. Each group is clipped together, by one maximum norm."""
        self._together = [[name for name in names if name in together] for _, together in self.limits]
        return self._together

    def take_norms(self, each: Sequence[Tensor], total: Tensor) -> None:
        """Compute the clip factor for each limit. The arguments are as in :meth:`Memory.take_norms`."""
        limits = [limit * self._ratio(*of) for (limit, _), of in zip(self.limits, zip(self._together, each))]
        self.factors = factors_to(torch.stack(limits), total)

    def _ratio(self, names: Sequence[str], norms: Tensor) -> Tensor:
        none = norms.new_zeros(2)
        squares = [self.squared_norms.get(name, none) for name in names]
        # Parameters without a gradient in this backward do not count.
        total = (torch.stack(squares) * (norms > 0).unsqueeze(1)).sum(dim=0) if squares else none
        own, mean = self.total_of(total).unbind()
        # Before the first measurement, the gradients of ranks are assumed to be independent.
        return torch.where(mean > 0, (own / mean).sqrt(), math.sqrt(self.world_size))

    def clip(self, gradients: Mapping[str, Tensor]) -> None:
        """Clip gradients, in place."""
        factors = iter(() if self.factors is None else self.factors.unbind())
        for (norm, value), names in self.clips:
            factor = None if norm is None else next(factors)
            clipped = [gradient for name, gradient in gradients.items() if name in names]
            if clipped and value is not None:
                torch._foreach_clamp_min_(clipped, -value)
                torch._foreach_clamp_max_(clipped, value)
            if clipped and factor is not None:
                torch._foreach_mul_(clipped, factor)

    def measure(self, names: Sequence[str], of_means: Tensor, of_own: Tensor, is_finite: Tensor) -> None:
        """If finite, update the moving averages of squared norms: of mean gradients, and of ranks' gradients."""
        squares = torch.where(is_finite, torch.stack((of_own, of_means), dim=1), 0)
        none = squares.new_zeros(2)
        halves = torch._foreach_mul([self.squared_norms.get(name, none) for name in names], 0.5)
        self.squared_norms.update(zip(names, torch._foreach_add(list(squares.unbind()), halves)))


@dataclass
class Refreshes:
    """Updates of second moments: the step of each parameter's next update, and this rank's gradients for the update."""

    least_steps: int  # minimum number of steps between two updates of a parameter's second moment
    due: dict[str, int] = field(default_factory=dict)  # step number of each parameter's next update
    # bfloat16 gradients of due parameters; ``None`` until backward computes the gradient
    gradients: dict[str, Optional[Tensor]] = field(default_factory=dict)

    def ask(self, next_step: Mapping[str, AdamMoments]) -> None:
        """Request gradients for due updates from the next step. The parameters' first updates are spread over steps."""
        numel = sum(each.numel for each in next_step.values())
        turns = min(self.least_steps, max(1, numel // _MIN_ELEMENTS))
        for number, (name, moments) in enumerate(next_step.items()):
            turn = int(number * _GOLDEN % 1 * turns) * (self.least_steps // turns)
            if moments.step >= self.due.setdefault(name, moments.step + turn):
                self.gradients.setdefault(name, None)

    def hold(self, gradients: Mapping[str, Tensor], continued: Container[str]) -> None:
        """Store requested gradients in bfloat16. For ``continued`` names, add an earlier backward's gradient."""
        asked = {name: gradient for name, gradient in gradients.items() if name in self.gradients}
        if not asked:
            return
        numels = [each.numel() for each in asked.values()]
        narrow = next(iter(asked.values())).new_empty(sum(numels), dtype=torch.bfloat16).split(numels)
        torch._foreach_copy_(narrow, list(asked.values()))
        for name, each in zip(asked, narrow):
            earlier = self.gradients[name]
            self.gradients[name] = earlier.add_(each) if earlier is not None and name in continued else each

    def on_finite(self, finite: Tensor) -> None:
        """Make stored gradients non-finite if the step was not finite, so that all ranks skip the update."""
        held = [each for each in self.gradients.values() if each is not None]
        if held and not (finite.device.type == "cpu" and finite):  # a GPU always multiplies, to avoid a synchronization
            flag = finite.to(held[0].device, held[0].dtype, non_blocking=True)
            torch._foreach_mul_(held, flag.reciprocal())  # The factor is 1, or infinity, which makes zeros NaN.

    def taken(self, next_step: Mapping[str, AdamMoments]) -> dict[str, Tensor]:
        """Remove and return gradients of completed steps, in the order of ``next_step``. Schedule the next updates."""
        taken = {}
        for name, moments in next_step.items():
            if not moments.is_begun and (gradient := self.gradients.get(name)) is not None:
                step, taken[name] = moments.step - 1, gradient
                self.due[name] = step + max(self.least_steps, int(_GROWTH * step))
                del self.gradients[name]
        return taken

    def forget(self, name: str) -> None:
        """Remove the stored gradient and the next update of a parameter."""
        self.due.pop(name, None)
        self.gradients.pop(name, None)


class AdamMemory(ResidualMemory):
    """Accumulate updates of Adam for parameters with ``Hyperparameters.adam``, and gradients for all other parameters.

    Args:
        world_size: number of ranks in the exchange.
        correction: the user's settings.
        rescale_on_lr_change: whether residuals are rescaled when the learning rate changes.
        local_share: returns this rank's part of a flat tensor, if the ranks of a node divide each gradient.
        total_of: adds numbers over the shards of a replica.
    """

    corrects_adam = True

    def __init__(
        self,
        world_size: int,
        correction: AdamCorrection,
        rescale_on_lr_change: bool = False,
        local_share: Optional[Callable[[Tensor], Tensor]] = None,
        total_of: Callable[[Tensor], Tensor] = lambda own: own,
    ) -> None:
        super().__init__(None, rescale_on_lr_change)
        self._clips = OwnClips(world_size, total_of)
        self.warm_up: Optional[WarmUp] = None  # lengths of the warm-up; set by the first parameter that completes it
        self.correction = correction
        self._world_size = world_size
        self._share_of = local_share
        self.states: dict[str, AdamState] = {}
        self.refreshes = Refreshes(correction.second_moment_interval)

    @override
    def clip_to(self, clips: Sequence[Clip]) -> None:
        self._clips = replace(self._clips, clips=clips, factors=None)
        self.clips_gradients = bool(self._clips.limits)

    @override
    def clipped_together(self, names: Sequence[str]) -> list[list[str]]:
        return self._clips.clipped_together(names)

    @override
    def take_norms(self, each: Sequence[Tensor], total: Tensor) -> None:
        self._clips.take_norms(each, total)

    @override
    def compensate(
        self, names: Sequence[str], gradients: Sequence[Tensor], hyperparameters: Mapping[str, Hyperparameters]
    ) -> list[Tensor]:
        accumulated = in_widened(gradients)
        inputs = dict(zip(names, accumulated))
        moments = {
            name: settings.adam
            for name in names
            if (settings := hyperparameters.get(name)) is not None and settings.adam is not None
        }
        for name in names:
            self._track_moments(name, moments.get(name))
        rest = [name for name in names if name not in moments]
        self._accumulate(rest, [inputs[name] for name in rest], hyperparameters)
        if moments:
            self._accumulate_updates(inputs, {name: self.states[name] for name in moments}, hyperparameters)
        return accumulated

    def _track_moments(self, name: str, present: Optional[AdamMoments]) -> None:
        """Convert the residual between gradients and updates when a parameter's correction starts or ends."""
        state = self.states.get(name)
        if present is None:
            if state is not None and state.is_update:
                self._return_to_gradients(name, state)
            return
        if state is None:
            state = self.states[name] = AdamState(present, present.step - 1)
        state.moments = present
        if not state.is_update:
            self._turn_to_updates(name, state, present)

    def _turn_to_updates(self, name: str, state: AdamState, moments: AdamMoments) -> None:
        state.is_update = True
        # ``owed`` is the sum of all later updates that the first moment alone would make. All ranks have the same sum.
        beta1, first = moments.settings.beta1, moments.tensors.first
        owed = in_widened([self._shared(first)])[0] * (beta1 / ((1 - beta1) * (1 - beta1 ** (moments.step - 1))))
        first.zero_()
        if name in self._residuals:
            owed.add_(self._residuals[name])
        kept_like(self._residuals, [name], [owed])[0].copy_(owed.div_(self._denominator(state)))

    def _return_to_gradients(self, name: str, state: AdamState) -> None:
        if state.moments is None:
            del self._residuals[name]  # The conversion needs the second moment, which is missing after a load.
        else:
            self._residuals[name].mul_(self._denominator(state))
        del self.states[name]
        self.refreshes.forget(name)

    @override
    def leave(self) -> None:
        # Plain DDP changes the second moments, and thus the unit of the residual.
        for name, state in list(self.states.items()):
            if state.is_update:
                self._return_to_gradients(name, state)

    @override
    def rename(self, names: Renaming) -> None:
        for part in (self, self._clips, self.refreshes):
            rename_in(part, names)

    @override
    def reset(self, names: Iterable[str]) -> None:
        for name in self._residuals.keys() & names:  # second moments are in the optimizer and do not change
            self._residuals[name].zero_()
            self.refreshes.gradients.pop(name, None)

    def _denominator(self, state: AdamState) -> Tensor:
        return denominator(in_widened(self._seconds([state]))[0], state.scalars)

    def _shared(self, flat: Tensor) -> Tensor:
        return flat if self._share_of is None else self._share_of(flat)

    def _accumulate_updates(
        self, inputs: Mapping[str, Tensor], states: Mapping[str, AdamState], given: Mapping[str, Hyperparameters]
    ) -> None:
        gradients = [inputs[name] for name in states]
        self._clips.clip(dict(zip(states, gradients)))
        for gradient, (name, state) in zip(gradients, states.items()):
            state.is_continued = given[name].continues_step
            if not state.is_continued and (decay := state.known.settings.decay):
                gradient.add_(self._shared(state.known.tensors.parameter), alpha=decay)
        self.refreshes.hold(dict(zip(states, gradients)), {name for name in states if given[name].continues_step})
        waiting = self._waiting(list(states), gradients, given)
        each = list(states.values())
        scalars = [one.scalars for one in each]
        accumulate_updates(gradients, waiting, self._seconds(each), scalars, self._world_size)
        if self.is_watched:
            for state, norm in zip(each, torch._foreach_norm(torch._foreach_sub(gradients, waiting))):
                state.update_norm = norm

    def _seconds(self, states: Sequence[AdamState]) -> list[Tensor]:
        return [self._shared(state.known.tensors.second) for state in states]

    @override
    def write_means(self, names: Sequence[str], gradients: Sequence[Tensor], means: Sequence[Selection]) -> None:
        super().write_means(names, gradients, means)
        known = [(gradient, self.states[name]) for gradient, name in zip(gradients, names) if name in self.states]
        corrected = [(gradient, state) for gradient, state in known if state.moments is not None]
        states = [state for _, state in corrected]
        scalars = [state.scalars for state in states]
        to_gradients([gradient for gradient, _ in corrected], self._seconds(states), scalars)

    @override
    def on_unused(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self.states and not self.states[name].is_continued:
                self.refreshes.gradients.pop(name, None)  # the update is due again in the next step

    @override
    def on_finite(self, finite: Tensor) -> None:
        self.refreshes.on_finite(finite)

    @override
    def refresh(self, hyperparameters: Mapping[str, Hyperparameters], averages: Averages) -> None:
        """Update second moments of due parameters from mean gradients of the previous step, without residuals.

        Gradients of the current step are ready too late, so that backward would not hide the time of the average.
        """
        next_step = {name: each.adam for name, each in hyperparameters.items() if each.adam is not None}
        gradients = self.refreshes.taken(next_step)
        for together in _messages(gradients, next_step):
            self._learn({name: gradients.pop(name) for name in together}, next_step, averages)
        self.refreshes.ask(next_step)

    def _learn(self, gradients: Mapping[str, Tensor], next_step: Mapping[str, AdamMoments], averages: Averages) -> None:
        """Average the gradients in one message, and update the second moments if the means are finite."""
        seconds = {name: next_step[name].tensors.second for name in gradients}
        numels = [each.numel() for each in seconds.values()]
        flat = averages.mean_gradients(gradients, numels)
        is_finite = torch.linalg.vector_norm(flat, math.inf).isfinite()
        if self.clips_gradients:
            of_own, of_means = (
                torch.stack(torch._foreach_norm(list(each), dtype=torch.float32)).square_()
                for each in (gradients.values(), flat.split(numels))
            )
            self._clips.measure(list(gradients), of_means, averages.mean_squares(of_own), is_finite)
        flat = torch.where(is_finite, flat, 0).to(next(iter(seconds.values())).dtype)
        alike: defaultdict[Any, dict[str, Tensor]] = defaultdict(dict)
        for name, mean in zip(seconds, flat.split(numels)):
            alike[self.states[name].second_step, next_step[name].step - 1, next_step[name].settings.beta2][name] = mean
        for (known, step, beta2), some in alike.items():
            _teach([seconds[name] for name in some], list(some.values()), is_finite, beta2, known, step)
            for name in some:
                self.states[name].second_step = step

    @override
    def update_norms(self) -> dict[str, Tensor]:
        known = [(name, state.update_norm) for name, state in self.states.items() if state.moments is not None]
        return {name: norm for name, norm in known if norm is not None}

    @override
    def statistics(self) -> dict[str, Tensor]:
        """Return ``update_error`` (norm of residuals over norm of last updates) and ``second_moment_age`` (steps)."""
        factors = self._clips.factors
        statistics = {} if factors is None else {"local_clip_factor": factors.min()}
        norms = self.update_norms()
        if not norms:
            return statistics
        waiting = torch.stack(list(torch._foreach_norm([self._residuals[name] for name in norms]))).norm()
        ages = [self.states[name].known.step - self.states[name].second_step for name in norms]
        return {
            **statistics,
            "update_error": waiting / torch.stack(list(norms.values())).norm(),
            "second_moment_age": waiting.new_full((), max(ages)),
        }

    @override
    def state_dict(self) -> MemoryState:
        saved = super().state_dict()
        residuals, states = saved["residual"], self.states
        updates = {name for name, state in states.items() if state.is_update}
        return {
            **saved,
            "residual": {name: tensor for name, tensor in residuals.items() if name not in updates},
            "update": {name: tensor for name, tensor in residuals.items() if name in updates},
            "second_moment_step": {name: _saved([state.second_step]) for name, state in states.items()},
            "squared_norms": dict(self._clips.squared_norms),
            "refresh_gradient": {name: each for name, each in self.refreshes.gradients.items() if each is not None},
            "refresh_due": {name: _saved([step]) for name, step in self.refreshes.due.items()},
            "warm_up": {} if self.warm_up is None else dict.fromkeys(states, _saved(self.warm_up)),
        }

    @override
    def load_state_dict(self, state: MemoryState) -> None:
        updates = state.get("update", {})
        super().load_state_dict({**state, "residual": {**state.get("residual", {}), **updates}})
        self._clips = replace(self._clips, squared_norms=cloned(state.get("squared_norms", {})))
        steps = {name: int(step) for name, step in state.get("second_moment_step", {}).items()}
        self.states = {name: AdamState(None, step, name in updates) for name, step in steps.items()}
        due = {name: int(step) for name, step in state.get("refresh_due", {}).items()}
        held = {name: each.to(torch.bfloat16, copy=True) for name, each in state.get("refresh_gradient", {}).items()}
        self.refreshes = Refreshes(self.correction.second_moment_interval, due, {**held})
        saved = next(iter(state.get("warm_up", {}).values()), None)
        self.warm_up = None if saved is None else WarmUp(*map(int, saved.tolist()))


def _teach(
    seconds: Sequence[Tensor], means: Sequence[Tensor], is_finite: Tensor, beta2: float, known: int, step: int
) -> None:
    """Update second moments from step ``known`` to ``step``. If the means are not finite, only the bias changes."""
    share = max(_MIN_KEPT, beta2 ** (step - known))
    # torch stores moments before the bias correction, so that the stored values depend on the step.
    old, new = 1 - beta2**known, 1 - beta2**step
    taught, kept = (
        torch.full((), each, dtype=widened(means[0].dtype), device=is_finite.device)
        for each in (share * new / old, new / old)
    )
    torch._foreach_mul_(seconds, torch.where(is_finite, taught, kept))
    torch._foreach_addcmul_(seconds, list(means), list(means), value=(1 - share) * new)


def _messages(gradients: Mapping[str, Tensor], next_step: Mapping[str, AdamMoments]) -> Iterator[list[str]]:
    """Yield lists of gradient names, one list per message of about 32 MiB. All second moments have one dtype."""
    starts = accumulate([gradient.numel() for gradient in gradients.values()], initial=0)
    places = [
        (start // _LEARNED_TOGETHER, next_step[name].tensors.second.dtype) for start, name in zip(starts, gradients)
    ]
    for _, together in groupby(zip(places, list(gradients)), key=lambda each: each[0]):
        yield [name for _, name in together]


def _saved(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)  # torch's default dtype may be narrower than float32
