"""The part of a gradient that exchanges of the step in progress have brought."""

from collections.abc import Callable, Collection, Iterable, Sequence, Set
from functools import partial
from typing import Any

from torch import Tensor

from lightning_sparse.functional.elements import local_tensor


class ReducedGradients:
    """The means that exchanges have written to gradients, apart from this rank's contributions to the next exchange.

    A step of several backwards has several exchanges. When one begins, means are taken out of ``p.grad``, which holds
    this rank's contribution alone from then on. They are added to the new means.
    """

    def __init__(self) -> None:
        self.begun: set[Tensor] = set()  # parameters exchanged since their step, whatever became of their gradients
        self._means: dict[Tensor, Tensor] = {}  # gradients to which nothing was added since their exchange
        self._copies: dict[Tensor, Tensor] = {}  # copies of means to which something was added
        self._handles: dict[Tensor, Any] = {}
        self.optimizer_parameters: Callable[[], Collection[Tensor]] = tuple  # parameters that optimizers train

    def drop_infinities(self) -> None:
        """Set non-finite values to zero in means that no optimizer will ever set to zero.

        Otherwise these values would stay in all later sums, and no later step would be finite.
        """
        optimizer_parameters = set(self.optimizer_parameters() if self._means else ())
        for parameter, gradient in self._means.items() if optimizer_parameters else ():
            if parameter not in optimizer_parameters and parameter.grad is gradient:
                local_tensor(gradient).nan_to_num_(0, 0, 0)

    @property
    def has_means(self) -> bool:
        """Whether a gradient holds a mean, to which backward would add."""
        return bool(self._means or self._copies)

    def watch(self, parameters: Sequence[Tensor]) -> None:
        """Copy means before a backward adds to them, from the next one on; frozen parameters wait for a later call."""
        if len(self._handles) == len(parameters):
            return
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._handles:
                self._handles[parameter] = parameter.register_hook(partial(self._keep, parameter))

    def unwatch(self) -> None:
        """Copy all means now, and remove the hooks."""
        self.keep()
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def keep(self) -> None:
        """Copy all means."""
        for parameter in list(self._means):
            self._keep(parameter)

    def _keep(self, parameter: Tensor, *addend: Tensor) -> None:
        mean = self._means.pop(parameter, None)
        if parameter.grad is None:
            self._copies.pop(parameter, None)
        elif parameter.grad is mean:  # else it was replaced
            self._copies[parameter] = mean.detach().clone()

    @property
    def continued(self) -> set[Tensor]:
        """Parameters of optimizers with a mean of the step in progress in their gradient."""
        held = {each for each in self._copies if each.grad is not None}
        held |= {each for each, mean in self._means.items() if each.grad is mean}
        held &= self.begun  # the gradient of an unused parameter may hold the mean of an earlier step
        return held.intersection(self.optimizer_parameters() or held) if held else held

    def take_means(self) -> dict[Tensor, Tensor]:
        """Take the means out of gradients, and return them."""
        taken: dict[Tensor, Tensor] = {}
        for parameter, mean in self._means.items():
            if parameter.grad is mean:
                taken[parameter], parameter.grad = mean, None
        for parameter, mean in self._copies.items():
            if parameter.grad is not None and parameter not in taken:  # infinities become NaN, and stay visible
                taken[parameter], parameter.grad = mean, (parameter.grad - mean).detach()
        self._means.clear()
        self._copies.clear()
        return taken

    def note(self, parameters: Iterable[Tensor], unused: Set[Tensor]) -> None:
        """Record the gradients as means after an exchange, also gradients of parameters that no rank has used."""
        for parameter in parameters:
            if (gradient := parameter.grad) is not None:
                self._means[parameter] = gradient
                if parameter not in unused:
                    self.begun.add(parameter)

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """Drop the records of parameters at the end of their step."""
        for parameter in parameters:
            self.begun.discard(parameter)
            self._means.pop(parameter, None)
            self._copies.pop(parameter, None)

    def clear(self) -> None:
        """Treat all gradients as this rank's own contributions."""
        self.begun.clear()
        self._means.clear()
        self._copies.clear()


def add_mean(parameter: Tensor, mean: Tensor) -> None:
    """Add a mean that was taken out of a gradient; other gradients may share the memory of either."""
    parameter.grad = mean if parameter.grad is None else (mean + parameter.grad).detach()
