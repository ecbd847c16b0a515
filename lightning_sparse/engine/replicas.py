"""Replicas that drift apart by design, made one again by averaging."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from lightning_sparse.engine.collectives import Collectives
from lightning_sparse.functional import fingerprint


class ReplicaAverager:
    """Average parameters and floating-point buffers over ranks.

    Args:
        module: the model.
        collectives: how they travel.
        every: steps between two averages; ``None`` to wait until it is asked for.

    Attributes:
        divergence: how far the replicas were apart when they were last averaged: the root mean square over ranks of
            the distance from the mean of the parameters, relative to its norm; a tensor of one element.
        sent_bytes: that left this rank the last time that the replicas were made one.
    """

    def __init__(self, module: nn.Module, collectives: Collectives, every: Optional[int]) -> None:
        self._module = module
        self._collectives = collectives
        self._every = every
        self._steps = 0
        self.divergence = torch.zeros(())
        self.sent_bytes = 0.0

    def count_step(self) -> bool:
        """Count a step of the optimizer, and tell whether an average is due."""
        self._steps += 1
        return self._every is not None and self._steps >= self._every

    def state_dict(self) -> dict[str, Any]:
        """Return how many steps have been taken since the last average, and how far it brought replicas together."""
        return {"steps": self._steps, "divergence": self.divergence}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the state."""
        self._steps = int(state["steps"])
        self.divergence = state["divergence"].to(self._collectives.device, copy=True)

    def make_one(self) -> None:
        """Average over ranks, in place, unless all replicas are the same: afterwards they are identical to the bit.

        Raises:
            ExchangeError: if another rank does not get there.
        """
        self.sent_bytes = 0.0
        with self._collectives.telling_of("the average of the replicas", "all_reduce"):
            # Without a step, too, they can differ: weights that a callback has averaged are each rank's own.
            if self._steps > 0 or self._differ():
                self._average()

    def _differ(self) -> bool:
        tensors = [*_averaged(self._module.parameters()), *_averaged(self._module.buffers())]
        mine = fingerprint(torch.stack([fingerprint(tensor) for tensor in tensors])).view(1)
        self.sent_bytes += self._collectives.sent_bytes("all_gather", mine)
        numbers = self._collectives.all_gather(mine)
        return bool((numbers != numbers[0]).any())

    def _average(self) -> None:
        self._steps = 0
        distance = torch.zeros(1, device=self._collectives.device)
        norm = torch.zeros(1, device=self._collectives.device)
        for tensors in _alike(self._module.parameters()):
            mean, flat = self._mean(tensors)
            distance += torch.linalg.vector_norm(flat - mean).square().float()
            norm += torch.linalg.vector_norm(mean).square().float()
            _write(mean, tensors)
        for tensors in _alike(self._module.buffers()):
            _write(self._mean(tensors)[0], tensors)
        distances = self._collectives.all_gather(distance)
        self.sent_bytes += self._collectives.sent_bytes("all_gather", distance)
        self.divergence = (distances.mean() / norm.clamp(min=torch.finfo(norm.dtype).tiny)).sqrt().squeeze()

    def _mean(self, tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
        flat = _flatten_dense_tensors(tensors)
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
        self.sent_bytes += self._collectives.sent_bytes("all_reduce", flat)
        mean = self._collectives.all_reduce(flat / self._collectives.ranks)
        return mean, flat


def _averaged(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    return (tensor.detach() for tensor in tensors if tensor.is_floating_point() and tensor.numel())


def _alike(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    alike: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in _averaged(tensors):
        alike[tensor.dtype].append(tensor)
    return alike.values()


def _write(mean: Tensor, tensors: list[Tensor]) -> None:
    for tensor, piece in zip(tensors, _unflatten_dense_tensors(mean, tensors)):
        tensor.copy_(piece)
