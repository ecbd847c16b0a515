"""What exchanges have brought of gradients whose optimizer step is not over."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Optional

from torch import Tensor
from torch.nn import Parameter

from lightning_sparse.functional import laid_flat


class ArrivedGradients:
    """Tell what exchanges have brought of each gradient, the same on all ranks, from what its rank has added since.

    The next exchange of a step is given the second alone, and what it brings is added to the first: momentum and Adam's
    moments would take that for a gradient, and of a parameter that no rank has used since nothing is to change.
    """

    def __init__(self) -> None:
        self._written: dict[Tensor, Tensor] = {}  # gradients to which nothing has been added since
        self._copies: dict[Tensor, Tensor] = {}  # of the others, as they were before
        self._handles: list[Any] = []

    def watch(self, parameters: Iterable[Parameter]) -> None:
        """Watch what backward adds to."""
        trained = (parameter for parameter in parameters if parameter.requires_grad)
        self._handles = [parameter.register_hook(partial(self._keep, parameter)) for parameter in trained]

    def unwatch(self) -> None:
        """Watch no more; what has arrived is known, also when gradients lie in the memory of a new wrapper."""
        for parameter in list(self._written):
            self._keep(parameter)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _keep(self, parameter: Tensor, *addend: Tensor) -> None:
        """Copy what has arrived of a gradient that backward is about to add to."""
        gradient = self._written.pop(parameter, None)
        if parameter.grad is None:
            self._copies.pop(parameter, None)
        elif gradient is not None:  # which DDP may have moved since, and somebody replaced
            self._copies[parameter] = gradient.detach().clone()

    def state(self) -> dict[Tensor, Tensor]:
        """Return what has arrived, by parameter (not copied)."""
        known = {**self._copies, **self._written}
        return {parameter: arrived for parameter, arrived in known.items() if parameter.grad is not None}

    def restore(self, arrived: Mapping[Parameter, Tensor]) -> None:
        """Go on from what :meth:`state` returned."""
        self._written.clear()
        self._copies = {parameter: tensor.clone() for parameter, tensor in arrived.items()}

    def take(self, gradients: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Optional[Tensor]]]:
        """Forget what has arrived of gradients that are about to be exchanged.

        Args:
            gradients: parameters, each with its gradient, flat.

        Returns:
            those gradients that hold what has arrived, each with that, flat; with ``None`` where it holds nothing else.
        """
        found: list[tuple[Tensor, Optional[Tensor]]] = []
        for parameter, gradient in gradients if self._written or self._copies else ():
            written, copy = self._written.pop(parameter, None), self._copies.pop(parameter, None)
            if written is not None and parameter.grad is written:
                found.append((gradient, None))
            elif copy is not None and parameter.grad is not None:
                found.append((gradient, laid_flat(copy, parameter)))
        return found

    def note(self, parameters: Iterable[Tensor]) -> None:
        """Take the gradients of parameters, after their exchange, for what has arrived."""
        self._written.update((each, each.grad) for each in parameters if each.grad is not None)

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """End the step of parameters: what their gradients hold from now on is of the next."""
        for parameter in parameters:
            self._written.pop(parameter, None)
            self._copies.pop(parameter, None)

    def clear(self) -> None:
        """Take all gradients for the rank's own."""
        self._written.clear()
        self._copies.clear()
