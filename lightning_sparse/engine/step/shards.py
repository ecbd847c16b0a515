"""A model of which every rank holds a shard: its gradients are exchanged between replicas when a backward is over."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_sparse.engine.step.hook import Stream
from lightning_sparse.engine.step.levels import LocalGradient
from lightning_sparse.engine.step.step import Exchanged, Pipeline
from lightning_sparse.engine.step.worker import ExchangeWorker
from lightning_sparse.functional.elements import held_of
from lightning_sparse.schedule import Schedule


class ShardedModel:
    """What stands in the place of a DDP wrapper: FSDP averages gradients inside a replica, and never between them."""

    process_group = None  # all ranks
    require_backward_grad_sync = require_forward_param_sync = True

    def __init__(self, module: Module) -> None:
        self.module = module


def cut_modules(module: Module) -> Iterator[Any]:
    """Yield the modules that ``fully_shard`` was called on; to ask for torch's class would import all of FSDP."""
    return (each for each in module.modules() if hasattr(each, "set_requires_gradient_sync"))


def reshard(module: Module) -> None:
    """Have a model hold shards only: after a forward without a backward FSDP leaves the root's parameters whole."""
    for each in cut_modules(module):
        each.reshard()


class ShardStream(Stream):
    """Take the shards of gradients once FSDP has averaged them, and hand them to the exchange worker in groups.

    A replica may have used a parameter that another has not: all travel in every step, and tell whether they were used.
    """

    def __init__(self, module: Module, pipeline: Pipeline, schedule: Schedule, worker: ExchangeWorker) -> None:
        self._pipeline = pipeline
        self._schedule = schedule
        self._worker = worker
        self._parameters = {name: each for name, each in module.named_parameters() if each.requires_grad}

    def exchange(self) -> None:
        """Replace gradients by their means over replicas; all ranks must call, and wait."""
        recorder = self._pipeline.recorder
        missing = {name: parameter for name, parameter in self._parameters.items() if parameter.grad is None}
        for parameter in missing.values():
            parameter.grad = torch.zeros_like(parameter)
        shards = [
            LocalGradient(name, _flat(parameter), name not in missing) for name, parameter in self._parameters.items()
        ]
        gradients = [local for local in shards if local.gradient.numel()]  # of some parameters a rank has nothing
        recorder.add_ready([local.name for local in gradients])
        recorder.end_backward()
        for name in self._worker.run(lambda: self._exchange(gradients, list(missing))):
            missing[name].grad = None

    def _exchange(self, gradients: Sequence[LocalGradient], missing: Sequence[str]) -> list[str]:
        """Exchange and write back on the worker; return those of ``missing`` that no replica has used."""
        if self._pipeline.memory.clips_gradients:
            self._pipeline.measure_norms(gradients)
        exchanged = self._pipeline.exchange_in_groups(gradients, self._schedule.closes_group)
        self._pipeline.commit(exchanged)
        unused = self._unused(exchanged, missing) if missing else []
        self._pipeline.close_step()
        return unused

    def _unused(self, exchanged: Sequence[Exchanged], missing: Sequence[str]) -> list[str]:
        """Return which of the parameters that this replica has not used no other has; all its ranks must call."""
        used = {name: flag for each in exchanged for name, flag in zip(each.names, _flags(each))}
        nothing = torch.zeros((), dtype=torch.bool, device=exchanged[0].arrival.finite.device)
        flags = torch.stack([used.get(name, nothing) for name in missing])
        # The host waits for a GPU, in such a step only.
        are_used = self._pipeline.levels.any_of(flags, missing).tolist()
        return [name for name, is_used in zip(missing, are_used) if not is_used]


def _flags(exchanged: Exchanged) -> Tensor:
    assert exchanged.arrival.used is not None
    return exchanged.arrival.used.bool()


def _flat(parameter: Parameter) -> Tensor:
    """Return the shard of a gradient, flat."""
    gradient = parameter.grad
    assert gradient is not None
    if getattr(gradient, "placements", None) != getattr(parameter, "placements", None):
        raise RuntimeError(
            "a gradient is not sharded as its parameter is: backward has to reduce it in the replica"
            " (set_requires_gradient_sync(True), which Lightning's accumulation is left to)"
        )
    return held_of(gradient).view(-1)
