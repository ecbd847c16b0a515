"""A backward of a dense step: all of each gradient is averaged, as by DDP."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.engine.step.backward import SMALL, Backward, ParamEntry, is_replaceable
from lightning_sparse.engine.step.step import LocalGradient

_FIRST_DENSE_BYTES = 1024 * 1024  # of the first message of a dense step, so that the network begins soon; each
_DENSE_BYTES = 25 * 1024 * 1024  # other has twice those of the one before, up to DDP's, so that it stays busy


class _Message(NamedTuple):
    """Means of a dense step on their way."""

    wait: Callable[[], None]
    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]  # theirs, flat
    means: Sequence[Tensor]
    used: Tensor  # by how many ranks each was, if it is the last

    def write(self) -> None:
        """Have means that have arrived take the place of gradients, or on a device be written into them."""
        self.wait()
        copies, sources = list[Tensor](), list[Tensor]()
        for parameter, gradient, mean in zip(self.parameters, self.gradients, self.means):
            # On a device the memory is of the worker's stream, which would give it out again while others read it.
            if mean.dtype is gradient.dtype and is_replaceable(gradient, parameter):
                parameter.grad = mean.view_as(parameter).data  # with a count of changes of its own
            else:
                copies.append(gradient)
                sources.append(mean)
        if copies:
            torch._foreach_copy_(copies, sources)


class DenseBackward(Backward):
    """All of each gradient is averaged, as by DDP, in one all-reduce each message, and nothing is kept."""

    _bytes = _FIRST_DENSE_BYTES
    _message: Optional[_Message] = None  # on its way

    def close(self) -> None:
        """End the message that is on its way, on the worker: no process group is given back with one."""
        if self._message is not None:
            with suppress(RuntimeError):  # other ranks may have left, and why is known
                self._message.wait()

    @override
    def _closes(self, member: ParamEntry) -> bool:
        return self._bucket_numel * member.parameter.dtype.itemsize >= self._bytes

    @override
    def _zeros_for(self, parameter: Tensor) -> Tensor:
        flat = super()._zeros_for(parameter)
        if parameter.grad is not None:  # others may have added to the same
            self._missing[-1].gradient.copy_(parameter.grad.detach())
        return flat

    @override
    def _submit(self, members: Sequence[ParamEntry], bucket: Sequence[LocalGradient], flags: Optional[Tensor]) -> None:
        gradients = [local.gradient for local in bucket]
        self._context.worker.submit(partial(self._average, [each.parameter for each in members], gradients, flags))
        self._bytes = min(2 * self._bytes, _DENSE_BYTES)

    def _average(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], flags: Optional[Tensor]) -> None:
        """Begin to average flat gradients of one type, with the flags of what was used, and end the message before.

        On the worker: the network is busy with one message while the next is gathered.
        """
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
            if gradient.numel() >= SMALL:  # in one pass over its memory
                torch.mul(gradient, 1 / among.world_size, out=mean)
        if flags is not None:
            rest.copy_(flags)
        before = self._message
        self._message = _Message(among.begin_all_reduce(flat), parameters, gradients, means, rest)
        if before is not None:
            before.write()

    @override
    def _commit(self) -> None:
        if self._message is not None:  # else nothing is trained
            self._message.write()
            self._used_by_any = self._message.used > 0
            self._message = None
