"""The optimizer step in progress, which a checkpoint may come in the midst of."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_sparse.engine.loop.optimizers import handled, waiting_gradients


class UnfinishedStep:
    """Follow which gradients wait for their optimizer, and put back those that a checkpoint was written with.

    Attributes:
        is_begun: whether there was a backward since the last step of an optimizer.
    """

    def __init__(self) -> None:
        self.is_begun = False
        self._exchanged: list[Optimizer] = []
        self._waiting: list[Optimizer] = []
        self._restored: dict[Parameter, Tensor] = {}
        self._arrived: dict[Tensor, Tensor] = {}

    def add_backward(self, optimizers: Sequence[Optimizer], is_automatic: bool) -> None:
        """Record a backward that begins, under automatic optimization or manual."""
        self.is_begun = True
        self._waiting = list(optimizers)
        if is_automatic:
            # With another accumulate_grad_batches than before, Lightning takes this batch for the first of a step.
            for parameter, gradient in self._restored.items():
                parameter.grad = gradient if parameter.grad is None else parameter.grad

    def hold_arrived(self, is_exchanged: bool) -> AbstractSet[Tensor]:
        """Keep what exchanges of the same step have brought out of the gradients that the next one is given.

        Args:
            is_exchanged: whether the backward that begins ends in an exchange; before others it is only copied.

        Returns:
            the parameters that it has brought something of.
        """
        for parameter in chain.from_iterable(map(handled, self._exchanged)):
            gradient = parameter.grad
            if gradient is None:
                self._arrived.pop(parameter, None)
            elif gradient.layout is torch.strided and parameter not in self._arrived:
                self._arrived[parameter] = gradient.detach().clone()
        if is_exchanged:
            self._add_arrived(-1)  # what is not finite does not become zero, so that the exchange hears of it
        return self._arrived.keys()

    def give_arrived(self, optimizers: Sequence[Optimizer]) -> None:
        """Put back, after an exchange for some optimizers, what was held."""
        self._add_arrived(1)
        self._arrived = {}
        self._exchanged = list(optimizers)

    @torch.no_grad()
    def _add_arrived(self, sign: int) -> None:
        for parameter, arrived in self._arrived.items():
            assert parameter.grad is not None
            parameter.grad.add_(arrived, alpha=sign)

    def end(self, optimizer: Optimizer) -> None:
        """End a step of an optimizer."""
        self.is_begun = False
        self._waiting = [each for each in self._waiting if each is not optimizer]
        self._exchanged = [each for each in self._exchanged if each is not optimizer]
        if self._arrived:
            done = set(handled(optimizer))
            self._arrived = {each: arrived for each, arrived in self._arrived.items() if each not in done}
        # Only now: DDP puts views of its buckets in their place while, on a GPU, a stream that their memory's allocator
        # has not heard of still reads them. That memory would be given to the gradient of another layer.
        self._restored = {}

    def state(self, module: Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Return what a checkpoint has to hold; empty between two steps."""
        if not self._waiting:
            return {}
        gradients = waiting_gradients(module, optimizers, self._waiting)
        state: dict[str, Any] = {"gradients": gradients, "is_accumulating": self.is_begun}
        if self._exchanged:
            names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
            state["arrived"] = {names[parameter]: arrived for parameter, arrived in self._arrived.items()}
            state["exchanged"] = [any(each is known for known in self._exchanged) for each in optimizers]
        return state

    def restore(
        self,
        gradients: Mapping[Parameter, Tensor],
        is_begun: bool,
        arrived: Mapping[Parameter, Tensor],
        exchanged: Sequence[Optimizer],
    ) -> None:
        """Go on from a checkpoint, once :meth:`put_back` is called."""
        self._restored = dict(gradients)
        self.is_begun = is_begun
        self._arrived = dict(arrived.items())
        self._exchanged = list(exchanged)

    def close(self) -> None:
        """Forget everything, at the end of training."""
        self._restored, self._arrived, self._exchanged = {}, {}, []

    def put_back(self, optimizers: Sequence[Optimizer]) -> None:
        """Put restored gradients in their place; Lightning sets all to zero between the two."""
        for parameter, gradient in self._restored.items():
            parameter.grad = gradient
        self._waiting = [each for each in optimizers if not self._restored.keys().isdisjoint(handled(each))]
        self.is_begun = self.is_begun and bool(self._restored)
