"""What stands in the place of a DDP wrapper: a model that nothing wraps, whole or in shards."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from lightning_sparse.engine.collectives import broadcast_buffers
from lightning_sparse.functional.elements import local_tensor


class BareModel(Module):
    """A model without a DDP wrapper, which broadcasts its buffers, and may be called in its place."""

    process_group: Any = None  # of ranks whose buffers are one; all
    require_backward_grad_sync = require_forward_param_sync = True

    def __init__(self, module: Module, broadcast_buffers: bool = True) -> None:
        super().__init__()
        self.module = module
        self.broadcast_buffers = broadcast_buffers

    @override
    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Call the model, with buffers that are rank 0's."""
        self.begin_forward()
        return self.module(*inputs, **named_inputs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Have gradients stay this rank's own inside."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin_forward(self) -> None:
        """Copy buffers from rank 0 as DDP does: before the first forward of a step, and of a validation."""
        if self.require_forward_param_sync and self.broadcast_buffers:
            broadcast_buffers(self.module, self.process_group)
        self.require_forward_param_sync = self.require_backward_grad_sync and torch.is_grad_enabled()


class ShardedModel(BareModel):
    """A model of which every rank holds a shard: FSDP averages its gradients inside a replica, never between them.

    Args:
        module: the model.
        same_shards: the ranks that hold the same shards, replica by replica, if a group of theirs is there.
    """

    def __init__(self, module: Module, same_shards: Any = None) -> None:
        super().__init__(module, broadcast_buffers=False)
        self._same_shards = same_shards

    @property
    def groups(self) -> tuple[Any, Any]:
        """Those of FSDP's mesh, if it has one: the ranks of this replica, and those that hold the same shards."""
        mesh = next(each.device_mesh for each in self.module.parameters() if hasattr(each, "device_mesh"))
        return mesh.get_group() if mesh.ndim == 1 else None, self._same_shards

    @override
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with super().no_sync():
            self._synchronize(False)
            try:
                yield
            finally:
                self._synchronize(True)

    def _synchronize(self, synchronizes: bool) -> None:
        for each in cut_modules(self.module):
            each.set_requires_gradient_sync(synchronizes, recurse=False)


def named_module(wrapper: Any) -> Module:
    """Return a wrapper's module, or what ``torch.compile`` has made that of: its names are without a prefix."""
    module: Module = getattr(wrapper.module, "_orig_mod", wrapper.module)
    return module


def cut_modules(module: Module) -> Iterator[Any]:
    """Yield the modules that ``fully_shard`` was called on; to ask for torch's class would import all of FSDP."""
    return (each for each in module.modules() if hasattr(each, "set_requires_gradient_sync"))


def reshard(module: Module) -> None:
    """Have a model hold shards only: after a forward without a backward FSDP leaves the root's parameters whole."""
    for each in cut_modules(module):
        each.reshard()


def shard_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return what this rank holds of a parameter's gradient, flat."""
    if getattr(gradient, "placements", None) != getattr(parameter, "placements", None):
        raise RuntimeError(
            "a gradient is not sharded as its parameter is: backward has to reduce it in the replica"
            " (set_requires_gradient_sync(True), which Lightning's accumulation is left to)"
        )
    return local_tensor(gradient).view(-1)
