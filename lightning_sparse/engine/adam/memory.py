"""Adam before selection: the residual is one of updates; rule and sources stand at ``AdamCorrection``."""

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.selection import FlatSelection, Selection, scatter
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
from lightning_sparse.functional.adam import (
    AdamScalars,
    LookedUp,
    accumulate_updates,
    denominator,
    few_to_gradients,
    look_up,
    to_gradients,
)

_GROWTH = 0.1  # of the steps made: with 2000 behind, the second moment is learned every 200
_GOLDEN = (math.sqrt(5) - 1) / 2  # whose multiples spread any run of parameters evenly over the steps of an interval
_MIN_ELEMENTS = 1 << 19  # of a turn, a message of 1 MiB: small models have fewer turns, as each costs round trips
_LEARNED_TOGETHER = 1 << 24  # elements whose mean gradients travel in one message, 32 MiB
_MIN_EPS = torch.finfo(torch.float32).tiny  # with which zeros, such as padding of shares, have updates of zero
_MIN_KEPT = 0.5  # of the second moment, where a single mean gradient is all there is to learn from


class AdamSettings(NamedTuple):
    """Adam's settings of a group of parameters."""

    beta1: float
    beta2: float
    eps: float
    decay: float  # that is added to the gradient, negative where the objective is maximized; 0 where it is decoupled
    maximizes: bool = False


class AdamTensors(NamedTuple):
    """What Adam keeps of a parameter: the optimizer's own tensors, flat, laid out as its gradient is."""

    first: Tensor  # zero while updates are made before selection; of the negative gradient if that is maximized
    second: Tensor  # of the mean gradient, the same on all ranks
    largest: Optional[Tensor]  # second moment so far, with ``amsgrad``
    parameter: Tensor

    @property
    def preconditioner(self) -> Tensor:
        """The second moment that the gradient is divided by the root of."""
        return self.second if self.largest is None else self.largest


class AdamMoments(NamedTuple):
    """Adam's state of a parameter."""

    step: int  # the next_step one, from 1
    settings: AdamSettings
    tensors: AdamTensors
    numel: int  # of the whole parameter, where a rank holds a shard
    is_begun: bool  # the coming step has had an exchange, on all ranks alike, whatever became of the gradient


@dataclass
class AdamState:
    """What is known of a parameter whose updates are accumulated, beside the residual."""

    moments: Optional[AdamMoments]  # of the coming step; none from a load until then
    second_step: int  # of the optimizer, that the second moment is of
    is_update: bool = False  # the residual, which else is of gradients
    arrived: Optional[LookedUp] = None  # where alone the gradient that arrived last is not zero, if that is known
    is_continued: bool = False  # the gradient has an earlier mean of this step, too, of several backwards
    update_norm: Optional[Tensor] = None  # in this step, if it was watched

    @property
    def known(self) -> AdamMoments:
        """The moments, in a step that has them."""
        assert self.moments is not None
        return self.moments

    def take_other(self, second: Tensor, step: int) -> bool:
        """Go on from the optimizer's second moment, of some step, if it was put in the known one's place; tell if so.

        One that was loaded together with this state is of the step that stands in it.
        """
        known = second if self.moments is None else self.moments.tensors.second
        is_other = known.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
        self.second_step = step if is_other else self.second_step
        return is_other

    @property
    def scalars(self) -> AdamScalars:
        """The numbers of the coming step, where the second moment may be that of an earlier one."""
        settings = self.known.settings
        return AdamScalars(settings.beta2, 1 - settings.beta2**self.second_step, max(settings.eps, _MIN_EPS))


@dataclass
class OwnClips:
    """Clip a rank's own gradients, which are longer than the mean by a measured factor, so that the mean is clipped."""

    world_size: int
    total_of: Callable[[Tensor], Tensor]
    clips: Sequence[Clip] = ()
    factors: Optional[Tensor] = None  # by clip that has a norm, in this step
    squared_norms: dict[str, Tensor] = field(default_factory=dict)  # of a rank's, as a mean over ranks, and of the mean
    _together: list[list[str]] = field(default_factory=list)  # gradients of this step, by clip that has a norm

    @property
    def limits(self) -> list[tuple[float, frozenset[str]]]:
        """The largest norms of means, and of which gradients together."""
        return [(clipping.norm, names) for clipping, names in self.clips if clipping.norm is not None]

    def clipped_together(self, names: Sequence[str]) -> list[list[str]]:
        """Return, of the gradients of a step, those that have a limit together."""
        self._together = [[name for name in names if name in together] for _, together in self.limits]
        return self._together

    def take_norms(self, each: Sequence[Tensor], total: Tensor) -> None:
        """Know the norms of those gradients, of this rank."""
        limits = [limit * self._ratio(*of) for (limit, _), of in zip(self.limits, zip(self._together, each))]
        self.factors = factors_to(torch.stack(limits), total)

    def _ratio(self, names: Sequence[str], norms: Tensor) -> Tensor:
        """Return how much longer a rank's own gradient is than the mean, of what this step has a gradient of."""
        none = norms.new_zeros(2)
        squares = [self.squared_norms.get(name, none) for name in names]
        # What is frozen, or rests in this backward, does not count.
        total = (torch.stack(squares) * (norms > 0).unsqueeze(1)).sum(dim=0) if squares else none
        own, mean = self.total_of(total).unbind()
        # Until it has been measured: of independent gradients the mean is shorter by the root of their number.
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
        """Take squared norms of means, and of a rank's own gradients, as an average over the last times."""
        squares = torch.where(is_finite, torch.stack((of_own, of_means), dim=1), 0)
        none = squares.new_zeros(2)
        halves = torch._foreach_mul([self.squared_norms.get(name, none) for name in names], 0.5)
        self.squared_norms.update(zip(names, torch._foreach_add(list(squares.unbind()), halves)))


@dataclass
class Refreshes:
    """Whose second moment learns, in turns, and this rank's gradients of it until the next step has begun."""

    least_steps: int
    due: dict[str, int] = field(default_factory=dict)  # from which step on a parameter's is to learn again
    gradients: dict[str, Optional[Tensor]] = field(default_factory=dict)  # of those that are due, when they have come

    def ask(self, next_step: Mapping[str, AdamMoments]) -> None:
        """Ask for the gradients of those that are due in the coming step; the first time each has a turn of its own."""
        numel = sum(each.numel for each in next_step.values())
        turns = min(self.least_steps, max(1, numel // _MIN_ELEMENTS))
        for number, (name, moments) in enumerate(next_step.items()):
            turn = int(number * _GOLDEN % 1 * turns) * (self.least_steps // turns)
            if moments.step >= self.due.setdefault(name, moments.step + turn):
                self.gradients.setdefault(name, None)

    def hold(self, gradients: Mapping[str, Tensor], continued: Container[str]) -> None:
        """Hold those that were asked for as they travel, in 16 bits; ``continued`` ones of several backwards add up."""
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
        """Have what is held be no numbers if a step was not finite."""
        held = [each for each in self.gradients.values() if each is not None]
        if held and not (finite.device.type == "cpu" and finite):  # else the device decides, for which nobody waits
            flag = finite.to(held[0].device, held[0].dtype, non_blocking=True)
            torch._foreach_mul_(held, flag.reciprocal())  # 1, or infinity: zeros are then no number

    def taken(self, next_step: Mapping[str, AdamMoments]) -> dict[str, Tensor]:
        """Return those of a step that is over, in an order that no resume changes; each is due again in some steps."""
        taken = {}
        for name, moments in next_step.items():
            if not moments.is_begun and (gradient := self.gradients.get(name)) is not None:
                step, taken[name] = moments.step - 1, gradient
                self.due[name] = step + max(self.least_steps, int(_GROWTH * step))
                del self.gradients[name]
        return taken

    def forget(self, name: str) -> None:
        """Know nothing of a parameter."""
        self.due.pop(name, None)
        self.gradients.pop(name, None)


class AdamMemory(ResidualMemory):
    """Accumulate the updates of Adam where it is told the moments of a parameter, and gradients where it is not.

    The moments are the optimizer's own, whole tensors; where a rank sees to a share of each gradient, ``local_share``
    returns that of a flat tensor. Where ranks hold shards, moments included, ``total_of`` adds up numbers of a replica.
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
        self.warm_up: Optional[WarmUp] = None  # that has ended
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
        """Follow whether updates are accumulated in this step; the residual changes its unit, not its worth."""
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
        # All that the first moment would still do, if no other gradient came. Every rank keeps the same of it.
        beta1, first = moments.settings.beta1, moments.tensors.first
        owed = in_widened([self._shared(first)])[0] * (beta1 / ((1 - beta1) * (1 - beta1 ** (moments.step - 1))))
        owed = -owed if moments.settings.maximizes else owed
        first.zero_()
        if name in self._residuals:
            owed.add_(self._residuals[name])
        kept_like(self._residuals, [name], [owed])[0].copy_(owed.div_(self._denominator(state)))

    def _return_to_gradients(self, name: str, state: AdamState) -> None:
        if state.moments is None:
            del self._residuals[name]  # of an optimizer that has been replaced since: its units are not known
        else:
            self._residuals[name].mul_(self._denominator(state))
        del self.states[name]
        self.refreshes.forget(name)

    @override
    def leave(self) -> None:
        # Second moments may change before their parameters come back.
        for name, state in list(self.states.items()):
            if state.is_update:
                self._return_to_gradients(name, state)

    @override
    def rename(self, names: Renaming) -> None:
        for part in (self, self._clips, self.refreshes):
            rename_in(part, names)

    @override
    def reset(self, names: Iterable[str]) -> None:
        for name in self._residuals.keys() & names:  # the second moment and its step are the optimizer's
            self._residuals[name].zero_()
            self.refreshes.gradients.pop(name, None)

    def _denominator(self, state: AdamState) -> Tensor:
        return denominator(in_widened(self._preconditioners([state]))[0], state.scalars)

    def _shared(self, flat: Tensor) -> Tensor:
        return flat if self._share_of is None else self._share_of(flat)

    def _accumulate_updates(
        self, inputs: Mapping[str, Tensor], states: Mapping[str, AdamState], given: Mapping[str, Hyperparameters]
    ) -> None:
        """Turn gradients into updates and add the residual, in place."""
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
        accumulate_updates(gradients, waiting, self._preconditioners(each), scalars, self._world_size)
        if self.is_watched:
            for state, norm in zip(each, torch._foreach_norm(torch._foreach_sub(gradients, waiting))):
                state.update_norm = norm

    def _preconditioners(self, states: Sequence[AdamState]) -> list[Tensor]:
        return [self._shared(state.known.tensors.preconditioner) for state in states]

    @override
    def write_means(self, names: Sequence[str], gradients: Sequence[Tensor], means: Sequence[Selection]) -> None:
        known = [(number, self.states[name]) for number, name in enumerate(names) if name in self.states]
        corrected = {number: state for number, state in known if state.moments is not None}
        if not corrected:
            super().write_means(names, gradients, means)
            return
        states, own = list(corrected.values()), [gradients[number] for number in corrected]
        seconds, scalars = self._preconditioners(states), [state.scalars for state in states]
        found: dict[int, LookedUp] = {}
        if isinstance(means, FlatSelection) and gradients[0].device.type == "cpu":
            places = means.places()
            found = look_up([places[number] for number in corrected], own, seconds, scalars)
        scatter(gradients, means)
        few_to_gradients(own, found)
        rest = [each for each in range(len(own)) if each not in found]
        to_gradients([own[each] for each in rest], [seconds[each] for each in rest], [scalars[each] for each in rest])
        for each, state in enumerate(states):
            # What arrives at other ranks of the node is not known here.
            is_all = state.is_continued or self._share_of is not None
            state.arrived = None if is_all else found.get(each)

    @override
    def on_unused(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self.states:
                self.states[name].arrived = None
                if not self.states[name].is_continued:
                    self.refreshes.gradients.pop(name, None)  # and it stays due

    @override
    def on_finite(self, finite: Tensor) -> None:
        self.refreshes.on_finite(finite)

    @override
    def refresh(self, hyperparameters: Mapping[str, Hyperparameters], averages: Averages) -> None:
        """Have second moments learn from mean gradients, without residuals, of the step before, a few in each step.

        The coming step's own are known when most of its backward is over: to average them would take time of its own.
        """
        next_step = {name: each.adam for name, each in hyperparameters.items() if each.adam is not None}
        gradients = self.refreshes.taken(next_step)
        for together in _messages(gradients, next_step):
            self._learn({name: gradients.pop(name) for name in together}, next_step, averages)
        self.refreshes.ask(next_step)

    def _learn(self, gradients: Mapping[str, Tensor], next_step: Mapping[str, AdamMoments], averages: Averages) -> None:
        """Learn from gradients that travel in one message; those of a step that was not finite teach nothing."""
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
            _teach([next_step[name].tensors for name in some], list(some.values()), is_finite, beta2, known, step)
            for name in some:
                self.states[name].second_step = step

    @override
    def update_norms(self) -> dict[str, Tensor]:
        known = [(name, state.update_norm) for name, state in self.states.items() if state.moments is not None]
        return {name: norm for name, norm in known if norm is not None}

    @override
    def statistics(self) -> dict[str, Tensor]:
        """Add ``update_error``, of waiting updates to the last ones, and ``second_moment_age`` in steps."""
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
    tensors: Sequence[AdamTensors], means: Sequence[Tensor], is_finite: Tensor, beta2: float, known: int, step: int
) -> None:
    """Move second moments on from a step, by mean gradients of a later one if they are finite."""
    share = max(_MIN_KEPT, beta2 ** (step - known))
    # Both as torch keeps them: with the bias of their step.
    old, new = 1 - beta2**known, 1 - beta2**step
    taught, kept = (
        torch.full((), each, dtype=widened(means[0].dtype), device=is_finite.device)
        for each in (share * new / old, new / old)
    )
    seconds = [each.second for each in tensors]
    torch._foreach_mul_(seconds, torch.where(is_finite, taught, kept))
    torch._foreach_addcmul_(seconds, list(means), list(means), value=(1 - share) * new)
    for each in tensors:
        if each.largest is not None:
            torch.maximum(each.largest, each.second, out=each.largest)


def _messages(gradients: Mapping[str, Tensor], next_step: Mapping[str, AdamMoments]) -> Iterator[list[str]]:
    """Yield the names whose gradients travel in one message: few messages, little memory, and moments of one type."""
    starts = accumulate([gradient.numel() for gradient in gradients.values()], initial=0)
    places = [
        (start // _LEARNED_TOGETHER, next_step[name].tensors.second.dtype) for start, name in zip(starts, gradients)
    ]
    for _, together in groupby(zip(places, list(gradients)), key=lambda each: each[0]):
        yield [name for _, name in together]


def _saved(numbers: Sequence[float]) -> Tensor:
    """Return numbers as a tensor of a type that does not follow the default type, which may be narrow."""
    return torch.tensor(numbers, dtype=torch.float32)
