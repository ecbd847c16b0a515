"""The part of a gradient that exchanges of the step in progress have brought."""

from collections.abc import Callable, Collection, Iterable, Sequence, Set
from functools import partial
from typing import Any, Optional

from torch import Tensor

from lightning_sparse.functional.elements import local_tensor


class ReducedGradients:
    """Tell apart what exchanges have brought of a gradient, the same on all ranks, and what this rank has added since.

    A step of several backwards has several exchanges: each is given only what was added after the one before.
    """

    def __init__(self) -> None:
        self.begun: set[Tensor] = set()  # parameters exchanged since their step, whatever became of their gradients
        self._written: dict[Tensor, Tensor] = {}  # gradients that are means, as nothing has been added since
        self._copies: dict[Tensor, Tensor] = {}  # of means to which something has been added
        self._handles: dict[Tensor, Any] = {}
        self.optimizer_parameters: Callable[[], Collection[Tensor]] = tuple  # parameters that optimizers train

    def drop_infinities(self) -> None:
        """Set to zero what is no finite number in means that no optimizer will ever set to zero.

        Nobody steps by them. Left there, they would be in all later sums, and no step would be finite any more.
        """
        optimizer_parameters = set(self.optimizer_parameters() if self._written else ())
        for parameter, gradient in self._written.items() if optimizer_parameters else ():
            if parameter not in optimizer_parameters and parameter.grad is gradient:
                local_tensor(gradient).nan_to_num_(0, 0, 0)

    @property
    def has_means(self) -> bool:
        """Whether a gradient holds what an exchange has brought, so that backward would add to it."""
        return bool(self._written or self._copies)

    def watch(self, parameters: Sequence[Tensor]) -> None:
        """Watch what backward adds to, from the next one on; what is frozen for a while is left to a later call."""
        if len(self._handles) == len(parameters):
            return
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._handles:
                self._handles[parameter] = parameter.register_hook(partial(self._keep, parameter))

    def unwatch(self) -> None:
        """Watch no more; means stay known."""
        self.keep()
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def keep(self) -> None:
        """Copy all means, before somebody adds to what they are in."""
        for parameter in list(self._written):
            self._keep(parameter)

    def _keep(self, parameter: Tensor, *addend: Tensor) -> None:
        """Copy the mean in a gradient that backward is about to add to."""
        gradient = self._written.pop(parameter, None)
        if parameter.grad is None:
            self._copies.pop(parameter, None)
        elif gradient is not None and parameter.grad is gradient:  # else somebody has replaced it
            self._copies[parameter] = gradient.detach().clone()

    @property
    def continued(self) -> set[Tensor]:
        """Parameters whose gradients hold a mean of the step; that of what no optimizer has is of any step before."""
        held = {each for each in self._copies if each.grad is not None}
        held |= {each for each, mean in self._written.items() if each.grad is mean}
        return (
            held & optimizer_parameters if held and (optimizer_parameters := set(self.optimizer_parameters())) else held
        )

    def take(self, parameter: Tensor) -> Optional[Tensor]:
        """Return the mean that a gradient holds, ``None`` for none, and forget it."""
        if not self._written and not self._copies:
            return None
        written, copy = self._written.pop(parameter, None), self._copies.pop(parameter, None)
        return None if parameter.grad is None else written if parameter.grad is written else copy

    def note(self, parameters: Iterable[Tensor], unused: Set[Tensor]) -> None:
        """Take gradients for means after an exchange, also of what no rank has used: there is nothing of one rank."""
        for parameter in parameters:
            if (gradient := parameter.grad) is not None:
                self._written[parameter] = gradient
                if parameter not in unused:
                    self.begun.add(parameter)

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """End the step of parameters: what their gradients hold from now on is of the next."""
        for parameter in parameters:
            self.begun.discard(parameter)
            self._written.pop(parameter, None)
            self._copies.pop(parameter, None)

    def clear(self) -> None:
        """Take all gradients for the rank's own."""
        self.begun.clear()
        self._written.clear()
        self._copies.clear()
