"""The optimizer step in progress, which a checkpoint may come in the midst of."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_sparse.strategy.optimizers import handled, waiting_gradients


class UnfinishedStep:
    """Follow which gradients wait for their optimizer, and put back those that a checkpoint was written with.

    Attributes:
        is_begun: whether there was a backward since the last step of an optimizer.
    """

    def __init__(self) -> None:
        self.is_begun = False
        self._waiting: list[Optimizer] = []
        self._restored: dict[Parameter, Tensor] = {}

    def add_backward(self, optimizers: Sequence[Optimizer], is_automatic: bool) -> None:
        """Record a backward that begins, under automatic optimization or manual."""
        self.is_begun = True
        self._waiting = list(optimizers)
        if is_automatic:
            # With another accumulate_grad_batches than before, Lightning takes this batch for the first of a step.
            for parameter, gradient in self._restored.items():
                parameter.grad = gradient if parameter.grad is None else parameter.grad

    def end(self, optimizer: Optimizer) -> None:
        """End a step of an optimizer."""
        self.is_begun = False
        self._waiting = [each for each in self._waiting if each is not optimizer]
        # Only now: DDP puts views of its buckets in their place while, on a GPU, a stream that their memory's allocator
        # has not heard of still reads them. That memory would be given to the gradient of another layer.
        self._restored = {}

    def state(self, module: Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Return what a checkpoint has to hold; empty between two steps."""
        if not self._waiting:
            return {}
        gradients = waiting_gradients(module, optimizers, self._waiting)
        return {"gradients": gradients, "is_accumulating": self.is_begun}

    def restore(self, gradients: Mapping[Parameter, Tensor], is_begun: bool) -> None:
        """Go on from a checkpoint, once :meth:`put_back` is called."""
        self._restored = dict(gradients)
        self.is_begun = is_begun

    def close(self) -> None:
        """Forget what was restored, at the end of training."""
        self._restored = {}

    def put_back(self, optimizers: Sequence[Optimizer]) -> None:
        """Put restored gradients in their place; Lightning sets all to zero between the two."""
        for parameter, gradient in self._restored.items():
            parameter.grad = gradient
        self._waiting = [each for each in optimizers if not self._restored.keys().isdisjoint(handled(each))]
        self.is_begun = self.is_begun and bool(self._restored)
