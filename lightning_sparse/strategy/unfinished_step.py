"""The optimizer step in progress, which a checkpoint may come in the midst of."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Optional

from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_sparse.engine import Engine
from lightning_sparse.loop.optimizers import handled


class UnfinishedStep:
    """Follow which gradients wait for their optimizer, and put back those that a checkpoint was written with."""

    def __init__(self) -> None:
        self.is_begun = False  # there was a backward since the last step of an optimizer
        self._waiting: list[Optimizer] = []
        self._restored: dict[Parameter, Tensor] = {}
        self._used: list[Parameter] = []

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

    def state(self, module: Module, engine: Optional[Engine]) -> dict[str, Any]:
        """Return what a checkpoint has to hold; empty between two steps."""
        if not self._waiting:
            return {}
        # Also those that an optimizer has stepped with: where another one's turn comes next, its backward adds to them.
        gradients = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
        state: dict[str, Any] = {"gradients": gradients, "is_accumulating": self.is_begun}
        if engine is not None:
            names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
            state["arrived"] = {names[parameter]: arrived for parameter, arrived in engine.arrived.state().items()}
            state["undecayed"] = engine.memory.undecayed()
            if engine.used_parameters is not None:
                state["used"] = [names[parameter] for parameter in engine.used_parameters]
        return state

    def restore(self, gradients: Mapping[Parameter, Tensor], is_begun: bool, used: Iterable[Parameter]) -> None:
        """Go on from a checkpoint, once :meth:`put_back` is called."""
        self._restored = dict(gradients)
        self.is_begun = is_begun
        self._used = list(used)

    @contextmanager
    def put_aside(self) -> Iterator[None]:
        """Have a new wrapper not find restored gradients: DDP would divide them otherwise than those of a backward."""
        gradients = {parameter: parameter.grad for parameter in self._restored}
        for parameter in gradients:
            parameter.grad = None
        yield
        for parameter, gradient in gradients.items():
            parameter.grad = gradient

    def drop_frozen(self) -> None:
        """Drop restored gradients of parameters that are not trained any more, once users have frozen them."""
        for parameter in [each for each in self._restored if not each.requires_grad]:
            parameter.grad = None
            del self._restored[parameter]

    def close(self) -> None:
        """Forget everything, at the end of training."""
        self._restored, self._used = {}, []

    def put_back(self, optimizers: Sequence[Optimizer]) -> list[Parameter]:
        """Put restored gradients in their place; Lightning sets all to zero between the two."""
        for parameter, gradient in self._restored.items():
            parameter.grad = gradient
        self._waiting = [each for each in optimizers if not self._restored.keys().isdisjoint(handled(each))]
        self.is_begun = self.is_begun and bool(self._restored)
        used, self._used = self._used, []
        return used
