"""A rollback in mid-training: weights or an optimizer's state are loaded, and residuals of the old weights are void."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_sparse.engine.collectives import Watch
from lightning_sparse.functional.elements import local_tensor
from lightning_sparse.functional.reductions import fingerprint

ROLLED_BACK = (
    "weights or optimizer states were loaded in mid-training: residuals and momentum of {count} parameters start again"
    " from zero."
)


class LoadedParameters:
    """Collect the parameters whose weights, or whose optimizer's state, are loaded between two exchanges.

    A load that another one reverses, such as of averaged weights for a validation, does not count.
    """

    def __init__(self, module: Module, optimizers: Sequence[Optimizer]) -> None:
        self._fingerprints: dict[Tensor, Tensor] = {}  # of weights before the first load
        self._of_optimizers: set[Tensor] = set()
        self._handles: list[Any] = []
        self.watch(module, optimizers)

    def watch(self, module: Module, optimizers: Sequence[Optimizer]) -> None:
        """Register hooks on all modules and optimizers that there are now."""
        self.close()
        for each in module.modules():
            self._handles.append(each.register_load_state_dict_pre_hook(Watch(each, partial(self._note, each))))
        for optimizer in optimizers:
            self._handles.append(optimizer.register_load_state_dict_post_hook(self._note_optimizer))

    def _note(self, module: Module, *load: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter not in self._fingerprints:
                self._fingerprints[parameter] = fingerprint(local_tensor(parameter))

    def _note_optimizer(self, optimizer: Optimizer) -> None:
        self._of_optimizers.update(each for group in optimizer.param_groups for each in group["params"])

    def clear(self) -> None:
        """Start anew, as an exchange begins, or a state with the residuals of these weights is loaded as well."""
        self._fingerprints.clear()
        self._of_optimizers.clear()

    def take(self) -> set[Tensor]:
        """Return the loaded parameters, and start anew."""
        before = self._fingerprints.items()
        moved = {each for each, print in before if not torch.equal(print, fingerprint(local_tensor(each)))}
        loaded = moved | self._of_optimizers
        self.clear()
        return loaded

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
