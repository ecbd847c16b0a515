"""Detect changes between two steps: frozen, new or replaced parameters, and loaded weights or optimizer states."""

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import compress
from operator import gt
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_sparse.engine.collectives import SharedOnCopy
from lightning_sparse.engine.memory.residual import Renaming, optimizer_parameters
from lightning_sparse.engine.step.topology import reshard
from lightning_sparse.engine.store import all_gather_via_store
from lightning_sparse.functional.elements import local_tensor
from lightning_sparse.functional.reductions import fingerprint
from lightning_sparse.loop.optimizers import listed

_ALIKE = (
    "Freeze, unfreeze and replace parameters on all ranks before the same training_step, independent of a rank's"
    " number, data and clock"
)


class TrainedParameters:
    """The parameters of a model that ranks exchange: each requires a gradient, and is in an optimizer.

    If the optimizers hold no parameter of the model, all parameters that require a gradient are exchanged.

    Args:
        module: the model.
        optimizer_parameters: parameters of all optimizers.
        exchanged: parameters that were exchanged earlier. If an optimizer holds a frozen parameter of this collection,
            ranks still exchange the parameter.

    Attributes:
        parameters: parameters that are exchanged, by name.
        names: names of all parameters of the model.
    """

    def __init__(
        self, module: Module, optimizer_parameters: Sequence[Tensor], exchanged: Collection[Tensor] = ()
    ) -> None:
        self._module = module
        self.names: dict[Tensor, str] = {each: name for name, each in module.named_parameters()}
        self._set_held(optimizer_parameters)
        before, held = set(exchanged), compress(self.names.items(), self._are_held)
        self.parameters = {name: each for each, name in held if each.requires_grad or each in before}
        self._buffers = {name for name, _ in module.named_buffers()}
        self._are_exchanged = [name in self.parameters for name in self.names.values()]

    def _set_held(self, optimizer_parameters: Sequence[Tensor]) -> None:
        self._handled = list(map(id, optimizer_parameters))
        held = set(optimizer_parameters).intersection(self.names) or self.names
        self._are_held = [each in held for each in self.names]

    def without_optimizer(self) -> list[str]:
        """Return the names of parameters that require a gradient, but are in no optimizer."""
        return [name for each, name in self.names.items() if each.requires_grad and name not in self.parameters]

    def have_changed(self, optimizer_parameters: Sequence[Tensor]) -> bool:
        """Return whether the parameters to exchange have changed (ten microseconds for a few hundred parameters)."""
        if not self._differ_from(optimizer_parameters):
            return False
        reshard(self._module)  # after an evaluation, FSDP's unsharded parameters would count as replaced
        return self._differ_from(optimizer_parameters)

    def _differ_from(self, optimizer_parameters: Sequence[Tensor]) -> bool:
        present = list(map(id, optimizer_parameters))
        if present != self._handled:
            if self.has_others():
                # Plain tensors do not count: torch.func.functional_call replaces parameters during a forward.
                return all(isinstance(each, Parameter) for each in self._module.parameters())
            self._set_held(optimizer_parameters)
            if any(map(gt, self._are_exchanged, self._are_held)):
                return True
        are_trained = [each.requires_grad and is_held for each, is_held in zip(self.names, self._are_held)]
        return any(map(gt, are_trained, self._are_exchanged))

    def has_others(self) -> bool:
        """Return whether parameters were added to the model, removed, or replaced."""
        return set(map(id, self._module.parameters())) != set(map(id, self.names))

    def known_in(self, present: "TrainedParameters") -> set[str]:
        """Return names in ``present`` of parameters that ``self`` has, too, and the names of buffers of ``self``."""
        return {present.names[each] for each in self.names if each in present.names} | self._buffers

    def lacks_any(self, optimizer_parameters: Sequence[Tensor]) -> bool:
        """Return whether one of ``optimizer_parameters`` is in the model and has a gradient, but is not exchanged."""
        others = set(self._module.parameters()).difference(self.parameters.values())
        return any(each in others and each.requires_grad and each.grad is not None for each in optimizer_parameters)

    def renaming_to(self, present: "TrainedParameters") -> Renaming:
        """Map each name in ``self`` to the parameter's name in ``present``, or to ``None`` for a removed parameter."""
        return {name: present.names.get(each) for each, name in self.names.items()}

    def changes_to(self, present: "TrainedParameters") -> str:
        """Describe the parameters that only ``present`` exchanges and the parameters that only ``self`` exchanges."""
        sides = {"new or unfrozen": (present, self), "gone": (self, present)}
        found = {change: _without(one.parameters, other.parameters) for change, (one, other) in sides.items()}
        return "; ".join(f"{change}: {listed(names)}" for change, names in found.items() if names)


def check_alike(changes: str, rank: int, timeout: Optional[timedelta]) -> None:
    """Check that all ranks call within ``timeout``, with equal ``changes``. Otherwise, raise an error on every rank."""
    try:
        everywhere = all_gather_via_store(changes, timeout)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {rank}: {changes}; but not every other rank reported a change within the timeout. {_ALIKE}."
            f" The backend's error: {error}"
        ) from error
    if len(set(everywhere)) > 1:
        said = ". ".join(f"Rank {each}: {told or 'nothing'}" for each, told in enumerate(everywhere))
        raise RuntimeError(f"ranks are about to train different parameters. {said}. {_ALIKE}")


def _without(ones: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> list[str]:
    known = set(others.values())  # compares tensors, because the name of a parameter may have changed
    return [name for name, parameter in ones.items() if parameter not in known]


ROLLED_BACK = (
    "weights or optimizer states were loaded during training: residuals and momentum of {count} parameters restart at"
    " zero."
)


class Watch(SharedOnCopy):
    """A module hook that calls ``act``. On copies of the module the hook does nothing."""

    def __init__(self, module: Optional[Module], act: Callable[..., None]) -> None:
        self._module = module
        self._act = act

    def __call__(self, module: Module, *arguments: Any) -> None:
        """Call ``act`` for the original module, and not for copies of the module."""
        if module is self._module:
            self._act(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return Watch, (None, None)


class LoadedParameters:
    """Collect the parameters of all weights and optimizer states that are loaded between two exchanges.

    A load does not count if the next exchange finds the weights from before the load. Example: a validation loads
    averaged weights, and then restores the weights of the training.
    """

    def __init__(self, module: Module, optimizers: Sequence[Optimizer]) -> None:
        # Fingerprint of the weights before the first load, or None for a parameter with a loaded optimizer state.
        self._before: dict[Tensor, Optional[Tensor]] = {}
        self._handles: list[Any] = []
        self.watch(module, optimizers)

    def watch(self, module: Module, optimizers: Sequence[Optimizer]) -> None:
        """Register hooks on all modules and optimizers, and remove earlier hooks."""
        self.close()
        for each in module.modules():
            self._handles.append(each.register_load_state_dict_pre_hook(Watch(each, partial(self._note, each))))
        for optimizer in optimizers:
            self._handles.append(optimizer.register_load_state_dict_post_hook(self._note_optimizer))

    def _note(self, module: Module, *load: Any) -> None:
        for parameter in module.parameters(recurse=False):
            self._before.setdefault(parameter, fingerprint(local_tensor(parameter)))

    def _note_optimizer(self, optimizer: Optimizer) -> None:
        self._before.update(dict.fromkeys(optimizer_parameters(optimizer)))

    def clear(self) -> None:
        """Drop all records. Called at each exchange, and after a load of weights together with residuals."""
        self._before.clear()

    def take(self) -> set[Tensor]:
        """Return the parameters with changed weights or a loaded optimizer state, and drop all records."""
        before, self._before = self._before.items(), {}
        return {
            each for each, print in before if print is None or not torch.equal(print, fingerprint(local_tensor(each)))
        }

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
