"""Reduction of the gradients of one backward, in buckets and in the same order on all ranks."""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from lightning_sparse.engine.collectives import Communicator
from lightning_sparse.engine.memory.residual import LARGE
from lightning_sparse.engine.observe import Timestamp
from lightning_sparse.engine.step.reduced import ReducedGradients
from lightning_sparse.engine.step.step import LocalGradient, Pipeline
from lightning_sparse.engine.step.topology import shard_of
from lightning_sparse.engine.step.worker import ExchangeWorker
from lightning_sparse.functional.elements import flatten_as, has_layout_of, local_tensor
from lightning_sparse.schedule import Schedule

SMALL = LARGE  # elements; below, a copy takes less time than a call for each gradient
_OWN_USES = 2  # references to a gradient's storage: the gradient, and the query


class ParamEntry:
    """A parameter with an exchanged gradient. The entry hashes faster than a tensor."""

    __slots__ = ("name", "numel", "parameter", "position")

    def __init__(self, name: str, parameter: Tensor) -> None:
        self.name = name
        self.parameter = parameter
        self.numel = local_tensor(parameter).numel()
        self.position = -1  # position among the exchanged parameters, in order of definition


class ParamOrder:
    """Order in which every rank exchanges its parameters, used or unused. The order is empty until the ranks agree."""

    def __init__(self, members: Sequence[ParamEntry], device: torch.device) -> None:
        self.members = members
        self.places = {each.name: place for place, each in enumerate(members)}
        self.travelling = [each for each in members if each.numel]  # parameters that are sent in a bucket
        self.all_used = torch.ones(len(members), dtype=torch.uint8).to(device)  # flags of use, all set


class Package(NamedTuple):
    """A flat buffer with small gradients side by side, so that few kernels replace many."""

    gradients: Mapping[str, LocalGradient]  # flat, by name
    views: list[Tensor]  # views of the gradients with the shapes and strides of the parameters

    @classmethod
    def of(cls, members: Sequence[ParamEntry], like: Tensor) -> "Package":
        """Allocate a buffer for parameters, with the dtype and the device of the gradient ``like``."""
        flats = like.new_empty(sum(each.numel for each in members)).split([each.numel for each in members])
        # A parameter may leave gaps in its memory, which its gradient does not.
        forms = [torch.empty_like(local_tensor(each.parameter), device="meta") for each in members]
        return cls(
            {each.name: LocalGradient(each.name, flat, True) for each, flat in zip(members, flats)},
            [flat.as_strided(form.shape, form.stride(), flat.storage_offset()) for flat, form in zip(flats, forms)],
        )


class ReducerContext(NamedTuple):
    """Objects and settings that every backward uses."""

    pipeline: Pipeline
    schedule: Schedule
    worker: ExchangeWorker
    reduced: ReducedGradients
    among: Communicator  # ranks that average dense gradients and agree on the order
    overlaps_backward: bool  # whether buckets are sent during backward
    is_sharded: bool
    packages: dict[tuple[str, ...], "Package"]  # buffers of the previous backward, by parameter names
    dense_dtype: Optional[torch.dtype] = None  # dtype that wider dense gradients are sent in

    def dense_dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which dense gradients of a dtype are sent."""
        narrow = self.dense_dtype
        return dtype if narrow is None or narrow.itemsize >= dtype.itemsize else narrow


class _Missing(NamedTuple):  # a parameter that this rank has not used
    parameter: Tensor
    gradient: Tensor  # zeros in place of the gradient, later the mean


class Backward(ABC):
    """The reduction of one backward, from the first gradient until all gradients are means.

    All ranks exchange all parameters in one order. A bucket is sent when this bucket and all earlier ones are complete.
    Gradients that are missing at the end are sent as zeros. The last message has flags of the parameters that each rank
    has used. If no rank has used a parameter, gradient and residual do not change. ``used`` has the parameters that
    this rank has used, also in earlier backwards without an exchange.
    """

    def __init__(self, route: ReducerContext, order: ParamOrder, used: Set[ParamEntry]) -> None:
        self.is_announced = self.has_end = False  # by a caller or the model's output; by an autograd callback
        self.marks: dict[ParamEntry, Timestamp] = {}  # time at which each gradient was ready, in order of backward
        self._context = route
        self._order = order
        self._waiting = deque(order.members)  # parameters not yet in a bucket
        self._used = used
        self._mark = route.pipeline.recorder.mark_of_gradients()
        self._bucket: list[ParamEntry] = []
        self._bucket_numel = 0
        self._missing: list[_Missing] = []
        self._copied: list[tuple[Tensor, Tensor]] = []  # (gradient, exchanged copy)
        self._own_flags: Optional[Tensor] = None  # referenced while a device may read the flags
        self._used_by_any: Optional[Tensor] = None  # flags in the agreed order
        self._committed: Optional[threading.Event] = None

    def take(self, member: ParamEntry) -> None:
        """Add a ready gradient, and put all gradients that are next in order into buckets."""
        self.marks[member] = self._mark()
        waiting = self._waiting
        if not (waiting and member is waiting[0] and self._context.overlaps_backward):
            return
        while waiting and waiting[0] in self.marks:
            self._enqueue(waiting.popleft())
        if not waiting:
            self._end()

    def finalize_backward(self, order: ParamOrder) -> None:
        """Exchange the remaining gradients, and replace all gradients by their means."""
        if not self._order.members:
            self._order, self._waiting = order, deque(order.members)
        while self._waiting:
            self._enqueue(self._waiting.popleft())
        self._context.worker.wait(self._committed or self._end())
        for gradient, copy in self._copied:
            gradient.copy_(copy)
        self._write_missing(self._unused_anywhere())

    def _write_missing(self, unused: Set[Tensor]) -> None:
        for parameter, gradient in self._missing:
            if parameter not in unused:
                parameter.grad = gradient

    def _enqueue(self, member: ParamEntry) -> None:
        if not member.numel:  # an empty shard still needs a gradient if any rank has one
            self._local_of(member)
            return
        dtype = member.parameter.dtype
        if self._bucket and dtype is not self._bucket[0].parameter.dtype and not self._goes_with(dtype):
            self._close_bucket()  # a message has values of one dtype
        self._bucket.append(member)
        self._bucket_numel += member.numel
        # The last message has the flags of use, so it waits for the end of backward.
        if self._closes(member) and member is not self._order.travelling[-1]:
            self._close_bucket()

    def _close_bucket(self, is_last: bool = False) -> None:
        members, self._bucket, self._bucket_numel = self._bucket, [], 0
        bucket = self._gradients_of(members)
        self._own_flags = self._flags() if is_last else None
        self._submit(members, bucket, self._own_flags)

    def _end(self) -> threading.Event:
        if self._bucket:
            self._close_bucket(is_last=True)
        self._committed = threading.Event()
        self._context.worker.submit(self._commit, done=self._committed)
        return self._committed

    def _goes_with(self, dtype: torch.dtype) -> bool:
        """Return whether gradients of this dtype may be added to the current bucket of another dtype."""
        return False

    @abstractmethod
    def _closes(self, member: ParamEntry) -> bool:
        """Return whether the bucket is complete with ``member`` as its last parameter."""

    @abstractmethod
    def _submit(self, members: Sequence[ParamEntry], bucket: Sequence[LocalGradient], flags: Optional[Tensor]) -> None:
        """Send a bucket, with flags of use if the bucket is a step's last."""

    @abstractmethod
    def _commit(self) -> None:
        """Replace this rank's gradients by their means, and read which parameters any rank used. Runs on the worker."""

    def _is_used(self, member: ParamEntry) -> bool:
        return member in self._used and member.parameter.grad is not None

    def _gradients_of(self, members: Sequence[ParamEntry]) -> list[LocalGradient]:
        return [self._local_of(each) for each in members]

    def _local_of(self, member: ParamEntry) -> LocalGradient:
        is_used = self._is_used(member)
        return LocalGradient(member.name, (self._flat_grad if is_used else self._zeros_for)(member.parameter), is_used)

    def _zeros_for(self, parameter: Tensor) -> Tensor:
        zeros = torch.zeros_like(parameter)
        self._missing.append(_Missing(parameter, zeros))
        return flatten_as(shard_of(parameter, zeros) if self._context.is_sharded else zeros)

    def _flat_grad(self, parameter: Tensor) -> Tensor:
        gradient = self._held_gradient(parameter)
        if not self._context.is_sharded and (not has_layout_of(gradient, parameter) or _shares_memory(parameter)):
            copy = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
            self._copied.append((gradient, copy))
            gradient = copy
        return flatten_as(gradient)

    def _held_gradient(self, parameter: Tensor) -> Tensor:
        gradient = parameter.grad
        assert gradient is not None
        if self._context.is_sharded:
            return shard_of(parameter, gradient).view_as(local_tensor(parameter))
        return gradient.detach() if gradient.requires_grad else gradient  # create_graph=True makes such gradients

    def _flags(self) -> Tensor:
        all_used = self._order.all_used
        if not self._missing:
            return all_used
        missing = {each.parameter for each in self._missing}
        flags = torch.tensor([each.parameter not in missing for each in self._order.members], dtype=torch.uint8)
        # non_blocking is safe, because a copy from unpinned memory has read its source when the call returns.
        return flags.to(all_used.device, non_blocking=True)

    def _unused_anywhere(self) -> set[Tensor]:
        """Return the missing parameters that no rank has used. Only such a step synchronizes with a GPU."""
        if not self._missing or self._used_by_any is None:
            return set()
        return {each.parameter for each, used in zip(self._order.members, self._used_by_any.tolist()) if not used}


def _shares_memory(parameter: Tensor) -> bool:
    """Return whether a gradient's storage has other references, such as the gradient of a summed parameter."""
    assert parameter.grad is not None
    storage = parameter.grad.untyped_storage()
    return storage.nbytes() == parameter.grad.nbytes and torch._C._storage_Use_Count(storage._cdata) > _OWN_USES


def is_replaceable(flat: Tensor, parameter: Tensor) -> bool:
    """Return whether a flat tensor is a complete CPU gradient that backward has just created, without a graph."""
    gradient = parameter.grad
    if gradient is None or gradient.requires_grad or gradient._version:
        return False
    return flat.device.type == "cpu" and parameter.is_contiguous() and flat.data_ptr() == gradient.data_ptr()
