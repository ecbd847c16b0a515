"""Checks of model, optimizers and settings before a training, for the strategies and for plain loops."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Optional

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from lightning_sparse.compressors.base import FROM_OPTIMIZER, ErrorFeedback, checked_count
from lightning_sparse.engine import Engine
from lightning_sparse.engine.adam.correction import AdamCorrection
from lightning_sparse.engine.adam.steps import is_correctable
from lightning_sparse.engine.memory import optimizer_parameters
from lightning_sparse.engine.settings import LocalSteps, Settings
from lightning_sparse.engine.step.reducer import NoOpReducer
from lightning_sparse.engine.step.topology import fsdp_modules
from lightning_sparse.functional.elements import local_tensor, local_tensors
from lightning_sparse.functional.reductions import fingerprint
from lightning_sparse.loop.optimizers import calls_hooks, chain_of, is_adaptive, listed
from lightning_sparse.schedule import Auto

_SHARD = 'fully_shard(layer, mesh=self.device_mesh["data_parallel"])'
# Class names, because some classes are in other packages.
_COMMUNICATING = frozenset({"ZeroRedundancyOptimizer", "PostLocalSGDOptimizer"})
_WRAPPERS = frozenset({"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine"})


def check_model(model: Module, local: Optional[LocalSteps]) -> None:
    """Raise an error for wrappers that reduce gradients, for unsupported parameters, and for unsupported layers."""
    bases = {name or "itself": {base.__name__ for base in type(each).__mro__} for name, each in model.named_modules()}
    if wrappers := [name for name, each in bases.items() if each & _WRAPPERS]:
        raise ValueError(
            f"model={type(model).__name__} holds wrappers that reduce gradients themselves, {listed(wrappers)}: remove"
            " the wrappers (in a plain loop the model may be a DistributedDataParallel); for shards use"
            " Trainer(strategy='sparse_hsdp') and fully_shard"
        )
    refused = [
        f"{name} ({parameter.dtype})"
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not parameter.is_floating_point()
    ]
    if refused:
        raise TypeError(
            f"parameters that are not real floating point cannot be compressed: {', '.join(refused)}. Store a complex"
            " parameter as a real parameter (torch.view_as_real), or freeze the parameter."
        )
    if len({each.device for each in model.parameters()}) > 1:
        raise ValueError(
            f"model={type(model).__name__} has parameters on several devices: give each process a model on one device"
        )
    if local is not None and _has_sync_batch_norm(model):
        raise ValueError(
            f"local_steps={local.every!r} exchanges nothing between rounds, but SyncBatchNorm communicates in every"
            " step: omit sync_batchnorm=True or convert_sync_batchnorm (rounds then average BatchNorm's statistics),"
            " or use local_steps=1"
        )


def _has_sync_batch_norm(model: Module) -> bool:
    return any(isinstance(module, torch.nn.SyncBatchNorm) for module in model.modules())


def in_one_order(settings: Settings, model: Module, backend: str) -> Settings:
    """Return settings with which all ranks launch NCCL collectives in the same order.

    FSDP and SyncBatchNorm launch collectives during backward, on another communicator. NCCL may deadlock if ranks
    launch on two communicators in different orders. With NCCL, these models therefore exchange after backward.
    """
    communicates = backend == "nccl" and (_has_sync_batch_norm(model) or any(fsdp_modules(model)))
    return replace(settings, overlaps_backward=False) if communicates else settings


def of_the_model(module: Any, ranks: Sequence[int], device: torch.device) -> Iterator[str]:
    """Yield reasons why the sharded model of a replica cannot be exchanged. ``ranks`` are the ranks of the replica.

    Each check assumes that earlier checks yielded nothing.
    """
    trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
    whole = [name for name, each in trained.items() if not hasattr(each, "device_mesh")]
    if whole:
        kind = "nothing" if len(whole) == len(trained) else f"all but {listed(whole)}"
        yield (
            f"fully_shard has sharded {kind}, and a replica does not average dense parameters: call {_SHARD} for each"
            " layer, then for the root module; if the model fits on one device, use strategy='sparse_lags'"
        )
    elsewhere = [name for name, each in trained.items() if each.device_mesh.mesh.flatten().tolist() != ranks]
    if elsewhere:
        yield (
            f"fully_shard has sharded {listed(elsewhere)} over other ranks than the replica's, {ranks}, and FSDP must"
            f" not communicate between replicas: call {_SHARD}, with the mesh of one replica"
        )
    held = {name: local_tensor(each) for name, each in trained.items()}
    elsewhere = [name for name, shard in held.items() if shard.device.type != device.type]
    if elsewhere:
        yield (
            f"shards of {listed(elsewhere)} are not on {device}, where gradients are exchanged: omit CPUOffloadPolicy,"
            " or use replicas of more ranks, which need less memory per rank"
        )
    if not any(shard.numel() for shard in held.values()):
        yield (
            "a rank holds no element, because dimension 0 of each parameter is too short for the number of shards: use"
            " a smaller data_parallel_size"
        )


def check_bare(model: Module) -> None:
    """Raise an error for a model with shards, or without a trained parameter."""
    named, given = dict(model.named_parameters()), f"model={type(model).__name__}"
    if cut := [name for name, each in named.items() if hasattr(each, "device_mesh")]:
        raise ValueError(
            f"{given} holds shards of {listed(cut)}, but plain loops and Fabric support no sharded models: use"
            " Trainer(strategy='sparse_hsdp'), or a model that is complete on each rank"
        )
    if not any(each.requires_grad for each in named.values()):
        raise ValueError(f"{given} has no parameter that requires a gradient, so there is nothing to train")


def check_wrapped(ddp: DistributedDataParallel, world: int) -> None:
    """Raise an error for a DDP wrapper with a communication hook, or with a smaller process group."""
    if ddp._comm_hooks or isinstance(ddp.reducer, NoOpReducer):
        raise RuntimeError(
            "model has a communication hook, or sparsify_gradients has exchanged its gradients before: wrap the"
            " inner module in a new DistributedDataParallel without a hook, or pass the inner module"
        )
    if (ranks := ddp.process_group.size()) != world:
        raise ValueError(
            f"model has a process group of {ranks} processes, and all {world} processes exchange gradients: omit"
            " process_group"
        )


def check_trainers(module: Module, optimizers: Sequence[Optimizer], settings: Settings) -> None:
    """Raise an error for an unsupported optimizer, or for an optimizer that trains no parameter of the model."""
    trained = set(module.parameters())
    counts_steps = settings.local_steps is not None or isinstance(settings.schedule, Auto)
    if not optimizers:
        raise ValueError("optimizer=[] is empty: pass all optimizers that train the model")
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer={optimizer!r} must be a torch.optim.Optimizer, or a list of optimizers")
        given = f"optimizer={type(optimizer).__name__}"
        if trained.isdisjoint(optimizer_parameters(optimizer)):
            raise ValueError(f"{given} trains no parameter of model: build the optimizer from model.parameters()")
        if counts_steps and not any(map(calls_hooks, chain_of(optimizer))):
            raise ValueError(
                f"{given} calls no hooks, and hooks count the steps for local_steps and schedule='auto': call"
                " torch.optim.Optimizer's __init__ in the constructor"
            )


def check_optimizers(settings: Settings, optimizers: Sequence[Optimizer]) -> None:
    """Raise an error for optimizers that the settings do not support."""
    if isinstance(settings.optimizer_correction, AdamCorrection):
        _check_correctable(optimizers)
    for each in chain.from_iterable(map(chain_of, optimizers)) if settings.replicas_diverge else ():
        if type(each).__name__ in _COMMUNICATING:
            raise ValueError(
                f"{type(each).__name__} communicates in step(). With local steps or A2SGD ranks hold different models,"
                " and the optimizer would overwrite the differences. Pass the inner optimizer, such as"
                " torch.optim.AdamW, or exchange in every step, with local_steps=1"
            )
    if settings.feedback.momentum is not None:
        for optimizer in optimizers:
            check_momentum(optimizer, settings.feedback)


def _check_correctable(optimizers: Sequence[Optimizer]) -> None:
    refused = [each for each in optimizers if not is_correctable(each)]
    if any(map(is_adaptive, refused)) or len(refused) == len(optimizers):
        names = ", ".join(type(each).__name__ for each in refused)
        raise ValueError(
            f"optimizer_correction=AdamCorrection(...) does not support {names}: use torch.optim.AdamW or"
            " torch.optim.Adam (with torch's step, without amsgrad, differentiable and maximize), or"
            " optimizer_correction='auto', which warns of adaptive optimizers with sparse gradients"
        )


def check_momentum(optimizer: Optimizer, feedback: ErrorFeedback) -> None:
    """Raise an error if the optimizer does not support momentum before compression."""
    name, given = type(optimizer).__name__, f"momentum={feedback.momentum!r}"
    if not isinstance(optimizer, SGD):
        raise ValueError(
            f"{given} adds momentum before compression. Then .grad holds SGD's velocities, but {name} needs gradients"
            " instead: choose torch.optim.SGD, or torch.optim.AdamW for the whole model with"
            " optimizer_correction='auto'. For no momentum before compression, omit the MomentumCorrection callback,"
            " and set compressor=DGC(momentum=None) or SDAGC(momentum=None)"
        )
    for group in optimizer.param_groups:
        if group["dampening"]:
            raise ValueError(f"{given} supports no dampening={group['dampening']} of {name}: use dampening=0")
        if feedback.momentum != FROM_OPTIMIZER and group["momentum"]:
            raise ValueError(
                f"{given} before compression conflicts with momentum={group['momentum']} of {name}: use only one, or"
                " momentum='optimizer', which applies the optimizer's momentum before compression"
            )


def checked_total_steps(settings: Settings, total_steps: Any) -> Optional[int]:
    """Return ``total_steps`` as an integer or ``None``. A fraction ``warmup_steps`` requires an integer."""
    if total_steps is not None:
        return checked_count("total_steps", total_steps, "optimizer steps")
    if isinstance(settings.warmup_steps, float):
        raise ValueError(
            f"warmup_steps={settings.warmup_steps:g} is a fraction of the training's optimizer steps, and the"
            " number of steps is missing: give total_steps=... (the Trainer's max_steps=...), or warmup_steps=1000"
        )
    return None


class ReplicaError(RuntimeError):
    """Parameters differ between ranks that should hold the same model."""


def check_replicas(engine: Engine, when: str) -> None:
    """If parameters are not bitwise identical on all ranks, raise :class:`ReplicaError`. All ranks must call this."""
    parameters = local_tensors(engine.module)
    if (rounds := engine.rounds) is not None:
        # With local steps, parameters without an optimizer, such as moving averages, may differ, and are not checked.
        shared = rounds.shared.exchanged().keys()
        parameters = {name: each for name, each in parameters.items() if name in shared}
    own = torch.stack(list(map(fingerprint, parameters.values())))
    rows = engine.worker.run(partial(engine.pipeline.levels.same_shard.all_gather, own)).cpu()
    if not (differs := (rows != rows[0]).any(dim=0)).any():
        return
    names = [name for name, is_different in zip(parameters, differs.tolist()) if is_different]
    column = rows[:, list(parameters).index(names[0])]
    ranks = [rank for rank, is_different in enumerate((column != column[0]).tolist()) if is_different]
    raise ReplicaError(
        f"{when} the parameter {names[0]!r} differs from rank 0's on rank {', '.join(map(str, ranks))}"
        f" ({len(names)} of {len(parameters)} parameters differ), so ranks train different models. Look for code that"
        " changes parameters on some ranks only, and resume from an earlier checkpoint"
    )
