"""Which parameters are trained: those that the model was wrapped for, until some are frozen, unfrozen or added."""

from collections.abc import Mapping, Sequence

from torch.nn import Module, Parameter
from torch.optim import Optimizer

_SHOWN = 5  # names in a message


class TrainedParameters:
    """Notice that other parameters are trained than those that a model was wrapped for.

    DDP takes care of what requires a gradient when it is built. What is unfrozen later it leaves alone, so replicas
    drift apart without a word; for what is frozen later it waits for ever.

    Args:
        module: the model, as it is wrapped.

    Example::

        >>> import torch
        >>> layer = torch.nn.Linear(2, 2)
        >>> trained = TrainedParameters(layer)
        >>> layer.bias.requires_grad = False
        >>> trained.have_changed([]), trained.changes()
        (True, "frozen: 'bias'")
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._parameters = list(module.parameters())
        self._are_trained = [parameter.requires_grad for parameter in self._parameters]
        self._trained = self._present()
        self._handled = -1

    def __len__(self) -> int:
        """Return how many were trained when the model was wrapped."""
        return len(self._trained)

    def have_changed(self, optimizers: Sequence[Optimizer]) -> bool:
        """Tell whether others are trained now; on a few hundred parameters it takes some ten microseconds."""
        handled = sum(len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups)
        if handled != self._handled:
            self._handled = handled
            if self.has_new():  # which takes longer, and without an optimizer they are not trained
                return True
        return [parameter.requires_grad for parameter in self._parameters] != self._are_trained

    def has_new(self) -> bool:
        """Tell whether the model has parameters that it did not have when it was wrapped."""
        present = list(self._module.parameters())
        return len(present) != len(self._parameters) or any(map(_is_other, present, self._parameters))

    def frozen(self) -> list[str]:
        """Return the names of those that were trained and are not any more."""
        return _without(self._trained, self._present())

    def unfrozen(self) -> list[str]:
        """Return the names of those that are trained now and were not."""
        return _without(self._present(), self._trained)

    def holds_gradients(self) -> list[str]:
        """Return the names of those that were frozen with a gradient."""
        return [name for name in self.frozen() if self._trained[name].grad is not None]

    def changes(self) -> str:
        """Say what has changed."""
        changes = {"frozen": self.frozen(), "unfrozen": self.unfrozen()}
        return "; ".join(f"{change}: {listed(names)}" for change, names in changes.items() if names)

    def _present(self) -> dict[str, Parameter]:
        return {name: parameter for name, parameter in self._module.named_parameters() if parameter.requires_grad}


def listed(names: Sequence[str]) -> str:
    """Name the first few, and count the others.

    Example::

        >>> listed(["a", "b"]), listed(["a", "b", "c", "d", "e", "f"])
        ("'a', 'b'", "'a', 'b', 'c', 'd', 'e' and 1 more")
    """
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def _without(ones: Mapping[str, Parameter], others: Mapping[str, Parameter]) -> list[str]:
    return [name for name, parameter in ones.items() if others.get(name) is not parameter]


def _is_other(one: object, other: object) -> bool:
    return one is not other
