"""Models whose compute waits for as long as a GPU takes: what an exchange costs beside it, measured without a GPU.

Forward and backward sleep, and backward hands each tensor's gradient over at the moment at which a GPU would have it;
processors are free for the exchange, which is real. To make up for few processors, everything can be slower by a
factor: the times here, and with them the network's rate and delay. What then runs on a processor weighs less by it.

Tensors are those of the models; backward's time is shared out by their multiplications, as in the simulations of
OMGS-SGD's authors. Times of a batch:

* ``resnet50`` (32 images), ``vgg16`` (CIFAR-10's, 128 images) and ``lstm_ptb`` (20 texts of 35 words) on a P102-100, of
  the time breaks for OMGS-SGD (Shi et al., INFOCOM 2020) in github.com/trl730109/DreamDDP, scripts/infocom20.
* ``gpt2``, 124 M parameters, 12 texts of 1024 tokens in bfloat16: 135 ms on an A100 (github.com/karpathy/nanoGPT,
  README, compiled), of which forward is taken to be a third. Its embedding is also its last layer: that gradient is
  complete last.
* ``gpt_characters``, 10.7 M parameters, 64 texts of 256 characters: 36 ms on an A100 (the same README: 5000 iterations
  in 3 minutes), likewise.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from lightning_sparse.compressors import TopK
from lightning_sparse.compressors.base import ErrorFeedback
from lightning_sparse.compressors.selection import FlatSelection

_POOL_ELEMENTS = 1 << 24  # of which gradients are cut; more than that where a tensor is larger


class Layer(NamedTuple):
    """A parameter and the multiplications that backward makes for it, up to a factor; without a shape, those alone."""

    shape: tuple[int, ...]
    work: float

    @classmethod
    def used(cls, times: float, *shape: int) -> "Layer":
        """Return a parameter of which each element is multiplied so often."""
        return cls(shape, times * math.prod(shape))


class PacedModel(NamedTuple):
    """Seconds of forward and backward, and the layers in the order of forward."""

    forward_seconds: float
    backward_seconds: float
    layers: Sequence[Layer]

    def ready_seconds(self) -> list[float]:
        """Return when each parameter's gradient is ready, from the start of backward, in the order of backward."""
        whole = sum(layer.work for layer in self.layers)
        sums = accumulate(layer.work for layer in reversed(self.layers))
        ends = [self.backward_seconds * done / whole for done in sums]
        return [end for end, layer in zip(ends, reversed(self.layers)) if layer.shape]

    def shapes(self) -> list[tuple[int, ...]]:
        """Return those of the parameters, in the order of forward."""
        return [layer.shape for layer in self.layers if layer.shape]

    def least_ddp_seconds(self, hosts: int, bits_per_second: float) -> float:
        """Return what no step of plain DDP is shorter than: its bytes pass the link once backward has begun."""
        nbytes = 4 * sum(map(math.prod, self.shapes())) * 2 * (hosts - 1) / hosts
        return self.forward_seconds + max(self.backward_seconds, 8 * nbytes / bits_per_second)


def _resnet50() -> Iterator[Layer]:
    yield from _convolution(112, 64, 3, 7)
    inputs = 64
    for width, blocks, side in ((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7)):
        for block in range(blocks):
            yield from _convolution(side, width, inputs, 1)
            yield from _convolution(side, width, width, 3)
            yield from _convolution(side, 4 * width, width, 1)
            if block == 0:
                yield from _convolution(side, 4 * width, inputs, 1)
            inputs = 4 * width
    yield Layer.used(1, 1000, inputs)
    yield Layer.used(1, 1000)


def _convolution(side: int, outputs: int, inputs: int, kernel: int) -> Iterator[Layer]:
    yield Layer.used(side * side, outputs, inputs, kernel, kernel)
    yield Layer.used(2 * side * side, outputs)  # normalisation: scales
    yield Layer.used(2 * side * side, outputs)  # and offsets


def _vgg16() -> Iterator[Layer]:
    inputs = 3
    for side, width, count in ((32, 64, 2), (16, 128, 2), (8, 256, 3), (4, 512, 3), (2, 512, 3)):
        for _ in range(count):
            yield from _convolution(side, width, inputs, 3)
            inputs = width
    yield Layer.used(1, 10, inputs)
    yield Layer.used(1, 10)


def _lstm_ptb() -> Iterator[Layer]:
    words, width, length = 10_000, 1500, 35
    yield Layer((words, width), width * length)  # looked up, not multiplied
    for _ in range(2):
        yield from [Layer.used(length, 4 * width, width)] * 2
        yield from [Layer.used(length, 4 * width)] * 2
    yield Layer.used(length, words, width)
    yield Layer.used(length, words)


def _gpt(words: int, width: int, length: int, blocks: int) -> Iterator[Layer]:
    yield Layer((words, width), 0)
    yield Layer.used(1, length, width)
    for _ in range(blocks):
        yield from [Layer.used(2, width)] * 2
        for outputs, inputs in ((3 * width, width), (width, width)):
            yield from (Layer.used(1, outputs, inputs), Layer.used(1, outputs))
        yield from [Layer.used(2, width)] * 2
        for outputs, inputs in ((4 * width, width), (width, 4 * width)):
            yield from (Layer.used(1, outputs, inputs), Layer.used(1, outputs))
    yield from [Layer.used(2, width)] * 2
    yield Layer((), words * width)  # the embedding again


PACED = {
    "resnet50": PacedModel(0.09, 0.12, list(_resnet50())),
    "vgg16": PacedModel(0.021, 0.0313, list(_vgg16())),
    "lstm_ptb": PacedModel(0.076, 0.13089, list(_lstm_ptb())),
    "gpt2": PacedModel(0.045, 0.09, list(_gpt(50_257, 768, 1024, 12))),
    "gpt_characters": PacedModel(0.012, 0.024, list(_gpt(96, 384, 256, 6))),
}


class Paced(nn.Module):
    """Wait as a model computes, and hand over gradients that are normal numbers.

    Clocks start with forward, as a GPU's do that is never idle: what processors do in between delays nothing.

    Args:
        model: whose shapes and times.
        slower: factor of the times.
    """

    def __init__(self, model: PacedModel, slower: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in model.shapes())
        self._forward_seconds = slower * model.forward_seconds
        self._ready = [slower * seconds for seconds in reversed(model.ready_seconds())]
        self._pool = torch.randn(max(_POOL_ELEMENTS, *(2 * weight.numel() for weight in self.weights)))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return a number that depends on every parameter."""
        end = time.perf_counter() + self._forward_seconds
        outputs = torch.zeros(())
        for weight, seconds in zip(self.weights, self._ready):
            outputs = _Wait.apply(outputs, weight, self._pool, end + seconds)
        _sleep_until(end)
        return outputs


class _Wait(torch.autograd.Function):
    """Pass a number on; in backward, wait until a moment and return numbers of a pool as the parameter's gradient."""

    @staticmethod
    def forward(context: Any, number: Tensor, weight: Tensor, pool: Tensor, ready: float) -> Tensor:
        context.shape, context.pool, context.ready = weight.shape, pool, ready
        return number.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Optional[Tensor], ...]:
        numel = context.shape.numel()
        start = int(torch.randint(context.pool.numel() - numel, ()))
        gradient = context.pool[start : start + numel].view(context.shape)
        _sleep_until(context.ready)
        return gradients[0], gradient, None, None


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


def pace(network: nn.Module, forward_seconds: float, backward_seconds: float) -> None:
    """Have a network that trains for real wait in forward and backward until they have taken as long as told.

    Backward's seconds are shared out by the elements of parameters, from the last to the first. In evaluation nothing
    waits.

    Args:
        network: whose forward and parameters get hooks.
        forward_seconds: of a batch.
        backward_seconds: likewise.
    """
    layers = [Layer.used(1, *parameter.shape) for parameter in network.parameters()]
    ready = PacedModel(forward_seconds, backward_seconds, layers).ready_seconds()
    end_of_forward = 0.0

    def begin(module: nn.Module, inputs: Any) -> None:
        nonlocal end_of_forward
        end_of_forward = time.perf_counter() + forward_seconds

    def end(module: nn.Module, inputs: Any, outputs: Any) -> None:
        if module.training:
            _sleep_until(end_of_forward)

    def wait_for(seconds: float) -> Callable[[Tensor], None]:
        return lambda gradient: _sleep_until(end_of_forward + seconds)

    network.register_forward_pre_hook(begin)
    network.register_forward_hook(end)
    for parameter, seconds in zip(reversed(list(network.parameters())), ready):
        parameter.register_hook(wait_for(seconds))


class PacedSGD(torch.optim.SGD):
    """Update nothing: what a step takes is in the published times."""

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Compute the gradients."""
        return None if closure is None else closure()


class FreeSelection(TopK):
    """Send as many elements as top-k, without looking for them and without a residual.

    A GPU selects from 20 million elements in 1 ms (``selection.py``); a processor that four hosts share, in a tenth of
    a second.
    """

    feedback = ErrorFeedback(keeps_residual=False)

    def select(self, names: Sequence[str], accumulated: Sequence[Tensor], counts: Sequence[int]) -> FlatSelection:
        """Return evenly spaced elements."""
        indices = [_spaced(tensor.numel(), count) for tensor, count in zip(accumulated, counts)]
        return FlatSelection.of(accumulated, indices)


@cache
def _spaced(numel: int, count: int) -> Tensor:
    return torch.arange(count) * (numel // count)
