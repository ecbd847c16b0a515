"""A residual memory for updates of Adam. :class:`AdamCorrection` documents the method and the papers."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.selection import Selection
from lightning_sparse.engine.adam.correction import AdamCorrection, WarmUp
from lightning_sparse.engine.adam.moments import AdamMoments, AdamState, Refreshes
from lightning_sparse.engine.memory.residual import (
    Clip,
    Hyperparameters,
    MemoryState,
    Renaming,
    ResidualMemory,
    cloned,
    factors_to,
    in_widened,
    rename_in,
    state_like,
)
from lightning_sparse.engine.step.topology import FlatTopology
from lightning_sparse.functional.adam import accumulate_updates, denominator, to_gradients

_UNCORRECTED = Hyperparameters(0.0)


@dataclass
class OwnClips:
    """Clip each rank's gradient so that the norm of the mean gradient is approximately within the user's limit.

    A rank's limit is the user's limit times the norm of the rank's gradient, divided by the norm of the mean gradient.
    Both norms are measured in updates of second moments.
    """

    levels: FlatTopology
    clips: Sequence[Clip] = ()
    factors: Optional[Tensor] = None  # clip factors of this step's gradients, one per maximum norm
    squared_norms: dict[str, Tensor] = field(default_factory=dict)  # ``[2]`` each: of a rank's gradient, of the mean
    _together: list[list[str]] = field(default_factory=list)  # for each limit, names of the gradients that share a norm

    @property
    def limits(self) -> list[tuple[float, frozenset[str]]]:
        """Maximum norms for clipping, each with the names of the parameters that are clipped together."""
        return [(clipping.norm, names) for clipping, names in self.clips if clipping.norm is not None]

    def clipped_together(self, names: Sequence[str]) -> list[list[str]]:
        """Return and store groups of gradient names. Each group is clipped together, by one maximum norm."""
        self._together = [[name for name in names if name in together] for _, together in self.limits]
        return self._together

    def set_norms(self, each: Sequence[Tensor], total: Tensor) -> None:
        """Compute the clip factor for each limit. The arguments are as in :meth:`Memory.set_norms`."""
        limits = [limit * self._ratio(*of) for (limit, _), of in zip(self.limits, zip(self._together, each))]
        self.factors = factors_to(torch.stack(limits), total)

    def _ratio(self, names: Sequence[str], norms: Tensor) -> Tensor:
        """Return the norm of a rank's gradient divided by the norm of the mean gradient."""
        none = norms.new_zeros(2)
        squares = [self.squared_norms.get(name, none) for name in names]
        # Parameters without a gradient in this backward do not count.
        total = (torch.stack(squares) * (norms > 0).unsqueeze(1)).sum(dim=0) if squares else none
        own, mean = self.levels.total_of(total).unbind()
        # Before the first measurement, the gradients of ranks are assumed to be independent.
        return torch.where(mean > 0, (own / mean).sqrt(), math.sqrt(self.levels.inter.world_size))

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
        """Halve the stored sums of squared norms, and add the squared norms of new gradients if they are finite."""
        squares = torch.where(is_finite, torch.stack((of_own, of_means), dim=1), 0)
        none = squares.new_zeros(2)
        halves = torch._foreach_mul([self.squared_norms.get(name, none) for name in names], 0.5)
        self.squared_norms.update(zip(names, torch._foreach_add(list(squares.unbind()), halves)))


class AdamMemory(ResidualMemory):
    """Accumulate updates of Adam for parameters with ``Hyperparameters.adam``, and gradients for all other parameters.

    Args:
        levels: topology, which averages gradients for second moments.
        correction: the user's settings.
        rescale_on_lr_change: whether residuals are rescaled when the learning rate changes.
    """

    corrects_adam = True

    def __init__(self, levels: FlatTopology, correction: AdamCorrection, rescale_on_lr_change: bool = False) -> None:
        super().__init__(None, rescale_on_lr_change)
        self._clips = OwnClips(levels)
        self.warm_up: Optional[WarmUp] = None  # lengths of the warm-up, set when the first parameter ends the warm-up
        self.correction = correction
        self._levels = levels
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
    def set_norms(self, each: Sequence[Tensor], total: Tensor) -> None:
        self._clips.set_norms(each, total)

    @override
    def compensate(
        self, names: Sequence[str], gradients: Sequence[Tensor], hyperparameters: Mapping[str, Hyperparameters]
    ) -> list[Tensor]:
        accumulated = in_widened(gradients)
        inputs = dict(zip(names, accumulated))
        moments = {name: each for name in names if (each := hyperparameters.get(name, _UNCORRECTED).adam) is not None}
        for name in names:
            self._track_moments(name, moments.get(name))
        rest = [name for name in names if name not in moments]
        self._accumulate(rest, [inputs[name] for name in rest], hyperparameters)
        if moments:
            self._accumulate_updates(inputs, {name: self.states[name] for name in moments}, hyperparameters)
        return accumulated

    def _track_moments(self, name: str, present: Optional[AdamMoments]) -> None:
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
        # ``owed`` is the sum of the updates that the first moment alone would cause later. All ranks have the same sum.
        beta1, first = moments.beta1, moments.first
        owed = in_widened([self._levels.local_share(first)])[0] * (
            beta1 / ((1 - beta1) * (1 - beta1 ** (moments.step - 1)))
        )
        first.zero_()
        if name in self._residuals:
            owed.add_(self._residuals[name])
        state_like(self._residuals, [name], [owed])[0].copy_(owed.div_(self._denominator(state)))

    def _return_to_gradients(self, name: str, state: AdamState) -> None:
        if state.moments is None:
            del self._residuals[name]  # The conversion needs the second moment, which is missing after a load.
        else:
            self._residuals[name].mul_(self._denominator(state))
        del self.states[name]
        self.refreshes.drop(name)

    @override
    def restore_gradients(self) -> None:
        # Plain DDP changes the second moments. The divisor of updates in the residual would then be wrong.
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

    def _accumulate_updates(
        self, inputs: Mapping[str, Tensor], states: Mapping[str, AdamState], given: Mapping[str, Hyperparameters]
    ) -> None:
        present = {name: inputs[name] for name in states}
        gradients = list(present.values())
        self._clips.clip(present)
        for gradient, (name, state) in zip(gradients, states.items()):
            if not given[name].continues_step and (decay := state.current.decay):
                gradient.add_(self._levels.local_share(state.current.parameter), alpha=decay)
        self.refreshes.hold(present, {name for name in states if given[name].continues_step})
        waiting = self._waiting(list(states), gradients, given)
        each = list(states.values())
        accumulate_updates(
            gradients, waiting, self._seconds(each), [one.scalars for one in each], self._levels.inter.world_size
        )
        if self.is_watched:
            for state, norm in zip(each, torch._foreach_norm(torch._foreach_sub(gradients, waiting))):
                state.update_norm = norm

    def _seconds(self, states: Sequence[AdamState]) -> list[Tensor]:
        return [self._levels.local_share(state.current.second) for state in states]

    @override
    def write_means(self, names: Sequence[str], gradients: Sequence[Tensor], means: Sequence[Selection]) -> None:
        super().write_means(names, gradients, means)
        known = [(gradient, self.states[name]) for gradient, name in zip(gradients, names) if name in self.states]
        corrected = [(gradient, state) for gradient, state in known if state.moments is not None]
        states = [state for _, state in corrected]
        to_gradients([each for each, _ in corrected], self._seconds(states), [state.scalars for state in states])

    @override
    def on_unused(self, names: Iterable[str]) -> None:
        for name in names:
            self.refreshes.gradients.pop(name, None)  # The next step requests a gradient again.

    @override
    def on_finite(self, finite: Tensor) -> None:
        self.refreshes.on_finite(finite)

    @override
    def refresh(self, hyperparameters: Mapping[str, Hyperparameters]) -> None:
        next_step = {name: each.adam for name, each in hyperparameters.items() if each.adam is not None}
        measure = self._clips.measure if self.clips_gradients else None
        self.refreshes.update(next_step, self.states, self._levels, measure)

    @override
    def update_norms(self) -> dict[str, Tensor]:
        known = [(name, state.update_norm) for name, state in self.states.items() if state.moments is not None]
        return {name: norm for name, norm in known if norm is not None}

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


def _saved(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)  # torch's default dtype may be narrower than float32
