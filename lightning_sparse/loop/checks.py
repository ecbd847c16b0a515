"""What is checked of a model before its gradients are exchanged, whoever drives the training."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.engine.collectives import gather_together
from lightning_sparse.engine.refusals import lacking, refuse
from lightning_sparse.engine.settings import LocalSteps, Settings
from lightning_sparse.engine.step.shards import cut_modules
from lightning_sparse.functional.elements import local_tensor
from lightning_sparse.loop.optimizers import listed

_SHARD = 'fully_shard(layer, mesh=self.device_mesh["data_parallel"])'
_ON_NCCL = "and NCCL may wait for ever where ranks launch on two communicators in different orders"


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


def check_rounds(local: Optional[LocalSteps], model: Module) -> None:
    """Refuse what would send in each of the local steps, if there are any."""
    if local is not None and any(isinstance(module, torch.nn.SyncBatchNorm) for module in model.modules()):
        raise ValueError(
            f"local_steps={local.every!r} exchanges nothing between rounds, but SyncBatchNorm does in each of its"
            " layers in every step: leave out sync_batchnorm=True or convert_sync_batchnorm, so that BatchNorm's"
            " statistics are averaged in each round, or use local_steps=1"
        )


def refuse_training(message: str, module: Module, inputs: Any) -> None:
    """Raise where a module is about to be trained: once the message is given, a hook before its forward."""
    if module.training and torch.is_grad_enabled():
        raise RuntimeError(message)


def check_reducer(ddp: DistributedDataParallel) -> None:
    """Refuse a wrapped model whose gradients torch.compile averages itself."""
    if getattr(ddp, "_use_python_reducer", False):
        raise RuntimeError(
            "torch._dynamo.config.optimize_ddp is 'python_reducer', which averages"
            " gradients in compiled code; set it to True (the default) or False"
        )


def in_one_order(settings: Settings, model: Module, backend: str) -> tuple[Settings, Sequence[str]]:
    """Return the settings of a training whose ranks launch all collectives in one order, and what is said of them.

    NCCL alone asks for that. What backward and the main thread launch while an exchange travels would come before it on
    one rank, and after it on another: there nothing travels beside them. The settings that are given stay as they are.
    """
    local, told = settings.local_steps, list[str]()
    if backend != "nccl":
        return settings, told
    # FSDP gathers and scatters all through backward, on a communicator of its own.
    overlaps = settings.overlaps_backward and not any(cut_modules(model))
    has_batch_norm = any(isinstance(module, torch.nn.SyncBatchNorm) for module in model.modules())
    if settings.overlaps_backward and has_batch_norm:
        overlaps = False
        told.append(
            f"gradients travel after backward, not during it: SyncBatchNorm exchanges during backward, too, {_ON_NCCL}."
        )
    if local is not None and local.overlap_steps:
        told.append(
            f"overlap_steps={local.overlap_steps} is taken as 0, so that training waits for each exchange: metrics,"
            f" checkpoints, and the ranks of a node, exchange between steps, too, {_ON_NCCL}."
        )
        local = replace(local, overlap_steps=0)
    return replace(settings, overlaps_backward=overlaps, local_steps=local), told


def of_the_settings(settings: Settings) -> Iterator[str]:
    """Yield what there is no place for where every rank holds a shard of the model."""
    yield from lacking("in shards", settings)
    local = settings.local_steps or LocalSteps()
    if local.overlap_steps or local.synchronous_steps:
        yield (
            f"overlap_steps={local.overlap_steps} would send beside FSDP's own collectives, which NCCL may not bring to"
            f" an end, and synchronous_steps={local.synchronous_steps} are DDP's: leave both out (0), or use"
            " SparseDDPStrategy where the model fits"
        )


def refuse_together(reasons: Iterator[str]) -> None:
    """Raise on every rank what the first that has one has to say."""
    refuse(filter(None, gather_together(next(reasons, ""))))


def of_the_model(module: Any, ranks: Sequence[int], device: torch.device) -> Iterator[str]:
    """Yield what cannot be trained in shards that replicas exchange; what comes later goes by what came before."""
    trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
    whole = [name for name, each in trained.items() if not hasattr(each, "device_mesh")]
    if whole:
        kind = "nothing" if len(whole) == len(trained) else f"all but {listed(whole)}"
        yield (
            f"fully_shard has cut {kind}, and what is left whole nobody averages in a replica: call {_SHARD} of its"
            " layers, then of the module that holds the rest; a model that fits is better served by"
            " strategy='sparse_lags'"
        )
    elsewhere = [name for name, each in trained.items() if each.device_mesh.mesh.flatten().tolist() != ranks]
    if elsewhere:
        yield (
            f"fully_shard has cut {listed(elsewhere)} over other ranks than {ranks}, which are a replica, and between"
            f" replicas FSDP must not exchange: call {_SHARD}, whose mesh is that of one replica"
        )
    yield from of_the_shards({name: local_tensor(each) for name, each in trained.items()}, device)


def of_the_shards(held: Mapping[str, Tensor], device: torch.device) -> Iterator[str]:
    """Yield what a rank cannot exchange of the shards that it holds, on a device."""
    elsewhere = [name for name, shard in held.items() if shard.device.type != device.type]
    if elsewhere:
        yield (
            f"shards of {listed(elsewhere)} are not on {device}, where gradients are exchanged: leave CPUOffloadPolicy"
            " out; replicas of more ranks take less memory of each"
        )
    if not any(shard.numel() for shard in held.values()):
        yield (
            "a rank holds no element of any parameter, as no dimension 0 is as long as there are shards: take a smaller"
            " data_parallel_size"
        )
