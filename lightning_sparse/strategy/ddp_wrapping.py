"""The DDP wrapper, which broadcasts buffers and leaves gradients to the engine."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.engine.collectives import align, attended, ignored_by
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
        self.register_forward_pre_hook(_refuse_copy)


def _refuse_copy(ddp: DistributedDataParallel, inputs: Any) -> None:
    # The Trainer calls train() of the module inside, and of no wrapper.
    refuse_training(_COPIED, ddp.module, inputs)


def wrap(module: Module, device_ids: Optional[list[int]], arguments: Mapping[str, Any]) -> DistributedDataParallel:
    """Return the model in a DDP that takes care of the smallest parameter alone: no bucket takes memory."""
    given = {name: value for name, value in arguments.items() if name not in _WITHOUT_EFFECT}
    ignored = ignored_by(module)
    if given.pop("init_sync", True):
        align(module)
    trained = (each for each in attended(module).values() if each.requires_grad)
    kept = min(trained, key=Tensor.numel)
    others = [name for name, each in module.named_parameters(remove_duplicate=False) if each is not kept]
    others += [f".{name}" for name in others]  # as DDP calls those of the module itself
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [*others, *ignored])
    try:
        with nullcontext() if device_ids is None else _stream_of_its_own(device_ids[0]):
            ddp = Silent(module=module, device_ids=device_ids, **{**given, "init_sync": False})
    finally:
        del module._ddp_params_and_buffers_to_ignore
        if ignored:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
    check_reducer(ddp)
    return ddp


@contextmanager
def _stream_of_its_own(device: int) -> Iterator[None]:
    """Have a model wrapped beside the caller's stream, as Lightning does, after what it has written and before more."""
    stream, caller = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(caller)
    with torch.cuda.stream(stream):
        yield
    caller.wait_stream(stream)


def check_device(strategy: type, device: torch.device) -> None:
    """Refuse a device whose tensors cannot be exchanged, which Lightning refuses for names that contain "ddp"."""
    if device.type == "mps":
        raise ValueError(
            f"accelerator='mps' cannot go together with {strategy.__name__}, as its tensors cannot be exchanged between"
            " processes: use accelerator='cpu', or strategy='auto' for one device"
        )
