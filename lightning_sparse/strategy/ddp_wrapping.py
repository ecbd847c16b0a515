"""The DDP wrapper: built for the engine or for plain DDP, and anew when other parameters are trained."""

from collections.abc import Iterable, Mapping
from typing import Any, Optional

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.engine.step.hook import bucket_cap_mb
from lightning_sparse.loop.checks import check_reducer

# The buckets along which torch.compile cuts its graph; DDP's own default.
_COMPILE_BUCKET_BYTES = 25 * 1024 * 1024


class DDPWrapping:
    """Wrap a model, anew when parameters are frozen, unfrozen, or added to model and optimizer."""

    def __init__(self) -> None:
        self._stream: Optional[torch.cuda.Stream] = None

    def wrap(
        self,
        module: Module,
        device_ids: Optional[list[int]],
        arguments: Mapping[str, Any],
        is_plain: bool = False,
        is_silent: bool = False,
        island: Optional[ProcessGroup] = None,
    ) -> DistributedDataParallel:
        """Return the model, wrapped for plain DDP, for ranks that exchange no gradients, or else for the engine.

        Ranks of an ``island`` that is silent to others exchange theirs as plain DDP does.
        """
        given = {**arguments, "bucket_cap_mb": None if is_plain else bucket_cap_mb(module)}
        if is_silent:  # broadcast_buffers=False would leave buffers as they are, whose changes its user averages
            given.pop("broadcast_buffers", None)
        ddp = self._built(module, device_ids, given)
        if is_silent:
            del ddp  # it has made the replicas alike
            inside = {**arguments, "init_sync": False, "process_group": island}
            is_alone = island is None
            ddp = self._silent(module, device_ids, arguments) if is_alone else self._built(module, device_ids, inside)
        check_reducer(ddp)
        ddp.bucket_bytes_cap = _COMPILE_BUCKET_BYTES
        return ddp

    def _silent(
        self, module: Module, device_ids: Optional[list[int]], arguments: Mapping[str, Any]
    ) -> DistributedDataParallel:
        """Wrap in a DDP that takes care of the smallest parameter alone: its buckets are memory that nobody reads."""
        kept = min((each for each in module.parameters() if each.requires_grad), key=Tensor.numel)
        others = [name for name, each in module.named_parameters(remove_duplicate=False) if each is not kept]
        others += [f".{name}" for name in others]  # as DDP calls those of the module itself
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, others)
        try:
            return self._built(module, device_ids, {**arguments, "init_sync": False})
        finally:
            del module._ddp_params_and_buffers_to_ignore

    def _built(
        self, module: Module, device_ids: Optional[list[int]], arguments: Mapping[str, Any]
    ) -> DistributedDataParallel:
        """Wrap as Lightning does, on a stream beside that of the caller; but always on the same one, and in order."""
        if device_ids is None:
            return DistributedDataParallel(module=module, device_ids=None, **arguments)
        # Gradients are written on the stream on which their parameter was first wrapped, for as long as anybody keeps
        # the graph of a step, such as a loss that is not detached. Those of one group must not come from several.
        if self._stream is None:
            self._stream = torch.cuda.Stream(device_ids[0])
        caller = torch.cuda.current_stream(device_ids[0])
        # DDP broadcasts all parameters where some are new, and replaces gradients that it finds by copies in buckets of
        # its own: after what the last step writes, and before the next reads these, or writes into the memory of those.
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            ddp = DistributedDataParallel(module=module, device_ids=device_ids, **arguments)
        caller.wait_stream(self._stream)
        return ddp

    def close(self) -> None:
        """Let go of the stream, which cannot be pickled."""
        self._stream = None


def note_use(ddp: DistributedDataParallel, used: Iterable[Parameter]) -> None:
    """Tell a new wrapper that looks for unused parameters what the step has used: DDP drops the mean of the others."""
    if not ddp.find_unused_parameters:
        return
    gradients = {each: each.grad for each in used if each.requires_grad and each.grad is not None}
    if gradients:
        with ddp.no_sync():
            torch.autograd.backward(list(gradients), [torch.zeros_like(gradient) for gradient in gradients.values()])
