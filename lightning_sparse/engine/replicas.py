"""Replicas of the model: one after every step, or drifting apart and averaged now and then."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Optional
from zlib import crc32

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_sparse.engine.collectives import Communicator, SharedOnCopy
from lightning_sparse.engine.step.worker import ExchangeWorker
from lightning_sparse.engine.wire.base import Payload
from lightning_sparse.functional.elements import local_tensor
from lightning_sparse.functional.reductions import fingerprint

_AVERAGED_AT_ONCE = 1 << 24  # elements


class Replicas(SharedOnCopy):
    """Replicas that are one after every step, as the exchange of gradients keeps them: nothing is done for them."""

    are_apart = False  # each rank steps with gradients of its own

    def begin_round(self) -> None:
        """Begin rounds of local steps, if there are any and they have not begun; all ranks must call."""

    def reset_shared_model(self) -> None:
        """Go on from the model that there is now, as the one of all ranks; all must call."""
        self.synchronize()

    @contextmanager
    def shared_model(self) -> Iterator[None]:
        """Have the model be one on all ranks inside; all must call."""
        self.synchronize()
        yield

    def count_step(self, optimizer: int) -> None:
        """Count a step of an optimizer."""

    def synchronize(self) -> None:
        """Make all replicas one; all ranks must call."""

    def in_stats(self, stats: dict[str, float], steps: int) -> dict[str, float]:
        """Return the statistics of the last exchange, which was about so many steps, with those of the replicas."""
        return stats

    def state_dict(self, together: bool = False) -> dict[str, Any]:
        """Return their part of the engine's state, by its name, not copied; all ranks call if ``together``."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace what they keep by a copy of their part of an engine's state, if it has one; on the worker."""


class AveragedReplicas(Replicas):
    """Replicas that drift apart, and are averaged every so many steps; ``None``: only when they are looked at."""

    def __init__(self, averager: "ReplicaAverager", every: Optional[int], worker: ExchangeWorker) -> None:
        self._averager = averager
        self._every = every
        self._worker = worker
        self._steps = 0

    @override
    def count_step(self, optimizer: int) -> None:
        self._steps += 1
        if self._every is not None and self._steps >= self._every:
            with self._averager.recorder.waiting(is_exchange=True):
                self.synchronize()

    @override
    def synchronize(self) -> None:
        # Without a step, too, they can differ: weights that a callback has averaged are each rank's own.
        self._worker.run(lambda: self._averager.average(are_apart=self._steps > 0))
        self._steps = 0

    @override
    def in_stats(self, stats: dict[str, float], steps: int) -> dict[str, float]:
        return {**stats, "replica_divergence": float(self._averager.divergence)}

    @override
    def state_dict(self, together: bool = False) -> dict[str, Any]:
        return {"averager": {"steps": self._steps, "divergence": self._averager.divergence}}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "averager" in state:
            self._steps = int(state["averager"]["steps"])
            self._averager.divergence = state["averager"]["divergence"].to(self._averager.device, copy=True)


class ReplicaAverager:
    """Average parameters and buffers; ``divergence`` is their RMS distance from the mean over the mean's norm."""

    def __init__(self, module: nn.Module, communicator: Communicator) -> None:
        self._module = module
        self._communicator = communicator
        self.recorder = communicator.recorder
        self.device = communicator.device
        self.divergence = torch.zeros(())

    def average(self, tensors: Optional[Mapping[str, Tensor]] = None, are_apart: bool = False) -> None:
        """Average tensors, or the whole model, over ranks, in place; of what is no float take the first rank's.

        Unless they ``are_apart``, only those that ranks hold differently. Afterwards all are identical to the bit.
        """
        if tensors is None:
            tensors = averaged(chain(self._module.named_parameters(), self._module.named_buffers()))
        floats = {name for name, tensor in tensors.items() if tensor.is_floating_point()}
        asked = {name: tensor for name, tensor in tensors.items() if not (are_apart and name in floats)}
        differing = set(self.differing(asked, is_counted=True)) if asked or not are_apart else set[str]()
        means = {name: each for name, each in tensors.items() if name in floats and (are_apart or name in differing)}
        firsts = [each for name, each in tensors.items() if name in differing and name not in floats]
        with self.recorder.of_last_step("the average of the replicas"):
            if means:
                self._average(means)
            if firsts:
                self._copy_first(firsts)

    def differing(self, tensors: Mapping[str, Tensor], is_counted: bool = False) -> list[str]:
        """Return the names of tensors that ranks hold differently, on all ranks; none where they have other tensors."""
        forms = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
        form = torch.tensor(crc32(repr(forms).encode()), device=self._communicator.device)
        # A rank without tensors meets the others, too.
        prints = torch.stack(list(map(fingerprint, tensors.values()))) if tensors else form.view(1)
        with self.recorder.of_last_step("what tells tensors apart", is_counted):
            everywhere = self._gathered(torch.stack([form, fingerprint(prints)])).tolist()
            if len({theirs for theirs, _ in everywhere}) > 1 or all(each == everywhere[0] for each in everywhere):
                return []
            are_apart = (each := self._gathered(prints)).ne(each[0]).any(dim=0).tolist()
        return [name for name, is_apart in zip(tensors, are_apart) if is_apart]

    def _gathered(self, mine: Tensor) -> Tensor:
        return self._communicator.call(Payload("all_gather", mine))

    def _average(self, tensors: Mapping[str, Tensor]) -> None:
        distance = torch.zeros(1, device=self._communicator.device, dtype=torch.float32)
        norm = torch.zeros_like(distance)
        parameters = {name for name, _ in self._module.named_parameters()}
        for alike in _alike(tensors[name] for name in tensors if name in parameters):
            mean, flat = self._mean(alike)
            distance += torch.linalg.vector_norm(flat - mean).square().float()
            norm += torch.linalg.vector_norm(mean).square().float()
            _write(mean, alike)
        for alike in _alike(tensors[name] for name in tensors if name not in parameters):
            _write(self._mean(alike)[0], alike)
        distances = self._gathered(distance)
        self.divergence = (distances.mean() / norm.clamp(min=torch.finfo(norm.dtype).tiny)).sqrt().squeeze()

    def _copy_first(self, tensors: list[Tensor]) -> None:
        """Overwrite tensors by those of the first rank: the sum of its bytes and the others' zeros."""
        flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])
        if self._communicator.rank:
            flat.zero_()
        first = self._communicator.call(Payload("all_reduce", flat))
        for tensor, piece in zip(tensors, first.split([tensor.nbytes for tensor in tensors])):
            tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))  # a copy is aligned, as a view has to be

    def _mean(self, tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
        flat = torch.cat([each.reshape(-1) for each in tensors])
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
        mean = self._communicator.call(Payload("all_reduce", flat / self._communicator.world_size))
        return mean, flat


def averaged(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return what this rank holds of tensors of which replicas have one value; complex ones as pairs of numbers.

    No frozen ones of a kind of their own (quantized), and nothing that lies in the memory of a trained one.

    Raises:
        ValueError: if a tensor has a part of its memory in common with a trained one.
    """
    held = {name: (tensor.requires_grad, local_tensor(tensor)) for name, tensor in named}
    trained: defaultdict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for name, (is_trained, each) in held.items():
        if is_trained and (place := _place(each)) is not None:
            trained[place[0]].append((*place[1:], name))
    found: dict[str, Tensor] = {}
    for name, (is_trained, each) in held.items():
        is_dense = type(each) is Tensor and each.layout is torch.strided
        if each.numel() and (is_trained or (is_dense and not _is_trained_with(each, name, trained))):
            found[name] = torch.view_as_real(each) if each.is_complex() else each
    return found


def _place(tensor: Tensor) -> Optional[tuple[int, int, int]]:
    """Return a tensor's storage, and where in its bytes it begins and ends; ``None`` where it has no such place."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or not tensor.numel():
        return None
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    start = tensor.storage_offset() * tensor.element_size()
    return tensor.untyped_storage().data_ptr(), int(start), int(start + reach * tensor.element_size())


def _is_trained_with(tensor: Tensor, name: str, trained: Mapping[int, Sequence[tuple[int, int, str]]]) -> bool:
    """Tell whether a tensor lies in the memory of one that is trained; refuse one that lies there in part."""
    place = _place(tensor)
    if place is None or place[0] not in trained:
        return False
    storage, start, stop = place
    there = [(first, last, other) for first, last, other in trained[storage] if start < last and first < stop]
    if there and there[0][:2] != (start, stop):
        raise ValueError(
            f"{name!r} has a part of its memory in common with {there[0][2]!r}, which is trained, so that replicas"
            " cannot be averaged: make it a copy, or the whole of it"
        )
    return bool(there)


def _alike(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Put tensors of a type together, some at a time: their mean takes memory."""
    alike: defaultdict[tuple[torch.dtype, int], list[Tensor]] = defaultdict(list)
    numels: defaultdict[torch.dtype, int] = defaultdict(int)
    for tensor in tensors:
        alike[tensor.dtype, numels[tensor.dtype] // _AVERAGED_AT_ONCE].append(tensor)
        numels[tensor.dtype] += tensor.numel()
    return alike.values()


def _write(mean: Tensor, tensors: list[Tensor]) -> None:
    for tensor, piece in zip(tensors, mean.split([each.numel() for each in tensors])):
        tensor.copy_(piece.view_as(tensor))
