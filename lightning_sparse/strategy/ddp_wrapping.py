"""The DDP wrapper: one that leaves gradients to the engine, or that of an island, which averages those of a node."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Optional

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.engine.collectives import align
from lightning_sparse.engine.step.exchange import ignored_by
from lightning_sparse.loop.checks import check_reducer, refuse_training

_COPIED = (
    "this is a copy of a wrapper whose gradients lightning_sparse exchanges, and those of the copy nobody does: copy"
    " the module inside, or call eval()"
)
# Those that are about a reducer, and about gradients that it does not find.
_WITHOUT_EFFECT = frozenset({"find_unused_parameters", "static_graph", "bucket_cap_mb"})


class Silent(DistributedDataParallel):
    """A wrapper that leaves gradients to others, and of which a copy, to which nobody attends, is not to be trained."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.register_forward_pre_hook(partial(refuse_training, _COPIED))


class DDPWrapping:
    """Wrap a model once; that of an island anew when other parameters are trained, or rounds begin."""

    def __init__(self) -> None:
        self._stream: Optional[torch.cuda.Stream] = None

    def wrap(
        self, module: Module, device_ids: Optional[list[int]], arguments: Mapping[str, Any]
    ) -> DistributedDataParallel:
        """Return the model in a DDP that takes care of the smallest parameter alone: no bucket takes memory."""
        given = {name: value for name, value in arguments.items() if name not in _WITHOUT_EFFECT}
        ignored = ignored_by(module)
        if given.pop("init_sync", True):
            align(module, ignored)
        trained = (each for name, each in module.named_parameters() if each.requires_grad and name not in ignored)
        kept = min(trained, key=Tensor.numel)
        others = [name for name, each in module.named_parameters(remove_duplicate=False) if each is not kept]
        others += [f".{name}" for name in others]  # as DDP calls those of the module itself
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [*others, *ignored])
        try:
            ddp = self._built(Silent, module, device_ids, {**given, "init_sync": False})
        finally:
            del module._ddp_params_and_buffers_to_ignore
            if ignored:
                DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
        check_reducer(ddp)
        return ddp

    def wrap_whole(
        self,
        module: Module,
        device_ids: Optional[list[int]],
        arguments: Mapping[str, Any],
        island: Optional[ProcessGroup],
    ) -> DistributedDataParallel:
        """Return the model in a DDP that averages its gradients itself, over all ranks or those of an ``island``."""
        if island is not None:
            align(module, ignored_by(module))
            arguments = {**arguments, "init_sync": False, "process_group": island}
        ddp = self._built(DistributedDataParallel, module, device_ids, arguments)
        check_reducer(ddp)
        return ddp

    def _built(
        self,
        kind: type[DistributedDataParallel],
        module: Module,
        device_ids: Optional[list[int]],
        arguments: Mapping[str, Any],
    ) -> DistributedDataParallel:
        """Wrap as Lightning does, on a stream beside that of the caller; but always on the same one, and in order."""
        if device_ids is None:
            return kind(module=module, device_ids=None, **arguments)
        # Gradients are written on the stream on which their parameter was first wrapped, for as long as anybody keeps
        # the graph of a step, such as a loss that is not detached. Those of one group must not come from several.
        if self._stream is None:
            self._stream = torch.cuda.Stream(device_ids[0])
        caller = torch.cuda.current_stream(device_ids[0])
        # DDP broadcasts all parameters where some are new, and replaces gradients that it finds by copies in buckets of
        # its own: after what the last step writes, and before the next reads these, or writes into the memory of those.
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            ddp = kind(module=module, device_ids=device_ids, **arguments)
        caller.wait_stream(self._stream)
        return ddp

    def close(self) -> None:
        """Let go of the stream, which cannot be pickled."""
        self._stream = None


def note_use(ddp: DistributedDataParallel, used: Iterable[Tensor]) -> None:
    """Tell a new wrapper that looks for unused parameters what the step has used: DDP drops the mean of the others."""
    if not ddp.find_unused_parameters:
        return
    gradients = {each: each.grad for each in used if each.requires_grad and each.grad is not None}
    if gradients:
        with ddp.no_sync():
            torch.autograd.backward(list(gradients), [torch.zeros_like(gradient) for gradient in gradients.values()])
