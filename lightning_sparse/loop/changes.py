"""Detect changes between two steps: frozen, new or replaced parameters, and loaded weights."""

from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn import Module, Parameter

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
        before, held = set(exchanged), set(optimizer_parameters).intersection(self.names) or self.names
        trained = ((name, each) for each, name in self.names.items() if each.requires_grad or each in before)
        self.parameters = {name: each for name, each in trained if each in held}
        self.record_use(optimizer_parameters)

    def record_use(self, optimizer_parameters: Sequence[Tensor]) -> None:
        """Record which parameters optimizers hold, and which parameters require a gradient."""
        self._use = self._use_of(optimizer_parameters)

    def _use_of(self, optimizer_parameters: Sequence[Tensor]) -> tuple[list[int], list[bool]]:
        return list(map(id, optimizer_parameters)), [each.requires_grad for each in self.names]

    def may_have_changed(self, optimizer_parameters: Sequence[Tensor]) -> bool:
        """Return whether the use differs from the recorded use (ten microseconds for a few hundred parameters)."""
        if self._use_of(optimizer_parameters) == self._use:
            return False
        # Plain tensors do not count: torch.func.functional_call replaces parameters during a forward.
        return all(isinstance(each, Parameter) for each in self._module.parameters())

    def without_optimizer(self) -> list[str]:
        """Return the names of parameters that require a gradient, but are in no optimizer."""
        return [name for each, name in self.names.items() if each.requires_grad and name not in self.parameters]

    def has_others(self) -> bool:
        """Return whether parameters were added to the model, removed, or replaced."""
        return set(map(id, self._module.parameters())) != set(map(id, self.names))

    def lacks_any(self, optimizer_parameters: Iterable[Tensor]) -> bool:
        """Return whether one of ``optimizer_parameters`` is in the model and has a gradient, but is not exchanged."""
        exchanged = set(self.parameters.values())
        others = [each for each in optimizer_parameters if each not in exchanged]
        trained = {each for each in others if each.requires_grad and each.grad is not None}
        return bool(trained) and not trained.isdisjoint(self._module.parameters())

    def changes_to(self, present: "TrainedParameters") -> str:
        """Return the names of parameters that only one of ``self`` and ``present`` exchanges, as text."""
        changed = set(self.parameters.values()) ^ set(present.parameters.values())
        return listed([name for each, name in {**self.names, **present.names}.items() if each in changed])


def check_alike(changes: str, rank: int, timeout: Optional[timedelta]) -> None:
    """Check that all ranks call within ``timeout``, with equal ``changes``. Otherwise, raise an error on every rank."""
    try:
        everywhere = all_gather_via_store(changes, timeout)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {rank} changes {changes}, but not every other rank reported a change within the timeout. {_ALIKE}."
            f" The backend's error: {error}"
        ) from error
    if len(set(everywhere)) > 1:
        said = ". ".join(f"Rank {each} changes {told or 'nothing'}" for each, told in enumerate(everywhere))
        raise RuntimeError(f"ranks are about to train different parameters. {said}. {_ALIKE}")


class Watch:
    """A module hook that calls ``act``. On deep or pickled copies of the module, the hook does nothing."""

    def __init__(self, act: Callable[..., None] = lambda *event: None) -> None:
        self._act = act

    def __call__(self, *event: Any) -> None:
        """Call ``act`` with the module and the other arguments of the hook."""
        self._act(*event)

    def __reduce__(self) -> tuple[Any, ...]:
        return Watch, ()


class LoadedParameters:
    """Collect the parameters of all weights that are loaded between two exchanges.

    A load does not count if the next exchange finds the weights from before the load. Example: a validation loads
    averaged weights, and then restores the weights of the training.
    """

    def __init__(self, module: Module) -> None:
        self._before: dict[Tensor, Tensor] = {}  # fingerprint of the weights before the first load
        self._handles: list[Any] = []
        self.watch(module)

    def watch(self, module: Module) -> None:
        """Register hooks on all modules, and remove earlier hooks."""
        self.close()
        self._handles = [each.register_load_state_dict_pre_hook(Watch(self._note)) for each in module.modules()]

    def _note(self, module: Module, *load: Any) -> None:
        for parameter in module.parameters(recurse=False):
            self._before.setdefault(parameter, fingerprint(local_tensor(parameter)))

    def take(self) -> set[Tensor]:
        """Return the loaded parameters if any weights differ from before the load, and drop all records."""
        before, self._before = self._before, {}
        # A loaded parameter with equal weights counts, too: its residual may hold gradients of other weights.
        has_changed = any(not torch.equal(print, fingerprint(local_tensor(each))) for each, print in before.items())
        return set(before) if has_changed else set()

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
