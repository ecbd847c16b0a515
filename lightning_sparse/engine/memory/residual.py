"""KEPT: the contract of a memory, and error feedback, in which what was not sent is added to the next gradient.

Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al. (arXiv 1901.09847). Rescaling at
a change of the learning rate: Zheng, Huang and Kwok, NeurIPS 2019 (arXiv 1905.10936). Local clipping: Lin et al., "Deep
Gradient Compression" (arXiv 1712.01887), section 3.2. Decay: SparseLoCo (arXiv 2508.15706).
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Optional, Protocol, Union

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.compressors.base import Clipping
from lightning_sparse.compressors.selection import FlatSelection, Selection, overwrite, scatter
from lightning_sparse.functional.elements import copy_elements

MemoryState = dict[str, dict[str, Tensor]]
RATES = "learning_rate"
# Kinds of what is kept that are a few numbers for each parameter, and how many.
NUMBERS = {
    RATES: 2,
    "refresh_due": 1,
    "second_moment_step": 1,
    "squared_norms": 2,
    "second_moment_mean": 2,
    "warm_up": 2,
}
_REFRESH = "refresh_gradient"  # a kind that owes the model nothing
LARGE = 1 << 15  # elements from which on memory of its own costs nothing
_RATE_RANGE = 10.0  # a residual multiplied by more would stay in the optimizer's momentum when the rate jumps back


Renaming = Mapping[str, Optional[str]]  # from each name that a parameter had to that which it has; ``None`` if gone


def renamed(state: Any, names: Renaming) -> Any:
    """Return nested dictionaries with the names that parameters have now among their keys."""
    if not isinstance(state, Mapping):
        return state
    present = ((names.get(key, key), each) for key, each in state.items())
    return {key: renamed(each, names) for key, each in present if key is not None}


def rename_in(holder: object, names: Renaming) -> None:
    """Rename parameters in all dictionaries that an object has."""
    vars(holder).update({key: renamed(each, names) for key, each in vars(holder).items() if isinstance(each, dict)})


def waiting_kinds(kinds: Iterable[str]) -> set[str]:
    """Return the kinds of residual and momentum; the others help to go on to the bit."""
    return set(kinds) - NUMBERS.keys() - {_REFRESH}


class Hyperparameters(NamedTuple):
    """The optimizer's settings for a parameter in this step."""

    learning_rate: Union[float, Tensor]  # a tensor is the optimizer's own: the host need not know it
    momentum: float = 0.0  # that the memory has taken over
    nesterov: bool = False
    adam: Optional[Any] = None  # Adam's state, where its updates are made before selection
    continues_step: bool = False  # whether the gradient was exchanged before in this step, of several backwards


class Clip(NamedTuple):
    """What the gradients of some parameters are clipped to, together: one norm is that of all of them."""

    clipping: Clipping
    names: frozenset[str]


class Averages(Protocol):
    """Means over ranks that a memory may ask for at the beginning of a step; on all ranks or on none."""

    def mean_gradients(self, gradients: Mapping[str, Tensor], numels: Sequence[int]) -> Tensor:
        """Return the mean of flat bfloat16 gradients, whole, of so many elements each, end to end."""

    def mean_squares(self, squares: Tensor) -> Tensor:
        """Return the mean, over nodes, of squared norms of gradients of which a node's ranks have shares."""


class Memory:
    """Add what is kept to the gradient before selection, and keep what was not sent after it; this keeps nothing."""

    corrects_adam: bool = False  # whether what is kept are updates of Adam or AdamW
    clips_gradients: bool = False  # whether norms of gradients are needed before the first group
    is_watched: bool = False  # whether to note what :meth:`statistics` tells; to be set before a step

    def compensate(
        self, names: Sequence[str], gradients: Sequence[Tensor], hyperparameters: Mapping[str, Hyperparameters]
    ) -> list[Tensor]:
        """Return flat gradients plus what is kept, in at least fp32: in place where their type is wide enough."""
        return in_widened(gradients)

    def keep(
        self,
        names: Sequence[str],
        accumulated: list[Tensor],
        kept: Sequence[Selection],
        accepted: Tensor,
        replaceable: Sequence[bool] = (),
    ) -> None:
        """Keep what :meth:`compensate` returned (it may be changed), with ``kept`` written over the places sent.

        ``accepted`` is bool ``[len(names)]``, or ``[]`` for all; where it is false, nothing of a parameter changes.
        Where ``replaceable``, a tensor itself may be kept, and another, undefined, be put in its place in the list.
        """

    def write_means(self, names: Sequence[str], gradients: Sequence[Tensor], means: Sequence[Selection]) -> None:
        """Write means of what was accumulated into flat gradients, as gradients."""
        scatter(gradients, means)

    def refresh(self, hyperparameters: Mapping[str, Hyperparameters], world_size: Averages) -> None:
        """Average what the memory has asked for, before a step with these settings compensates its first gradient."""

    def on_finite(self, finite: Tensor) -> None:
        """Know whether all that arrived in a step is finite, bool ``[]``, before anything is kept."""

    def on_unused(self, names: Iterable[str]) -> None:
        """Know that no mean was written to these: no rank has used them."""

    def clip_to(self, clips: Sequence[Clip]) -> None:
        """Clip the gradients that updates are made of to something else from the next step on; on all ranks."""

    def clipped_together(self, names: Sequence[str]) -> list[list[str]]:
        """Return, of the gradients of a step, those whose norm is needed: one of all in each list."""
        return [list(names)]

    def take_norms(self, each: Sequence[Tensor], total: Tensor) -> None:
        """Take norms of this rank's gradients before the first group, fp32.

        Those of ``each`` in those lists, of any scale, tell what is zero; ``total`` is that of all in each list.
        """

    def leave(self) -> None:
        """Accumulate gradients again, of all parameters, in steps that are left to plain DDP."""

    def rename(self, names: Renaming) -> None:
        """Store all under the names that parameters have now, and nothing of those that have none; between steps."""
        rename_in(self, names)

    def reset(self, names: Iterable[str]) -> None:
        """Set residuals and momentum of these parameters to zero, between two steps."""
        self.rename(dict.fromkeys(names))

    def statistics(self) -> dict[str, Tensor]:
        """Return what was done to the gradients in the last step, if it was watched, as tensors of one element."""
        return {}

    def update_norms(self) -> dict[str, Tensor]:
        """Return by name, where updates are accumulated, the norms of those of the last step, if it was watched."""
        return {}

    def state_dict(self) -> MemoryState:
        """Return what is kept, not copied; ``"residual"``, or ``"update"`` with Adam, has not been sent."""
        return {}

    def load_state_dict(self, state: MemoryState) -> None:
        """Replace what is kept by a copy."""
        if state:
            raise ValueError(
                f"a state that holds {' and '.join(state)} was given to an exchange that keeps nothing; load it into"
                " the compressor and wire that it was saved with"
            )


class ResidualMemory(Memory):
    """Error feedback: what was not sent is added to the next gradient, first multiplied by ``decay`` as in SparseLoCo.

    Takes 4 bytes an element, from a parameter's first gradient on. ``local_clip_norm`` is the largest norm of this
    rank's whole gradient. With ``rescale_on_lr_change`` the residual acts with the rate under which it was gathered:
    it is multiplied by the last over the present one, of rates of at least a tenth of the largest so far. A step with
    a rate of zero does not change it.
    """

    def __init__(
        self, local_clip_norm: Optional[float] = None, rescale_on_lr_change: bool = False, decay: float = 1.0
    ) -> None:
        self.clips_gradients = local_clip_norm is not None
        self._local_clip_norm = local_clip_norm
        self._clip_factor: Optional[Tensor] = None
        self._follows_learning_rate = rescale_on_lr_change
        self._decay = decay
        self._residuals: dict[str, Tensor] = {}
        self._rates: dict[str, Tensor] = {}  # the last, and the largest so far
        self._new_rates: dict[str, Tensor] = {}

    @override
    def compensate(
        self, names: Sequence[str], gradients: Sequence[Tensor], hyperparameters: Mapping[str, Hyperparameters]
    ) -> list[Tensor]:
        accumulated = in_widened(gradients)
        if self._clip_factor is not None:
            torch._foreach_mul_(accumulated, self._clip_factor)
        self._accumulate(names, accumulated, hyperparameters)
        return accumulated

    @override
    def take_norms(self, each: Sequence[Tensor], total: Tensor) -> None:
        assert self._local_clip_norm is not None
        self._clip_factor = factors_to(self._local_clip_norm, total).squeeze(0)

    def _accumulate(
        self, names: Sequence[str], gradients: list[Tensor], hyperparameters: Mapping[str, Hyperparameters]
    ) -> None:
        """Add the residuals to the gradients, in place."""
        if names:
            torch._foreach_add_(gradients, self._waiting(names, gradients, hyperparameters), alpha=self._decay)

    def _waiting(
        self, names: Sequence[str], gradients: list[Tensor], hyperparameters: Mapping[str, Hyperparameters]
    ) -> list[Tensor]:
        """Return what is added to the gradients: residuals in terms of the present learning rate."""
        residuals = kept_like(self._residuals, names, gradients)
        if not (self._follows_learning_rate and hyperparameters):
            return residuals
        ratios = self._rate_ratios(names, [hyperparameters[name].learning_rate for name in names], gradients[0])
        if ratios.device.type != "cpu":
            return list(torch._foreach_mul(residuals, ratios.unbind()))
        return [kept if ratio == 1 else kept * ratio for kept, ratio in zip(residuals, ratios.tolist())]

    def _rate_ratios(self, names: Sequence[str], rates: Sequence[Union[float, Tensor]], like: Tensor) -> Tensor:
        present = in_one(rates, like)
        last = torch.stack([self._rates.get(name, rate.expand(2)) for name, rate in zip(names, present.unbind())])
        new = torch.stack((present, torch.maximum(present, last[:, 1])), dim=1)
        self._new_rates.update(zip(names, new.unbind()))
        ratios = _unit_rates(last) / _unit_rates(new)
        return torch.where(torch.minimum(last[:, 0], present) > 0, ratios, 1.0)

    @override
    def keep(
        self,
        names: Sequence[str],
        accumulated: list[Tensor],
        kept: Sequence[Selection],
        accepted: Tensor,
        replaceable: Sequence[bool] = (),
    ) -> None:
        accepted = self._accept_rates(names, accepted)
        residuals = kept_like(self._residuals, names, accumulated)
        if accepted.device.type != "cpu":
            # Asking the device for the decision would stop the host; both outcomes cost one pass: it chooses itself.
            overwrite(accumulated, kept)
            overwrite_accepted(residuals, accumulated, accepted)
        elif not isinstance(kept, FlatSelection):
            for residual, selection, is_accepted in zip(residuals, kept, accepted.expand(len(residuals)).tolist()):
                if is_accepted:  # what is overwritten as a whole need not be copied first
                    copy_elements(selection.values, residual)
        else:
            overwrite(accumulated, kept)
            places = [place for place, is_accepted in enumerate(accepted.expand(len(names)).tolist()) if is_accepted]
            may_trade = [place for place in places if replaceable and replaceable[place]]
            traded = {place for place in may_trade if _can_trade(residuals[place], accumulated[place])}
            for place in traded:
                self._residuals[names[place]], accumulated[place] = accumulated[place], residuals[place]
            if copied := [place for place in places if place not in traded]:
                torch._foreach_copy_([residuals[place] for place in copied], [accumulated[place] for place in copied])

    def _accept_rates(self, names: Sequence[str], accepted: Tensor) -> Tensor:
        """Return which residuals change: those of parameters that the optimizer changes."""
        if not self._new_rates:
            return accepted
        present = torch.stack([self._new_rates[name] for name in names])
        last = torch.stack([self._rates.get(name, self._new_rates[name]) for name in names])
        accepted = accepted.to(present.device, non_blocking=True) & (present[:, 0] > 0)
        self._rates.update(zip(names, torch.where(accepted.unsqueeze(1), present, last).unbind()))
        return accepted

    @override
    def statistics(self) -> dict[str, Tensor]:
        """Return ``local_clip_factor``, by which this rank's gradient was multiplied, if gradients are clipped."""
        return {} if self._clip_factor is None else {"local_clip_factor": self._clip_factor}

    @override
    def state_dict(self) -> MemoryState:
        state = {"residual": dict(self._residuals)}
        return {**state, RATES: dict(self._rates)} if self._rates else state

    @override
    def load_state_dict(self, state: MemoryState) -> None:
        self._residuals = laid_clones(state.get("residual", {}))
        self._rates = cloned(state.get(RATES, {}))


def in_one(numbers: Sequence[Union[float, Tensor]], like: Tensor) -> Tensor:
    """Return numbers, of which some may be tensors, as one tensor of the type and the device of another."""
    if not any(isinstance(number, Tensor) for number in numbers):
        return torch.tensor(numbers, dtype=like.dtype).to(like.device, non_blocking=True)
    each = (number if isinstance(number, Tensor) else torch.tensor(number) for number in numbers)
    return torch.stack([number.to(like.device, like.dtype, non_blocking=True).reshape(()) for number in each])


def _unit_rates(rates: Tensor) -> Tensor:
    """Return the rates that residuals follow, of ``[names, 2]`` last and largest ones."""
    return torch.maximum(rates[:, 0], rates[:, 1] / _RATE_RANGE)


def factors_to(limits: Union[float, Tensor], norms: Tensor) -> Tensor:
    """Return by what gradients of such norms are multiplied so as not to be longer than their limits."""
    # What is not finite has such a norm, and a factor of zero or NaN; both leave something that is not finite.
    return (limits / norms).clamp(max=1.0)


def kept_like(kept: dict[str, Tensor], names: Sequence[str], likes: Sequence[Tensor]) -> list[Tensor]:
    """Return what is kept under some names; under new ones zeros, kept from now on, in one piece of memory.

    Large ones on a CPU have memory of their own, which may change places with a gradient's.
    """
    new = {name: like for name, like in zip(names, likes) if name not in kept}
    is_host = bool(likes) and likes[0].device.type == "cpu"
    fresh = {name: like.new_zeros(like.numel()) for name, like in new.items() if is_host and like.numel() >= LARGE}
    others = [name for name in new if name not in fresh]
    for dtype in {new[name].dtype for name in others}:
        some = {name: new[name] for name in others if new[name].dtype is dtype}
        numels = [like.numel() for like in some.values()]
        fresh.update(zip(some, next(iter(some.values())).new_zeros(sum(numels)).split(numels)))
    kept.update((name, fresh[name]) for name in new)
    return [kept[name] for name in names]


def _can_trade(tensor: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors are of one type, each all of its memory, which can then be given back without it."""
    is_all = (each.untyped_storage().nbytes() == each.nbytes for each in (tensor, other))
    return tensor.dtype is other.dtype and all(is_all)


def overwrite_accepted(tensors: Sequence[Tensor], sources: Sequence[Tensor], accepted: Tensor) -> None:
    """Copy flat sources, in place, over those tensors that are accepted: bool by tensor, or ``[]`` for all of them."""
    for tensor, source, is_accepted in zip(tensors, sources, accepted.expand(len(tensors))):
        torch.where(is_accepted, source, tensor, out=tensor)


def laid_clones(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy flat tensors by name, side by side in memory."""
    clones: dict[str, Tensor] = {}
    for clone, tensor in zip(kept_like(clones, list(tensors), list(tensors.values())), tensors.values()):
        clone.copy_(tensor)
    return clones


def cloned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors by name."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


@cache
def widened(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which gradients of a type are accumulated and kept: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def in_widened(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients in the type in which they are accumulated; those that have it are not copied."""
    narrow = [gradient for gradient in gradients if gradient.dtype is not widened(gradient.dtype)]
    if len(narrow) < len(gradients) or len({gradient.dtype for gradient in narrow}) > 1:
        return [gradient.to(widened(gradient.dtype)) for gradient in gradients]
    numels = [gradient.numel() for gradient in narrow]
    # Side by side, and in one call.
    wide = list(narrow[0].new_empty(sum(numels), dtype=widened(narrow[0].dtype)).split(numels)) if narrow else []
    torch._foreach_copy_(wide, narrow)
    return wide
