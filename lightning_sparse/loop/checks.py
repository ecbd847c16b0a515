"""What is checked of a model before its gradients are exchanged, whoever drives the training."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Optional

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager
from torch.distributed.distributed_c10d import ProcessGroup
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer, SparseAdam

from lightning_sparse.compressors.base import is_whole
from lightning_sparse.engine import Engine
from lightning_sparse.engine.collectives import all_gather_object
from lightning_sparse.engine.requirements import missing_capabilities, refuse
from lightning_sparse.engine.settings import LocalSteps, Settings
from lightning_sparse.engine.step.reducer import SPARSE_LAYOUT, NoOpReducer
from lightning_sparse.engine.step.topology import fsdp_modules
from lightning_sparse.functional.elements import local_tensor, local_tensors
from lightning_sparse.functional.reductions import fingerprint
from lightning_sparse.loop.optimizers import calls_hooks, chain_of, listed, optimizer_parameters
from lightning_sparse.schedule import Auto

_SHARD = 'fully_shard(layer, mesh=self.device_mesh["data_parallel"])'
_ON_NCCL = "and NCCL may wait for ever where ranks launch on two communicators in different orders"
_SHARDING = frozenset({"FullyShardedDataParallel", "DeepSpeedEngine"})  # to ask for the classes would import both
_WRAPPERS = _SHARDING | {"DistributedDataParallel", "DataParallel"}


def check_model(model: Module) -> None:
    """Refuse a model that others train, too, or of which a parameter that is trained is not real floating point."""
    if wrappers := [name or "itself" for name, each in model.named_modules() if _exchanges(each)]:
        raise ValueError(
            f"model={type(model).__name__} holds wrappers that exchange themselves, {listed(wrappers)}: give a model"
            " without any (a loop of one's own may give one that is a DistributedDataParallel itself); for shards use"
            " Trainer(strategy='sparse_hsdp') and fully_shard"
        )
    check_layouts(model.named_modules())
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


def check_layouts(modules: Iterable[tuple[str, Module]]) -> None:
    """Refuse layers whose gradients have a sparse layout, such as an Embedding's with ``sparse=True``."""
    for name, module in modules:
        weight = getattr(module, "weight", None)
        if getattr(module, "sparse", False) is True and isinstance(weight, Parameter) and weight.requires_grad:
            raise ValueError(SPARSE_LAYOUT.format(name=f"{name}.weight".removeprefix(".")))


def _exchanges(module: Module) -> bool:
    bases = {base.__name__ for base in type(module).__mro__}
    if _WRAPPERS.isdisjoint(bases):  # first, as parameters of each module would be gone through again in those above it
        return False
    is_trained = any(each.requires_grad for each in module.parameters())  # not such as a teacher
    return is_trained or not _SHARDING.isdisjoint(bases)


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


def in_one_order(settings: Settings, model: Module, backend: str) -> tuple[Settings, Sequence[str]]:
    """Return the settings of a training whose ranks launch all collectives in one order, and what is said of them.

    NCCL alone asks for that. What backward and the main thread launch while an exchange travels would come before it on
    one rank, and after it on another: there nothing travels beside them. The settings that are given stay as they are.
    """
    told = list[str]()
    if backend != "nccl":
        return settings, told
    # FSDP gathers and scatters all through backward, on a communicator of its own.
    overlaps = settings.overlaps_backward and not any(fsdp_modules(model))
    has_batch_norm = any(isinstance(module, torch.nn.SyncBatchNorm) for module in model.modules())
    if settings.overlaps_backward and has_batch_norm:
        overlaps = False
        told.append(
            f"gradients travel after backward, not during it: SyncBatchNorm exchanges during backward, too, {_ON_NCCL}."
        )
    return replace(settings, overlaps_backward=overlaps), told


def of_the_settings(settings: Settings) -> Iterator[str]:
    """Yield what there is no place for where every rank holds a shard of the model."""
    yield from missing_capabilities("in shards", settings)
    local = settings.local_steps or LocalSteps()
    if local.synchronous_steps:
        yield (
            f"synchronous_steps={local.synchronous_steps} are DDP's: leave them out (0), or use SparseDDPStrategy where"
            " the model fits"
        )


def refuse_together(reasons: Iterator[str]) -> None:
    """Raise on every rank what the first that has one has to say."""
    refuse(filter(None, all_gather_object(next(reasons, ""))))


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


def check_bare(model: Module) -> None:
    """Refuse a model that does not lie whole on one device, or has nothing to train."""
    check_model(model)
    named, given = dict(model.named_parameters()), f"model={type(model).__name__}"
    if cut := [name for name, each in named.items() if hasattr(each, "device_mesh")]:
        raise ValueError(
            f"{given} holds shards of {listed(cut)}, which this package no longer exchanges in a loop of one's own or"
            " by Fabric: use Trainer(strategy='sparse_hsdp'), or give a model of which each rank holds all"
        )
    if any(map(is_lazy, named.values())):
        raise ValueError(f"{given} has lazy parameters, whose shapes are not known yet: call it with a batch before")
    if len({each.device for each in named.values()}) > 1:
        raise ValueError(f"{given} has parameters on several devices: give each process a model on one device")
    if not any(each.requires_grad for each in named.values()):
        raise ValueError(f"{given} has no parameter that requires a gradient, so there is nothing to train")


def check_device(strategy: type, device: torch.device) -> None:
    """Refuse a device whose tensors cannot be exchanged, which Lightning refuses for names that contain "ddp"."""
    if device.type == "mps":
        raise ValueError(
            f"accelerator='mps' cannot go together with {strategy.__name__}, as its tensors cannot be exchanged between"
            " processes: use accelerator='cpu', or strategy='auto' for one device"
        )


def check_wrapped(ddp: DistributedDataParallel, world: int) -> None:
    """Refuse a model that others have a hook in, or that is wrapped for a part of all ranks."""
    check_model(ddp.module)
    if getattr(ddp, "_use_python_reducer", False):
        raise RuntimeError(
            "torch._dynamo.config.optimize_ddp is 'python_reducer', which averages gradients in compiled code; set it"
            " to True (the default) or False"
        )
    if ddp._comm_hooks or isinstance(ddp.reducer, NoOpReducer):
        raise RuntimeError(
            "model has a communication hook, or sparsify_gradients has exchanged its gradients before: wrap the"
            " module inside in"
            " a new DistributedDataParallel, without a hook, or give that module as it is"
        )
    if ddp.is_multi_device_module:
        raise ValueError("model has parameters on several devices: give each process a model on one device")
    if (ranks := ddp.process_group.size()) != world:
        raise ValueError(
            f"model is of a process group of {ranks} of {world} processes, and gradients are exchanged between all:"
            " leave process_group out"
        )


def check_trainers(module: Module, optimizers: Sequence[Optimizer], settings: Settings) -> None:
    """Refuse what does not train a model, or calls no hooks where steps are counted."""
    trained = set(module.parameters())
    counts_steps = settings.local_steps is not None or isinstance(settings.schedule, Auto)
    if not optimizers:
        raise ValueError("optimizer=[] names none: give the optimizer that trains the model, or all of them")
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer={optimizer!r} must be a torch.optim.Optimizer, or several of them in a list")
        given = f"optimizer={type(optimizer).__name__}"
        if trained.isdisjoint(optimizer_parameters(optimizer)):
            raise ValueError(f"{given} trains no parameter of model: build it from model.parameters()")
        check_optimizers(settings, [optimizer])
        if counts_steps and not calls_hooks(optimizer):
            raise ValueError(
                f"{given} calls no hooks, by which steps are counted for local_steps and schedule='auto': call"
                " super().__init__() of torch.optim.Optimizer in its own"
            )


def check_optimizers(settings: Settings, optimizers: Sequence[Optimizer]) -> None:
    """Refuse SparseAdam, and optimizers that send in their step where each rank makes steps of its own."""
    if any(isinstance(chain_of(optimizer)[-1], SparseAdam) for optimizer in optimizers):
        raise ValueError(
            "optimizer=SparseAdam takes gradients with a sparse layout, which this package no longer exchanges: give"
            " layers sparse=False, and use torch.optim.Adam"
        )
    if settings.replicas_diverge:
        refuse(chain.from_iterable(map(_of_communication, optimizers)))


def _of_communication(optimizer: Optimizer) -> Iterator[str]:
    for each in chain_of(optimizer):
        if any(map(_sends, vars(each).values())):
            yield (
                f"{type(each).__name__} holds a process group, to send in its own step, and with local steps or A2SGD"
                " each rank steps by itself: what ranks have learned would be overwritten. Give the optimizer that is"
                " inside, such as torch.optim.AdamW, or exchange in every step, with local_steps=1"
            )


def _sends(held: Any) -> bool:
    """Tell whether what an optimizer holds is a process group, or an averager that has one."""
    within = getattr(held, "__dict__", {}) if isinstance(held, ModelAverager) else {}
    return isinstance(held, ProcessGroup) or any(isinstance(each, ProcessGroup) for each in within.values())


def check_total_steps(settings: Settings, total_steps: Optional[int]) -> None:
    """Raise an error if the warm-up is a fraction of a number of steps that is not given."""
    if isinstance(settings.warmup_steps, float) and total_steps is None:
        raise ValueError(
            f"warmup_steps={settings.warmup_steps:g} is a fraction of the training's optimizer steps, and their number"
            " is not given: give total_steps=... (the Trainer's max_steps=...), or a number such as warmup_steps=1000"
        )


def check_facts(scaler: Optional[GradScaler], total_steps: Any) -> None:
    """Check what a loop of one's own tells of itself."""
    if not isinstance(scaler, (GradScaler, type(None))):
        raise TypeError(f"scaler={scaler!r} must be a torch.amp.GradScaler, or None where the loss is not scaled")
    if not (total_steps is None or is_whole(total_steps, 1)):
        raise ValueError(
            f"total_steps={total_steps!r} must be a whole number of optimizer steps, or None where it is not known"
        )


class ReplicaError(RuntimeError):
    """The parameters of two ranks differ, and should not."""


def check_replicas(engine: Engine, when: str) -> None:
    """Raise :class:`ReplicaError`, on all ranks, unless they hold the same parameters, to the bit; all call."""
    parameters = local_tensors(engine.module)
    if (rounds := engine.rounds) is not None and not rounds.is_shared:
        # Until a round is ended early, what no optimizer has, such as a moving average, is each rank's own.
        shared = rounds.shared.exchanged().keys()
        parameters = {name: each for name, each in parameters.items() if name in shared}
    own = torch.stack(list(map(fingerprint, parameters.values())))
    rows = engine.worker.run(partial(engine.levels.same_shard.all_gather, own)).cpu()
    if not (differs := (rows != rows[0]).any(dim=0)).any():
        return
    names = [name for name, is_different in zip(parameters, differs.tolist()) if is_different]
    column = rows[:, list(parameters).index(names[0])]
    ranks = [rank for rank, is_different in enumerate((column != column[0]).tolist()) if is_different]
    raise ReplicaError(
        f"{when} the parameter {names[0]!r} differs from rank 0's on rank {', '.join(map(str, ranks))}"
        f" ({len(names)} of {len(parameters)} parameters differ): what ranks train is no longer one model. Look for"
        " code that changes parameters on some ranks only; go on from a checkpoint that was saved before"
    )
