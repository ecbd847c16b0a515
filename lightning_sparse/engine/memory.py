"""Memories, which store the residual and momentum of each parameter between steps, as flat tensors.

Error feedback, which adds the unsent residual to the next gradient: Seide et al., "1-Bit Stochastic Gradient Descent",
Interspeech 2014; Karimireddy et al. (arXiv 1901.09847). Rescaling at a change of the learning rate: Zheng, Huang and
Kwok, NeurIPS 2019 (arXiv 1905.10936). Local clipping and momentum correction: Lin et al., "Deep Gradient Compression"
(arXiv 1712.01887), sections 3.1 to 3.3. Decay: SparseLoCo (arXiv 2508.15706).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sparse.compressors.selection import Selection, overwrite, scatter
from lightning_sparse.functional.elements import in_batches

MemoryState = dict[str, dict[str, Tensor]]
RATES = "learning_rate"
# Kinds of state with only a few numbers per parameter, which are equal on all ranks.
NUMBERS = frozenset({RATES, "refresh_due", "second_moment_step", "squared_norms", "warm_up"})
_REFRESH = "refresh_gradient"  # kind of state: gradients that update Adam's second moment
_RATE_RANGE = 10.0  # maximum factor of a rescaled residual, because momentum would repeat a huge gradient


Renaming = Mapping[str, Optional[str]]  # new name by old parameter name; ``None`` for a removed parameter


def renamed(state: Any, names: Renaming) -> Any:
    """Return nested dictionaries with renamed keys. An entry with the new name ``None`` is dropped."""
    if not isinstance(state, Mapping):
        return state
    present = ((names.get(key, key), each) for key, each in state.items())
    return {key: renamed(each, names) for key, each in present if key is not None}


def rename_in(holder: object, names: Renaming) -> None:
    """Rename parameters in all dictionaries that are attributes of ``holder``."""
    vars(holder).update({key: renamed(each, names) for key, each in vars(holder).items() if isinstance(each, dict)})


def waiting_kinds(kinds: Iterable[str]) -> set[str]:
    """Return the kinds of state that hold unsent values (residual, momentum). Other kinds only make a resume exact."""
    return set(kinds) - NUMBERS - {_REFRESH}


def optimizer_parameters(optimizer: Optimizer) -> list[Parameter]:
    """Return the parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class Hyperparameters(NamedTuple):
    """Optimizer settings of a parameter in this step."""

    learning_rate: Union[float, Tensor]  # a tensor belongs to the optimizer, and the host does not read it
    momentum: float = 0.0  # momentum that the memory applies in place of the optimizer
    nesterov: bool = False


class Memory:
    """Error feedback: add the unsent residual, multiplied by ``decay`` (SparseLoCo), to the next gradient.

    The residual takes 4 bytes per element, from a parameter's first gradient on. With a ``decay`` of 0, the memory
    stores nothing. ``local_clip_norm`` limits the norm of this rank's gradient of the whole model. With
    ``rescale_on_lr_change`` the residual is multiplied by the last learning rate divided by the current rate. Older
    gradients then act with their original rate. In this division, a rate counts as at least a tenth of the largest rate
    so far. A step with a rate of zero does not change the residual.
    """

    corrects_adam: bool = False  # whether the residual holds updates of Adam or AdamW, not gradients
    is_watched: bool = False  # whether to record :meth:`update_norms`; set this before a step
    total_steps: Optional[int] = None  # optimizer steps of the training; ``None`` if unknown

    def __init__(
        self, local_clip_norm: Optional[float] = None, rescale_on_lr_change: bool = False, decay: float = 1.0
    ) -> None:
        # whether the memory needs the norm of all gradients before the first bucket
        self.clips_gradients = local_clip_norm is not None
        self._local_clip_norm = local_clip_norm
        self._clip_factor: Optional[Tensor] = None
        self._rescales = rescale_on_lr_change
        self._decay = decay
        self._residuals: dict[str, Tensor] = {}
        self._rates: dict[str, Tensor] = {}  # ``[2]``: last learning rate, and largest rate so far
        self._new_rates: dict[str, Tensor] = {}

    def compensate(
        self, names: Sequence[str], gradients: Sequence[Tensor], hyperparameters: Mapping[str, Hyperparameters]
    ) -> list[Tensor]:
        """Return flat gradients plus residuals in fp32 or wider. Inputs in fp32 or wider are changed in place."""
        accumulated = in_widened(gradients)
        if self._clip_factor is not None:
            torch._foreach_mul_(accumulated, self._clip_factor)
        self._accumulate(names, accumulated, hyperparameters)
        return accumulated

    def update_residual(
        self, names: Sequence[str], accumulated: list[Tensor], kept: Sequence[Selection], accepted: Tensor
    ) -> None:
        """Store the accumulated gradients as residuals. At selected indices, store only the unsent part ``kept``.

        Args:
            names: parameter names.
            accumulated: results of :meth:`compensate`; may be changed.
            kept: unsent part of each selection.
            accepted: a flag per parameter, bool ``[len(names)]``, or one flag for all, ``[]``. The state of a parameter
                with a false flag does not change.
        """
        if self._decay:
            accepted = self._accept_rates(names, accepted)
            residuals = state_like(self._residuals, names, accumulated)
            overwrite(accumulated, kept)
            overwrite_accepted(residuals, accumulated, accepted)

    def write_means(self, names: Sequence[str], gradients: Sequence[Tensor], means: Sequence[Selection]) -> None:
        """Overwrite flat gradients with means over ranks. Means of Adam's updates are converted to gradients."""
        scatter(gradients, means)

    def refresh(self, moments: Mapping[str, Any]) -> None:
        """Before a step's first bucket, set Adam's state for the step, and update second moments, on all ranks.

        Residual updates of parameters that ``moments`` lacks are converted to gradients.
        """

    def on_finite(self, finite: Tensor) -> None:
        """Receive a flag, bool ``[]``: whether all messages are finite. :meth:`update_residual` runs later."""

    def on_unused(self, names: Iterable[str]) -> None:
        """Receive the names of parameters that have no mean gradient, because no rank used the parameters."""

    def set_norm(self, norm: Tensor) -> None:
        """Receive the norm of all gradients of this rank, fp32 ``[]``, before the first bucket of a step."""
        assert self._local_clip_norm is not None
        # The factor is 0 for an infinite norm, and NaN for NaN. A non-finite element times either factor is NaN.
        self._clip_factor = (self._local_clip_norm / norm).clamp(max=1.0)

    def rename(self, names: Renaming) -> None:
        """Rename parameters in the state, and drop removed parameters. Call this between steps."""
        rename_in(self, names)

    def reset(self, names: Iterable[str]) -> None:
        """Reset residuals and momentum of parameters to zero, between two steps."""
        self.rename(dict.fromkeys(names))

    def update_norms(self) -> dict[str, Tensor]:
        """Return the norm of each parameter's last update of Adam, by parameter name. Requires ``is_watched``."""
        return {}

    def state_dict(self) -> MemoryState:
        """Return the state without copies. ``"residual"`` has unsent gradients, ``"update"`` unsent Adam updates."""
        state = {"residual": dict(self._residuals)} if self._decay else {}
        return {**state, RATES: dict(self._rates)} if self._rates else state

    def load_state_dict(self, state: MemoryState) -> None:
        """Replace the state by a copy of ``state``."""
        self._residuals = cloned(state.get("residual", {}))
        self._rates = cloned(state.get(RATES, {}))

    def _accumulate(
        self, names: Sequence[str], gradients: list[Tensor], hyperparameters: Mapping[str, Hyperparameters]
    ) -> None:
        if names and self._decay:
            torch._foreach_add_(gradients, self._waiting(names, gradients, hyperparameters), alpha=self._decay)

    def _waiting(
        self, names: Sequence[str], gradients: list[Tensor], hyperparameters: Mapping[str, Hyperparameters]
    ) -> list[Tensor]:
        """Return the residuals, rescaled to the present learning rate."""
        residuals = state_like(self._residuals, names, gradients)
        if not (self._rescales and hyperparameters):
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

    def _accept_rates(self, names: Sequence[str], accepted: Tensor) -> Tensor:
        """Store learning rates of accepted parameters. Return ``accepted``, but false for a learning rate of zero."""
        if not self._new_rates:
            return accepted
        present = torch.stack([self._new_rates[name] for name in names])
        last = torch.stack([self._rates.get(name, self._new_rates[name]) for name in names])
        accepted = accepted.to(present.device, non_blocking=True) & (present[:, 0] > 0)
        self._rates.update(zip(names, torch.where(accepted.unsqueeze(1), present, last).unbind()))
        return accepted


class MomentumMemory(Memory):
    """Apply momentum ``m`` to each gradient ``g``, and add the momentum buffer ``u`` to the residual ``v``.

    The memory replaces the optimizer's momentum. Otherwise, an element sent after many steps would lack the momentum of
    these steps. Here, unsent elements accumulate momentum, too.

    Each step computes ``u = m u + g``, then ``v = v + u``. With Nesterov momentum, ``u = m (u + g)``, then
    ``v = v + u + g``. The compressor selects elements of ``v``. The memory takes 12 bytes per element, or 4 without
    momentum. With ``masks_momentum``, ``u`` becomes zero at sent elements (momentum factor masking). If all elements of
    a parameter are sent, ``u`` is not masked, as in momentum SGD. ``rescale_on_lr_change`` rescales ``v``, and not
    ``u``.
    """

    def __init__(
        self,
        without_optimizer: Hyperparameters,
        masks_momentum: bool = True,
        local_clip_norm: Optional[float] = None,
        rescale_on_lr_change: bool = False,
    ) -> None:
        super().__init__(local_clip_norm, rescale_on_lr_change)
        self._without_optimizer = without_optimizer
        self._masks_momentum = masks_momentum
        self._momenta: dict[str, Tensor] = {}
        self._in_flight: dict[str, Tensor] = {}

    @override
    def _accumulate(
        self, names: Sequence[str], gradients: list[Tensor], hyperparameters: Mapping[str, Hyperparameters]
    ) -> None:
        """Add momenta and residuals to gradients, in place. ``_in_flight`` stores the new momenta."""
        settings = {name: hyperparameters.get(name, self._without_optimizer) for name in names}
        # Without momentum, no momentum buffer is necessary.
        if not (self._momenta or any(each.momentum for each in settings.values())):
            super()._accumulate(names, gradients, hyperparameters)
            return
        momenta, in_flight = (state_like(state, names, gradients) for state in (self._momenta, self._in_flight))
        residuals = self._waiting(names, gradients, hyperparameters)
        rows: defaultdict[bool, list[tuple[Any, ...]]] = defaultdict(list)
        for own, *tensors in zip(settings.values(), momenta, in_flight, gradients, residuals):
            rows[own.nesterov].append((*tensors, own.momentum))
        for is_nesterov, alike in rows.items():
            _add_momentum(alike, is_nesterov)

    @override
    def update_residual(
        self, names: Sequence[str], accumulated: list[Tensor], kept: Sequence[Selection], accepted: Tensor
    ) -> None:
        if self._in_flight.keys() >= set(names):
            in_flight = [self._in_flight[name] for name in names]
            if self._masks_momentum:
                for velocity, each, unsent in zip(in_flight, accumulated, kept):
                    _mask_sent(velocity, each, unsent)
            overwrite_accepted([self._momenta[name] for name in names], in_flight, accepted)
        super().update_residual(names, accumulated, kept, accepted)

    @override
    def state_dict(self) -> MemoryState:
        return {**super().state_dict(), "momentum": dict(self._momenta)}

    @override
    def load_state_dict(self, state: MemoryState) -> None:
        super().load_state_dict(state)
        self._momenta = cloned(state.get("momentum", {}))
        self._in_flight = {}  # Loaded momenta may have other shapes.


def _add_momentum(rows: Sequence[Sequence[Any]], is_nesterov: bool) -> None:
    """Write ``u`` of :class:`MomentumMemory` to the velocities, and ``v`` to the gradients."""
    for momenta, velocities, gradients, residuals, factors in in_batches(*zip(*rows)):
        torch._foreach_copy_(velocities, momenta)
        if is_nesterov:
            torch._foreach_add_(velocities, gradients)
            torch._foreach_mul_(velocities, factors)
            torch._foreach_add_(gradients, velocities)
        else:
            torch._foreach_mul_(velocities, factors)
            torch._foreach_add_(velocities, gradients)
            torch._foreach_copy_(gradients, velocities)
        torch._foreach_add_(gradients, residuals)


def _mask_sent(momentum: Tensor, accumulated: Tensor, kept: Selection) -> None:
    """Set the momentum of sent elements to zero, in place."""
    if kept.indices is None or kept.indices.numel() == kept.numel:
        return
    # Momentum stays if a selected value was not sent, because the message was full or the value was rounded to 0.
    is_whole = kept.values == accumulated.index_select(0, kept.indices)
    momentum.index_copy_(0, kept.indices, momentum.index_select(0, kept.indices) * is_whole)


def in_one(numbers: Sequence[Union[float, Tensor]], like: Tensor) -> Tensor:
    """Return numbers or scalar tensors as a single tensor with the dtype and device of ``like``."""
    if not any(isinstance(number, Tensor) for number in numbers):
        return torch.tensor(numbers, dtype=like.dtype).to(like.device, non_blocking=True)
    each = (number if isinstance(number, Tensor) else torch.tensor(number) for number in numbers)
    return torch.stack([number.to(like.device, like.dtype, non_blocking=True).reshape(()) for number in each])


def _unit_rates(rates: Tensor) -> Tensor:
    """Return ``max(last, largest / 10)`` for each row ``[last, largest]`` of ``rates``."""
    return torch.maximum(rates[:, 0], rates[:, 1] / _RATE_RANGE)


def state_like(state: dict[str, Tensor], names: Sequence[str], likes: Sequence[Tensor]) -> list[Tensor]:
    """Return the stored tensor of each name. A new name gets flat zeros like the tensor in ``likes``."""
    state.update({name: like.new_zeros(like.numel()) for name, like in zip(names, likes) if name not in state})
    return [state[name] for name in names]


def overwrite_accepted(tensors: Sequence[Tensor], sources: Sequence[Tensor], accepted: Tensor) -> None:
    """Copy ``sources[i]`` to ``tensors[i]`` if ``accepted[i]`` is true. ``accepted`` may be one flag ``[]`` for all."""
    are_accepted = accepted.expand(len(tensors))
    if accepted.device.type == "cpu":
        places = [place for place, is_accepted in enumerate(are_accepted.tolist()) if is_accepted]
        if places:
            torch._foreach_copy_([tensors[place] for place in places], [sources[place] for place in places])
        return
    for tensor, source, is_accepted in zip(tensors, sources, are_accepted):  # A read of ``accepted`` would synchronize.
        torch.where(is_accepted, source, tensor, out=tensor)


def cloned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors by name."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


@cache
def widened(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of ``dtype`` are accumulated: fp32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def in_widened(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Convert gradients to fp32 or wider. A gradient that is already fp32 or wider is returned without a copy."""
    narrow = [gradient for gradient in gradients if gradient.dtype is not widened(gradient.dtype)]
    if len(narrow) < len(gradients) or len({gradient.dtype for gradient in narrow}) > 1:
        return [gradient.to(widened(gradient.dtype)) for gradient in gradients]
    numels = [gradient.numel() for gradient in narrow]
    # One allocation and one call for all gradients are faster than one of each per gradient.
    wide = list(narrow[0].new_empty(sum(numels), dtype=widened(narrow[0].dtype)).split(numels)) if narrow else []
    torch._foreach_copy_(wide, narrow)
    return wide
