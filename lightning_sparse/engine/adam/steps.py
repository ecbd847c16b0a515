"""The optimizer steps of corrected Adam, which apply the mean update and weight decay."""

import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Adam, AdamW, Optimizer

from lightning_sparse.compressors.base import NOT_CLIPPED, Clipping
from lightning_sparse.engine.adam.correction import WarmUp
from lightning_sparse.engine.adam.memory import AdamMemory
from lightning_sparse.engine.adam.moments import AdamMoments
from lightning_sparse.engine.memory.residual import Clip, Hyperparameters, in_one, in_widened, optimizer_parameters
from lightning_sparse.engine.step.reducer import after_closure
from lightning_sparse.engine.step.step import StepContext
from lightning_sparse.functional.adam import apply_updates
from lightning_sparse.functional.elements import flatten_as, local_tensor

_KINDS = ("exp_avg", "exp_avg_sq")
_UNSUPPORTED = ("amsgrad", "differentiable", "maximize")


class _Flat(NamedTuple):
    """Flat views of a parameter and of the parameter's moments, with the viewed tensors to detect a replacement."""

    kept: list[Tensor]  # the optimizer's tensors, in the order of ``_KINDS``
    address: int  # the parameter's data pointer
    tensors: tuple[Tensor, Tensor, Tensor]  # first moment, second moment, parameter


class _Asked(NamedTuple):
    """Clipping limits, and the indices of the optimizers that share one norm of all their gradients."""

    clipping: Clipping = NOT_CLIPPED
    together: tuple[int, ...] = ()


class AskedClips:
    """Clip the next gradients to the limits from each optimizer's last step. ``norm`` is the default maximum norm."""

    def __init__(self, optimizers: Sequence[Optimizer], norm: Optional[float]) -> None:
        self._optimizers = optimizers
        self._norm = norm
        self._coming = [_Asked()] * len(optimizers)
        self._asking: set[int] = set()  # indices of optimizers with a call of :meth:`ask` in this step

    def ask(self, clipping: Clipping, parameters: Iterable[Tensor]) -> None:
        """Set the clipping, by one norm, of the next gradients of all optimizers that have any of ``parameters``."""
        if clipping == NOT_CLIPPED:
            return
        given = set(parameters)
        held = enumerate(map(optimizer_parameters, self._optimizers))
        together = tuple(number for number, trained in held if not given.isdisjoint(trained))
        for number in together:
            self._coming[number] = _Asked(clipping, together)
        self._asking.update(together)

    def end_step(self, optimizer: Optimizer) -> None:
        """End an optimizer's step. Without a call of :meth:`ask` in the step, the optimizer's clipping ends."""
        for number, each in enumerate(self._optimizers):
            if each is optimizer and number not in self._asking:
                self._coming[number] = _Asked()
            elif each is optimizer:
                self._asking.remove(number)

    def next_step(self, names: Mapping[Parameter, str]) -> list[Clip]:
        """Return the clips for the next gradients of the parameters in ``names``, one clip per common norm."""
        clipped: dict[_Asked, set[str]] = {}
        for optimizer, ((norm, value), together) in zip(self._optimizers, self._coming):
            clipping = Clipping(self._norm if norm is None else norm, value)
            if clipping != NOT_CLIPPED:
                known = clipped.setdefault(_Asked(clipping, together), set())
                known.update(names[each] for each in optimizer_parameters(optimizer) if each in names)
        return [Clip(asked.clipping, frozenset(of)) for asked, of in clipped.items()]

    def state(self) -> list[list[Any]]:
        """Return the clipping limits of each optimizer for a checkpoint."""
        return [[*clipping, list(together)] for clipping, together in self._coming]

    def load(self, saved: Sequence[Sequence[Any]]) -> None:
        """Load a result of :meth:`state` for the same optimizers. Optimizers that ``saved`` lacks do not change."""
        loaded = [_Asked(Clipping(norm, value), tuple(together)) for norm, value, together in saved]
        self._coming[: len(loaded)] = loaded
        self._asking.difference_update(range(len(loaded)))


def is_correctable(optimizer: Optimizer) -> bool:
    """Return whether an optimizer runs the ``step`` of torch's Adam or AdamW, without options in ``_UNSUPPORTED``."""
    own_step = inspect.unwrap(type(optimizer).step)
    is_theirs = own_step in (inspect.unwrap(Adam.step), inspect.unwrap(AdamW.step))
    return is_theirs and not any(group[name] for group in optimizer.param_groups for name in _UNSUPPORTED)


@dataclass
class StepCounts:
    """Read parameters' step counts from optimizers. Parameters without a name or with a density of 1 do not count."""

    optimizers: Sequence[Optimizer]
    names: Mapping[Parameter, str]
    target_of: Callable[[str], float]
    # the tensor ``state["step"]``, and its version and value at the last read, by parameter
    _counts: dict[Parameter, tuple[Tensor, int, int]] = field(default_factory=dict)
    _most: Optional[int] = None  # cached result of ``most``; ``None`` after a step or a load

    def groups(self) -> Iterator[tuple[Optimizer, dict[str, Any], list[tuple[Parameter, str, int]]]]:
        """Yield each optimizer and param group, with a list of parameters (also frozen), names and step counts."""
        for optimizer in self.optimizers:
            known = ((each, self.names.get(each)) for each in optimizer_parameters(optimizer))
            named = {each: name for each, name in known if name is not None and self.target_of(name) < 1}
            counts = self._of(optimizer, named)
            for group in optimizer.param_groups:
                members = [(each, named[each], counts.get(each, 0)) for each in group["params"] if each in named]
                yield optimizer, group, members

    @property
    def most(self) -> int:
        """The largest step count of any parameter, or -1 without parameters."""
        if self._most is None:
            self._most = max((count for *_, members in self.groups() for *_, count in members), default=-1)
        return self._most

    def set_names(self, names: Mapping[Parameter, str]) -> None:
        """Set the names of the model's current parameters."""
        self.names, self._most = names, None

    def drop_cache(self, *event: Any) -> None:
        """Drop the cached count after a step or a load."""
        self._most = None

    def count(self, optimizer: Optimizer, parameters: Iterable[Parameter]) -> None:
        """Add 1 to the step counts of parameters that :class:`AdamSteps` updates in place of the optimizer."""
        counters = {parameter: optimizer.state[parameter]["step"] for parameter in parameters}
        torch._foreach_add_(list(counters.values()), 1)
        for parameter, counter in counters.items():
            self._counts[parameter] = (counter, counter._version, self._counts[parameter][2] + 1)

    def _of(self, optimizer: Optimizer, among: Container[Parameter]) -> dict[Parameter, int]:
        """Return step counts from a cache. Only a counter that other code has changed is read from a device."""
        known, states = self._counts, list[tuple[Any, dict[str, Any]]](optimizer.state.items())
        held = ((each, state.get("step")) for each, state in states if each in among)
        counters = {each: counter for each, counter in held if counter is not None}
        stale = {
            each: counter
            for each, counter in counters.items()
            if each not in known or known[each][0] is not counter or known[each][1] != counter._version
        }
        # Counters may be on the host, or on a device after a load with map_location.
        like = max(stale.values(), key=lambda counter: counter.device.type != "cpu", default=None)
        numbers = () if like is None else in_one(list(stale.values()), like).tolist()
        for (parameter, counter), number in zip(stale.items(), numbers):
            known[parameter] = (counter, counter._version, int(number))
        return {each: known[each][2] for each in counters}


@dataclass
class AdamWarmUp:
    """Adam's warm-up: first dense steps, and then steps with falling density."""

    counts: StepCounts
    memory: AdamMemory
    total_steps: Optional[int] = None  # length of the training; ``None`` if unknown

    @property
    def length(self) -> WarmUp:
        """Lengths of the warm-up. With a default ``warmup_steps``, the lengths do not change after the dense steps."""
        correction, ended = self.memory.correction, self.memory.warm_up
        return correction.warm_up(self.total_steps) if ended is None or correction.warmup_steps else ended

    @property
    def is_dense(self) -> bool:
        """Whether the next step sends dense gradients of all parameters, because none has completed the warm-up."""
        return 0 <= self.counts.most < self.length.warmup_steps

    @property
    def progress(self) -> float:
        """Completed fraction of the steps with falling density, from 0 to 1."""
        (dense, fall), steps = self.length, self.counts.most
        return 1.0 if steps < 0 or steps - dense >= fall else max(0, steps - dense) / max(1, fall)

    def resume_from(self, before: "AdamWarmUp") -> None:
        """Continue an earlier warm-up with new optimizers. If the optimizers have no steps, the warm-up restarts."""
        self.total_steps = before.total_steps
        if not self.counts.most:
            self.memory.warm_up = None


class AdamSteps:
    """Pass Adam's moments to the exchange, and apply mean updates to corrected parameters in optimizer steps."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        names: Mapping[Parameter, str],
        target_of: Callable[[str], float],
        memory: AdamMemory,
        clip_norm: Optional[float] = None,
    ) -> None:
        self.clips = AskedClips(optimizers, clip_norm)
        self.counts = StepCounts(optimizers, names, target_of)
        self.warm_up = AdamWarmUp(self.counts, memory)
        self._optimizers = optimizers
        self._memory = memory
        self._present: dict[Parameter, AdamMoments] = {}
        self._flats: dict[Parameter, _Flat] = {}
        self._hidden: dict[Parameter, Tensor] = {}
        self._arrived: dict[Parameter, tuple[Tensor, int]] = {}  # mean gradients and tensor versions after an exchange
        self._tell: Optional[Callable[[], None]] = None
        self._unscaling_changes = 0
        self._handles: list[Any] = []
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(after_closure(self._step)))
            self._handles.append(optimizer.register_step_post_hook(self.counts.drop_cache))
            self._handles.append(optimizer.register_step_post_hook(self._show))
            self._handles.append(optimizer.register_load_state_dict_post_hook(self.see_other_states))

    def see_other_states(self, *event: Any) -> None:
        """Detect replaced second moments after a load of optimizer states or a change of optimizers."""
        self.counts.drop_cache()
        for optimizer, _, members in self.counts.groups():
            for parameter, name, count in members:
                second, state = optimizer.state.get(parameter, {}).get("exp_avg_sq"), self._memory.states.get(name)
                if not count or second is None or state is None or state.moments is None:
                    continue  # also directly after a load, when no earlier tensor is recorded
                if state.moments.second.data_ptr() != local_tensor(second).data_ptr():
                    state.second_step = count
                    self._memory.refreshes.drop(name)

    def next_step(
        self, is_dense: bool, continued: AbstractSet[Tensor] = frozenset(), begun: AbstractSet[Tensor] = frozenset()
    ) -> StepContext:
        """Return the context of the next step.

        Args:
            is_dense: whether the step sends all gradients dense.
            continued: parameters with a gradient that holds a mean of an earlier exchange of this step.
            begun: parameters that had an exchange in this step.
        """
        self._present, self._arrived = {}, {}
        hyperparameters: dict[str, Hyperparameters] = {}
        warm_up = self.warm_up.length
        groups = [] if is_dense else list(self.counts.groups())
        # If several optimizers have a parameter, each needs estimated moments, because any optimizer may step.
        whole = {
            name
            for *_, members in groups
            for parameter, name, count in members
            if count < warm_up.warmup_steps or not _fills_memory(parameter)
        }
        for optimizer, group, members in groups:
            settings, rate = _settings(optimizer, group), group["lr"]
            for parameter, name, count in members:
                if name in whole:
                    continue
                tensors = self._tensors(parameter, optimizer.state[parameter])
                moments = AdamMoments(count + 1, *tensors, *settings, parameter.numel(), parameter in begun)
                self._present[parameter] = moments
                hyperparameters[name] = Hyperparameters(rate, adam=moments, continues_step=parameter in continued)
        if hyperparameters:
            self._memory.warm_up = warm_up
        clips = () if is_dense else self.clips.next_step(self.counts.names)
        return StepContext(None, hyperparameters, whole, self.warm_up.progress, clips)

    def watch(self, tell: Callable[[], None], unscaling_changes: int) -> None:
        """Call ``tell`` once if other code changes mean gradients between an exchange and the optimizer step.

        Args:
            tell: function that warns.
            unscaling_changes: number of in-place changes of a gradient by a gradient scaler, which do not count.
        """
        self._tell, self._unscaling_changes = tell, unscaling_changes

    def note_arrived(self) -> None:
        """Record mean gradients and tensor versions. Only the first call after an exchange has an effect."""
        if not self._arrived:
            gradients = {each: each.grad for each in self._present if each.grad is not None}
            self._arrived = {each: (gradient, gradient._version) for each, gradient in gradients.items()}

    def _look_for_changes(self, optimizer: Optimizer) -> None:
        """Warn once if other code has changed a mean gradient since the exchange."""
        own = [each for each in optimizer_parameters(optimizer) if each.grad is not None]
        arrived = {each: self._arrived.pop(each) for each in own if each in self._arrived}
        is_changed = any(
            each.grad is not gradient or gradient._version > version + self._unscaling_changes
            for each, (gradient, version) in arrived.items()
        )
        if is_changed and self._tell is not None:
            self._tell()
            self._tell = None

    def close(self) -> None:
        """Remove all hooks from the optimizers."""
        self._show()
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
        self._look_for_changes(optimizer)
        # torch's fused kernel would skip a non-finite step. This code replaces the kernel, so the host reads the flag.
        found_inf = getattr(optimizer, "found_inf", None)
        is_skipped = found_inf is not None and bool(found_inf)
        for group in optimizer.param_groups:
            stepping = {
                parameter: parameter.grad
                for parameter in group["params"]
                if parameter in self._present and parameter.grad is not None
            }
            if stepping and not is_skipped:
                self._apply(optimizer, group, stepping)
            self._hide(stepping)

    def _apply(self, optimizer: Optimizer, group: Mapping[str, Any], gradients: Mapping[Parameter, Tensor]) -> None:
        shards = {parameter: local_tensor(gradient) for parameter, gradient in gradients.items()}
        held = {parameter: shard for parameter, shard in shards.items() if shard.numel()}  # without empty shards
        if held:
            self._apply_held(optimizer, group, held)
        self.counts.count(optimizer, gradients)

    def _apply_held(self, optimizer: Optimizer, group: Mapping[str, Any], held: Mapping[Parameter, Tensor]) -> None:
        states = [self._memory.states[self.counts.names[parameter]] for parameter in held]
        scale = getattr(optimizer, "grad_scale", None)
        unscaled = (gradient if scale is None else gradient / scale for gradient in held.values())
        decay = group["weight_decay"] if _is_decoupled(optimizer, group) else 0.0
        rate = float(group["lr"])  # a learning rate on a device causes one synchronization per group and step
        # After backward, other code may have moved the parameter to other memory.
        weights = [self._tensors(parameter, optimizer.state[parameter])[-1] for parameter in held]
        wide = in_widened(weights)
        apply_updates(
            wide,
            in_widened([flatten_as(gradient, local_tensor(parameter)) for parameter, gradient in zip(held, unscaled)]),
            [self._present[parameter].second for parameter in held],
            [state.scalars for state in states],
            rate,
            1 - rate * decay,
        )
        for weight, result in zip(weights, wide):
            if result is not weight:
                weight.copy_(result)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Check for changed mean gradients. Inside the context, ``.grad`` of corrected parameters is ``None``."""
        for optimizer in self._optimizers if self._arrived else ():
            self._look_for_changes(optimizer)
        self._arrived = {}
        self._hide({parameter: parameter.grad for parameter in self._present if parameter.grad is not None})
        try:
            yield
        finally:
            self._show()
            self.note_arrived()

    def _hide(self, gradients: Mapping[Parameter, Tensor]) -> None:
        self._hidden.update(gradients)
        for parameter in gradients:
            parameter.grad = None

    def _show(self, *step: Any) -> None:
        for parameter, gradient in self._hidden.items():
            parameter.grad = gradient
        self._hidden.clear()


def _is_decoupled(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, AdamW)))


def _settings(optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[float, float, float, float]:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    return beta1, beta2, group["eps"], 0.0 if _is_decoupled(optimizer, group) else group["weight_decay"]


def _fills_memory(parameter: Tensor) -> bool:
    return parameter.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(parameter))
