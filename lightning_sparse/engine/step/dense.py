"""The backward of a dense step, which averages complete gradients over ranks, as DDP does."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.engine.step.backward import Backward, ParamEntry
from lightning_sparse.engine.step.step import LocalGradient

_FIRST_DENSE_BYTES = 1024 * 1024  # bytes of a step's first message, short so that the network starts early
_DENSE_BYTES = 25 * 1024 * 1024  # maximum bytes of a message, as in DDP; sizes double up to this maximum


class _Message(NamedTuple):
    """A running all-reduce of several gradients."""

    wait: Callable[[], None]  # waits for the all-reduce
    gradients: Sequence[Tensor]  # flat gradient of each parameter
    means: Sequence[Tensor]  # flat mean of each parameter, after wait()
    used: Tensor  # number of ranks that used each parameter; empty before the last message

    def write(self) -> None:
        """Wait for the means, and write the means to the gradients."""
        self.wait()
        torch._foreach_copy_(list(self.gradients), list(self.means))


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
        self._context.worker.submit(partial(self._average, [local.gradient for local in bucket], flags))
        self._bytes = min(2 * self._bytes, _DENSE_BYTES)

    def _average(self, gradients: Sequence[Tensor], flags: Optional[Tensor]) -> None:
        """Start an all-reduce of flat gradients and flags of use. Then write the means of the previous message."""
        among = self._context.among
        numels = [*map(Tensor.numel, gradients), 0 if flags is None else len(flags)]
        flat = gradients[0].new_empty(sum(numels), dtype=self._context.dense_dtype_of(gradients[0].dtype))
        *means, rest = flat.split(numels)
        for mean, gradient in zip(means, gradients):
            torch.mul(gradient, 1 / among.world_size, out=mean)
        if flags is not None:
            rest.copy_(flags)
        before = self._message
        self._message = _Message(among.begin_all_reduce(flat), gradients, means, rest)
        if before is not None:
            before.write()

    @override
    def _commit(self) -> None:
        if self._message is not None:  # ``None`` if the model has no trained parameter
            self._message.write()
            self._used_by_any = self._message.used > 0
            self._message = None
