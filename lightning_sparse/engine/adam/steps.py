"""The optimizer steps of corrected Adam, which apply the mean update and weight decay."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from operator import is_
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Adam, AdamW, Optimizer

from lightning_sparse.engine.adam.correction import WarmUp
from lightning_sparse.engine.adam.memory import AdamMemory, AdamMoments, DenseNorms
from lightning_sparse.engine.memory import in_one, in_widened
from lightning_sparse.engine.step.reducer import after_closure
from lightning_sparse.engine.step.step import StepContext
from lightning_sparse.functional.adam import apply_updates, to_updates
from lightning_sparse.functional.elements import flatten_as, local_tensor

_KINDS = ("exp_avg", "exp_avg_sq")
_UNSUPPORTED = ("amsgrad", "differentiable", "maximize")
_CHECKED = 1000  # steps with changed gradients per check whether the changes are only clipping
_ROUNDED = 1.02  # largest growth of an update that counts as a rounding error of first moments in bfloat16


class _Flat(NamedTuple):
    """Flat views of a parameter and of the parameter's moments, with the viewed tensors to detect a replacement."""

    kept: list[Tensor]  # the optimizer's tensors, in the order of ``_KINDS``
    address: int  # the parameter's data pointer
    tensors: tuple[Tensor, Tensor, Tensor]  # first moment, second moment, parameter


def is_correctable(optimizer: Optimizer) -> bool:
    """Return whether an optimizer runs the ``step`` of torch's Adam or AdamW, without options in ``_UNSUPPORTED``."""
    own_step = inspect.unwrap(type(optimizer).step)
    is_theirs = own_step in (inspect.unwrap(Adam.step), inspect.unwrap(AdamW.step))
    return is_theirs and not any(group[name] for group in optimizer.param_groups for name in _UNSUPPORTED)


# Optimizer, param group, parameter, name and step count.
Row = tuple[Optimizer, dict[str, Any], Parameter, str, int]


class StepCounts:
    """Read step counts from optimizers, except for parameters outside of the model, or with a density of 1."""

    def __init__(
        self, optimizers: Sequence[Optimizer], names: Mapping[Parameter, str], target_of: Callable[[str], float]
    ) -> None:
        self.names = names
        self._optimizers = optimizers
        self._target_of = target_of
        self._known: dict[Tensor, tuple[int, int]] = {}  # version and value of each counter ``state["step"]``

    def rows(self) -> list[Row]:
        """Return a row for each parameter, also if frozen."""
        names = {each: name for each, name in self.names.items() if self._target_of(name) < 1}
        rows = [
            (optimizer, group, each, names[each])
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for each in group["params"]
            if each in names
        ]
        counters = [optimizer.state.get(each, {}).get("step") for optimizer, _, each, _ in rows]
        self._read([counter for counter in counters if counter is not None])
        return [(*row, self._known.get(counter, (0, 0))[1]) for row, counter in zip(rows, counters)]

    def count(self, optimizer: Optimizer, parameters: Iterable[Parameter]) -> None:
        """Add 1 to the step counts of parameters that :class:`AdamSteps` updates in place of the optimizer."""
        known, counters = self._known, [optimizer.state[parameter]["step"] for parameter in parameters]
        torch._foreach_add_(counters, 1)
        known.update({each: (each._version, known[each][1] + 1) for each in counters if each in known})

    def _read(self, counters: Sequence[Tensor]) -> None:
        """Read counters from their device, but only counters that are new, or changed by other code."""
        stale = [each for each in counters if each not in self._known or self._known[each][0] != each._version]
        if stale:
            # Counters may be on the host, or on a device after a load with map_location.
            numbers = in_one(stale, max(stale, key=lambda each: each.device.type != "cpu")).tolist()
            self._known.update({each: (each._version, int(number)) for each, number in zip(stale, numbers)})


def most_steps(rows: Iterable[Row]) -> int:
    """Return the largest step count of any parameter, or -1 without parameters."""
    return max((count for *_, count in rows), default=-1)


class MeanUpdates:
    """The mean updates of an exchange. Adam's first moments hold the updates until the optimizer's step."""

    def __init__(self, counts: StepCounts, memory: AdamMemory, warn: Callable[[], None]) -> None:
        self._counts = counts
        self._memory = memory
        # mean gradient, version of the gradient, and first moment with the update, from exchange to optimizer step
        self._stored: dict[Parameter, tuple[Tensor, int, Tensor]] = {}
        self._changed_steps = 0  # number of param groups' steps before which other code had changed mean gradients
        self._warn: Optional[Callable[[], None]] = warn  # for changes without effect; ``None`` afterwards

    def exchanged(self, parameters: Iterable[Parameter]) -> dict[Parameter, Tensor]:
        """Return the mean gradients of parameters that are exchanged as updates."""
        names, moments = self._counts.names, self._memory.moments
        return {each: each.grad for each in parameters if each.grad is not None and names.get(each) in moments}

    def store(self, loss_scale: Optional[Tensor]) -> None:
        """After an exchange, convert mean gradients to updates, and divide by the loss scale ``[]`` if given."""
        gradients = self.exchanged(self._counts.names)
        firsts = self.firsts(gradients)
        held = zip(gradients.items(), firsts)
        self._stored = {each: (gradient, gradient._version, first) for (each, gradient), first in held}
        self._convert(gradients, firsts, self._memory.scale_if_finite(loss_scale))

    def firsts(self, parameters: Iterable[Parameter]) -> list[Tensor]:
        """Return the first moments of parameters, flat."""
        return [self._moments_of(each).first for each in parameters]

    def _moments_of(self, parameter: Parameter) -> AdamMoments:
        return self._memory.moments[self._counts.names[parameter]]

    def _convert(
        self, gradients: Mapping[Parameter, Tensor], updates: Sequence[Tensor], scale: Optional[Tensor]
    ) -> None:
        flats = [flatten_as(local_tensor(gradient), local_tensor(each)) for each, gradient in gradients.items()]
        scalars = self._memory.scalars(self._counts.names[each] for each in gradients)
        to_updates(flats, [self._moments_of(each).second for each in gradients], scalars, updates, scale)

    def prepare(self, gradients: Mapping[Parameter, Tensor], scale: Optional[Tensor]) -> None:
        """Prepare updates for the optimizer's step, which follows.

        Gradients without a stored update are converted now. Changes of other gradients since the exchange have no
        effect, except that non-finite updates become zero. Changes other than clipping cause a warning.
        """
        if late := {each: gradient for each, gradient in gradients.items() if each not in self._stored}:
            self._convert(late, self.firsts(late), scale)
        stored = {each: self._stored.pop(each) for each in gradients.keys() - late.keys()}
        changed = {
            each: gradients[each]
            for each, (gradient, version, _) in stored.items()
            if gradients[each] is not gradient or gradient._version != version
        }
        if not changed:
            return
        self._changed_steps += 1
        # The check synchronizes with a GPU.
        if self._changed_steps % _CHECKED == 1 and self._warn is not None and not self._are_clipped(changed, scale):
            self._warn()
            self._warn = None
        for first in self.firsts(changed):
            first.nan_to_num_(0.0, 0.0, 0.0)

    def _are_clipped(self, gradients: Mapping[Parameter, Tensor], scale: Optional[Tensor]) -> bool:
        """Return whether gradients are only clipped or unscaled: no element has grown, changed sign, or become zero."""
        are_clipped = []
        for each, gradient in gradients.items():
            before = self._moments_of(each).first
            after = torch.empty_like(before)
            self._convert({each: gradient}, [after], scale)
            ratios = after / before
            are_clipped.append((((ratios > 0) & (ratios < _ROUNDED)) | ratios.isnan()).all())  # NaN from 0 / 0
        return bool(torch.stack(are_clipped).all())

    def drop(self) -> None:
        """Drop all updates that no optimizer step has applied: set the first moments to zero."""
        for *_, first in self._stored.values():
            first.zero_()
        self._stored = {}

    def remove_from(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        """Write zeros to the state dictionary ``saved`` in place of first moments that hold updates."""
        for group, numbers in zip(optimizer.param_groups, saved["param_groups"]):
            for parameter, number in zip(group["params"], numbers["params"]):
                if parameter in self._stored and (state := saved["state"].get(number)):
                    saved["state"][number] = {**state, "exp_avg": torch.zeros_like(state["exp_avg"])}


class AdamSteps:
    """Pass Adam's moments to the exchange, and apply mean updates to corrected parameters in optimizer steps."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        names: Mapping[Parameter, str],
        target_of: Callable[[str], float],
        memory: AdamMemory,
        warn: Callable[[], None],
    ) -> None:
        self.counts = StepCounts(optimizers, names, target_of)
        self._memory = memory
        self._updates = MeanUpdates(self.counts, memory, warn)
        self._norms = DenseNorms(memory)
        self._flats: dict[Parameter, _Flat] = {}
        self._hidden: dict[Parameter, Tensor] = {}
        self._handles: list[Any] = []
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(after_closure(self._step)))
            self._handles.append(optimizer.register_step_post_hook(self._show))
            self._handles.append(optimizer.register_state_dict_post_hook(self._updates.remove_from))

    @property
    def is_dense(self) -> bool:
        """Whether the next step sends dense gradients of all parameters, because none has completed the warm-up."""
        return 0 <= most_steps(self.counts.rows()) < self._memory.warm_up_length.warmup_steps

    def next_step(self, is_dense: bool, continued: AbstractSet[Tensor]) -> StepContext:
        """Return the context of the next step, which sends all gradients dense if ``is_dense``.

        The gradients of parameters in ``continued`` hold the mean of an earlier exchange of this step.
        """
        self._updates.drop()
        warm_up, moments = self._memory.warm_up_length, dict[str, AdamMoments]()
        rows = self.counts.rows()
        # A parameter in several optimizers is dense until each optimizer has made the warm-up steps: any may step next.
        whole = {
            name
            for _, _, parameter, name, count in rows
            if is_dense or count < warm_up.warmup_steps or not _fills_memory(parameter)
        }
        self._norms.names = {parameter: name for _, _, parameter, name, _ in rows if name in whole}
        for optimizer, group, parameter, name, count in rows:
            if name not in whole:
                tensors = self._tensors(parameter, optimizer.state[parameter])
                self._norms.undo_clipping(name, *tensors[:2])
                settings, continues = _settings(optimizer, group), parameter in continued
                moments[name] = AdamMoments(count + 1, *tensors, *settings, parameter.numel(), continues)
        if moments:
            self._memory.warm_up = warm_up
        return StepContext(moments=moments, dense=whole, warm_up_progress=_progress(warm_up, most_steps(rows)))

    @torch.no_grad()
    def store_updates(self, loss_scale: Optional[Tensor]) -> None:
        """After an exchange, store mean updates, and the norms of dense mean gradients.

        Args:
            loss_scale: scale of the gradients, ``[]``; ``None`` for unscaled gradients.
        """
        self._norms.record(loss_scale)
        self._updates.store(loss_scale)

    def close(self) -> None:
        """Remove all hooks from the optimizers."""
        self._show()
        self._updates.drop()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _tensors(self, parameter: Parameter, state: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Return flat views of Adam's tensors. Views are made again if any tensor was replaced."""
        weight = parameter if type(parameter) is Parameter else local_tensor(parameter)
        known = self._flats.get(parameter)
        if known is None or known.address != weight.data_ptr() or not all(map(is_, known.kept, map(state.get, _KINDS))):
            for kind in _KINDS:
                if state[kind].stride() != parameter.stride():
                    state[kind] = torch.empty_like(parameter).copy_(state[kind])
            kept = [state[kind] for kind in _KINDS]
            first, second, flat = (flatten_as(local_tensor(each)) for each in (*kept, parameter))
            known = self._flats[parameter] = _Flat(kept, weight.data_ptr(), (first, second, flat))
        return known.tensors

    @torch.no_grad()
    def _step(self, optimizer: Optimizer) -> None:
        # torch's fused kernel would skip a non-finite step. This code replaces the kernel, so the host reads the flag.
        found_inf, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
        is_skipped = found_inf is not None and bool(found_inf)
        for group in optimizer.param_groups:
            stepping = self._updates.exchanged(group["params"])
            if not is_skipped:
                self._norms.compare(group, scale)
            if stepping and not is_skipped:
                self._updates.prepare(stepping, scale)
                self._apply(optimizer, group, stepping)
                self.counts.count(optimizer, stepping)
            self._hidden.update(stepping)
            for parameter in stepping:
                parameter.grad = None  # so that the optimizer's own step leaves the parameter out

    def _apply(self, optimizer: Optimizer, group: Mapping[str, Any], stepping: Iterable[Parameter]) -> None:
        decay = group["weight_decay"] if _is_decoupled(optimizer, group) else 0.0
        rate = float(group["lr"])  # a learning rate on a device causes one synchronization per group and step
        # After backward, other code may have moved the parameter to other memory.
        weights = [self._tensors(parameter, optimizer.state[parameter])[-1] for parameter in stepping]
        wide = in_widened(weights)
        apply_updates(wide, self._updates.firsts(stepping), rate, 1 - rate * decay)
        for weight, result in zip(weights, wide):
            if result is not weight:
                weight.copy_(result)

    def _show(self, *step: Any) -> None:
        for parameter, gradient in self._hidden.items():
            parameter.grad = gradient
        self._hidden.clear()


def _progress(warm_up: WarmUp, steps: int) -> float:
    """Return the completed fraction of the steps with falling density, from 0 to 1; 1 if ``steps`` is negative."""
    dense, fall = warm_up
    return 1.0 if steps < 0 or steps - dense >= fall else max(0, steps - dense) / max(1, fall)


def _is_decoupled(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, AdamW)))


def _settings(optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[float, float, float, float]:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    return beta1, beta2, group["eps"], 0.0 if _is_decoupled(optimizer, group) else group["weight_decay"]


def _fills_memory(parameter: Tensor) -> bool:
    return parameter.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(parameter))
