"""The backward of a dense step, which averages complete gradients over ranks, as DDP does."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.engine.step.backward import SMALL, Backward, ParamEntry, is_replaceable
from lightning_sparse.engine.step.step import LocalGradient

_FIRST_DENSE_BYTES = 1024 * 1024  # bytes of a step's first message, short so that the network starts early
_DENSE_BYTES = 25 * 1024 * 1024  # maximum bytes of a message, as in DDP; each message doubles the size


class _Message(NamedTuple):
    """A running all-reduce of several gradients."""

    wait: Callable[[], None]  # waits for the all-reduce
    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]  # flat gradient of each parameter
    means: Sequence[Tensor]  # flat mean of each parameter, after wait()
    used: Tensor  # number of ranks that used each parameter; empty before the last message

    def write(self) -> None:
        """Wait for the means. Replace gradients by means if possible, or copy the means into the gradients."""
        self.wait()
        copies, sources = list[Tensor](), list[Tensor]()
        for parameter, gradient, mean in zip(self.parameters, self.gradients, self.means):
            # On a GPU, a copy is necessary: the mean's memory belongs to the worker's stream, which could reuse the
            # memory while other streams read the mean.
            if mean.dtype is gradient.dtype and is_replaceable(gradient, parameter):
                parameter.grad = mean.view_as(parameter).data  # .data starts a version counter at 0
            else:
                copies.append(gradient)
                sources.append(mean)
        if copies:
            torch._foreach_copy_(copies, sources)


class DenseBackward(Backward):
    """Reduction that averages complete gradients by all-reduces, as DDP does. Residuals do not change."""

    _bytes = _FIRST_DENSE_BYTES
    _message: Optional[_Message] = None  # the message with a running all-reduce

    def close(self) -> None:
        """Wait for the running all-reduce, before the process group is destroyed. Runs on the worker thread."""
        if self._message is not None:
            with suppress(RuntimeError):  # other ranks may have exited after an error
                self._message.wait()

    @override
    def _closes(self, member: ParamEntry) -> bool:
        return self._bucket_numel * member.parameter.dtype.itemsize >= self._bytes

    @override
    def _zeros_for(self, parameter: Tensor) -> Tensor:
        flat = super()._zeros_for(parameter)
        if parameter.grad is not None:  # The gradient may hold a mean of an earlier exchange of this step.
            self._missing[-1].gradient.copy_(parameter.grad.detach())
        return flat

    @override
    def _submit(self, members: Sequence[ParamEntry], bucket: Sequence[LocalGradient], flags: Optional[Tensor]) -> None:
        gradients = [local.gradient for local in bucket]
        self._context.worker.submit(partial(self._average, [each.parameter for each in members], gradients, flags))
        self._bytes = min(2 * self._bytes, _DENSE_BYTES)

    def _average(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], flags: Optional[Tensor]) -> None:
        """Start an all-reduce of flat gradients and flags of use. Then write the means of the previous message."""
        among = self._context.among
        numels = [*map(Tensor.numel, gradients), 0 if flags is None else len(flags)]
        flat = gradients[0].new_empty(sum(numels), dtype=self._context.dense_dtype_of(gradients[0].dtype))
        *means, rest = flat.split(numels)
        small = [pair for pair in zip(means, gradients) if pair[1].numel() < SMALL]
        if small:
            copies, sources = map(list, zip(*small))
            torch._foreach_copy_(copies, sources)
            torch._foreach_mul_(copies, 1 / among.world_size)
        for mean, gradient in zip(means, gradients):
            if gradient.numel() >= SMALL:  # one pass copies and scales, without a list of kernels
                torch.mul(gradient, 1 / among.world_size, out=mean)
        if flags is not None:
            rest.copy_(flags)
        before = self._message
        self._message = _Message(among.begin_all_reduce(flat), parameters, gradients, means, rest)
        if before is not None:
            before.write()

    @override
    def _commit(self) -> None:
        if self._message is not None:  # ``None`` if the model has no trained parameter
            self._message.write()
            self._used_by_any = self._message.used > 0
            self._message = None
