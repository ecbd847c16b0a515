"""What is checked of a model before its gradients are exchanged, whoever drives the training."""

from collections.abc import Mapping
from typing import Optional

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.engine.settings import LocalSteps, refuse


def check_parameters(model: Module) -> None:
    """Refuse a model of which a parameter that is trained is not real floating point."""
    refused = [
        f"{name} ({parameter.dtype})"
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not parameter.is_floating_point()
    ]
    if refused:
        raise TypeError(
            f"parameters that are not real floating point cannot be compressed: {', '.join(refused)}. Keep the real and"
            " imaginary parts of a complex parameter as a real one (torch.view_as_real), or freeze it."
        )


def check_rounds(local: Optional[LocalSteps], model: Optional[Module] = None, static_graph: bool = False) -> None:
    """Refuse what would send in each of the local steps, if there are any."""
    if local is None:
        return
    modules = () if model is None else model.modules()
    has_batch_norm = any(isinstance(module, torch.nn.SyncBatchNorm) for module in modules)
    refuse(
        (
            static_graph,
            f"static_graph=True is about gradients that DDP exchanges, and with local_steps={local.every!r} it"
            " exchanges none, or those of a node alone: leave it out",
        ),
        (
            has_batch_norm,
            f"local_steps={local.every!r} exchanges nothing between rounds, but SyncBatchNorm does in each of its"
            " layers in every step: leave out sync_batchnorm=True or convert_sync_batchnorm, so that BatchNorm's"
            " statistics are averaged in each round, or use local_steps=1",
        ),
    )


def check_reducer(ddp: DistributedDataParallel) -> None:
    """Refuse a wrapped model that does not hand its gradients over in buckets."""
    if getattr(ddp, "_use_python_reducer", False):
        raise RuntimeError(
            "torch._dynamo.config.optimize_ddp is 'python_reducer', which calls hooks with tuples instead of"
            " buckets; set it to True (the default) or False"
        )


def warning_of_meeting(
    ddp: DistributedDataParallel, backend: str, environment: Mapping[str, str], is_late: bool = False
) -> Optional[str]:
    """Compose the warning for collectives of backward that meet those of the exchange on NCCL; ``None`` where none do.

    Two threads launch on two communicators then, in an order that is not the same on all ranks. NCCL waits for ever
    where the device has one queue for both, and refuses it where it was told to take the host's order. Those of rounds
    between islands meet DDP's of later steps where the exchange ``is_late``.
    """
    if backend != "nccl":
        return None
    has_batch_norm = any(isinstance(module, torch.nn.SyncBatchNorm) for module in ddp.modules())
    if not (is_late or has_batch_norm or ddp.find_unused_parameters or ddp.static_graph):
        return None
    switches = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
    found = [f"{name}={value}" for name, value in switches.items() if environment.get(name) == value]
    if not (has_batch_norm or found):
        return None
    source = "SyncBatchNorm" if has_batch_norm else "find_unused_parameters or static_graph"
    cure = "overlaps_backward=False"
    if is_late:
        source, cure = "levels=2 with overlap_steps", "local_steps=LocalSteps(..., overlap_steps=0)"
    where = f" ({', '.join(found)})" if found else ""
    return (
        f"{source} exchanges during backward, beside the gradients, on a communicator of its own{where}. NCCL may wait"
        f" for ever where ranks launch the two in another order: give SparseDDPStrategy({cure}), or see docs/limits.md"
    )
