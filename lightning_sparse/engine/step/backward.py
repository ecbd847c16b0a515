"""The gradients of one backward: in one order on all ranks, in buckets, to a worker."""

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

SMALL = LARGE  # gradients of fewer elements are copied in less time than a call for each takes
_OWN_USES = 2  # of a gradient's memory: the gradient, and who asks


class ParamEntry:
    """A parameter whose gradient is exchanged; found by what it is, faster than a tensor."""

    __slots__ = ("name", "numel", "parameter", "position")

    def __init__(self, name: str, parameter: Tensor) -> None:
        self.name = name
        self.parameter = parameter
        self.numel = local_tensor(parameter).numel()
        self.position = -1  # among those that are exchanged, as they are defined


class ParamOrder:
    """In which all ranks hand over parameters, whatever each has used; of none until they have agreed on one."""

    def __init__(self, members: Sequence[ParamEntry], device: torch.device) -> None:
        self.members = members
        self.places = {each.name: place for place, each in enumerate(members)}
        self.travelling = [each for each in members if each.numel]  # in a bucket
        self.all_used = torch.ones(len(members), dtype=torch.uint8).to(device)  # as flags


class Package(NamedTuple):
    """Memory in which small gradients lie side by side: many calls become few."""

    gradients: Mapping[str, LocalGradient]  # flat, by name
    views: list[Tensor]  # of the same, with the shapes and strides of parameters

    @classmethod
    def of(cls, members: Sequence[ParamEntry], like: Tensor) -> "Package":
        """Take memory of the type and the device of a gradient."""
        flats = like.new_empty(sum(each.numel for each in members)).split([each.numel for each in members])
        # A parameter may leave gaps in its memory, which its gradient does not.
        forms = [torch.empty_like(local_tensor(each.parameter), device="meta") for each in members]
        return cls(
            {each.name: LocalGradient(each.name, flat, True) for each, flat in zip(members, flats)},
            [flat.as_strided(form.shape, form.stride(), flat.storage_offset()) for flat, form in zip(flats, forms)],
        )


class ReducerContext(NamedTuple):
    """What gradients pass on their way, in every backward."""

    pipeline: Pipeline
    schedule: Schedule
    worker: ExchangeWorker
    reduced: ReducedGradients
    among: Communicator  # the ranks that average what is dense, and agree on the order of gradients
    overlaps_backward: bool  # else buckets go when backward has ended
    is_sharded: bool
    packages: dict[tuple[str, ...], "Package"]  # memory of the backward before, by the names in it
    dense_dtype: Optional[torch.dtype] = None  # what is dense travels in it if it is wider; ``None``: as it is

    def dense_dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type in which a dense gradient of a type travels."""
        narrow = self.dense_dtype
        return dtype if narrow is None or narrow.itemsize >= dtype.itemsize else narrow


class _Missing(NamedTuple):
    """A parameter that this rank has not used."""

    parameter: Tensor
    gradient: Tensor  # zeros in the place of its gradient, then the mean


class Backward(ABC):
    """What is exchanged of one backward, from its first gradient until all are means; then it is dropped.

    All ranks hand over all parameters in one order. A bucket goes when it, and all before it, are complete; what is
    missing in the end goes as zeros. The last message tells which parameters each rank has used: where none has,
    gradient and residual stay. ``used`` are those that this rank has, also in backwards before that exchanged nothing.
    """

    def __init__(self, route: ReducerContext, order: ParamOrder, used: Set[ParamEntry]) -> None:
        self.is_announced = self.has_end = False  # by a caller or by the output of the model; by a callback of autograd
        self.marks: dict[ParamEntry, Timestamp] = {}  # since when each gradient is ready, in the order of backward
        self._context = route
        self._order = order
        self._waiting = deque(order.members)  # to be handed over
        self._used = used
        self._mark = route.pipeline.recorder.mark_of_gradients()
        self._bucket: list[ParamEntry] = []
        self._bucket_numel = 0
        self._missing: list[_Missing] = []
        self._copied: list[tuple[Tensor, Tensor]] = []  # gradients, and what is exchanged in the place of their memory
        self._own_flags: Optional[Tensor] = None  # held for as long as a device may read them
        self._used_by_any: Optional[Tensor] = None  # of parameters in the agreed order
        self._committed: Optional[threading.Event] = None

    def take(self, member: ParamEntry) -> None:
        """Take a gradient that is ready, and hand over those whose turn it is."""
        self.marks[member] = self._mark()
        waiting = self._waiting
        if not (waiting and member is waiting[0] and self._context.overlaps_backward):
            return
        while waiting and waiting[0] in self.marks:
            self._enqueue(waiting.popleft())
        if not waiting:
            self._end()

    def finalize_backward(self, order: ParamOrder) -> None:
        """Hand over what has not been, and have gradients be means."""
        if not self._order.members:
            self._order, self._waiting = order, deque(order.members)
        while self._waiting:
            self._enqueue(self._waiting.popleft())
        self._context.worker.wait(self._committed or self._end())
        for gradient, copy in self._copied:
            gradient.copy_(copy)
        self._write_missing(self._unused_anywhere())

    def _write_missing(self, unused: Set[Tensor]) -> None:
        """Write means where this rank has no gradient to write them into; nothing where no rank has one."""
        for parameter, gradient in self._missing:
            if parameter not in unused:
                parameter.grad = gradient

    def _enqueue(self, member: ParamEntry) -> None:
        """Add a gradient to its bucket, and the bucket to what travels if it is complete."""
        if not member.numel:  # of some parameters a rank has nothing, but a gradient where any rank has one
            self._local_of(member)
            return
        dtype = member.parameter.dtype
        if self._bucket and dtype is not self._bucket[0].parameter.dtype and not self._goes_with(dtype):
            self._close_bucket()  # a message has values of one type
        self._bucket.append(member)
        self._bucket_numel += member.numel
        # The last message waits for backward's end: it tells of use.
        if self._closes(member) and member is not self._order.travelling[-1]:
            self._close_bucket()

    def _close_bucket(self, is_last: bool = False) -> None:
        members, self._bucket, self._bucket_numel = self._bucket, [], 0
        bucket = self._gradients_of(members)
        self._own_flags = self._flags() if is_last else None
        self._submit(members, bucket, self._own_flags)

    def _end(self) -> threading.Event:
        """Let the last bucket go, and have the means written when all have arrived, which is what the event tells."""
        if self._bucket:
            self._close_bucket(is_last=True)
        self._committed = threading.Event()
        self._context.worker.submit(self._commit, done=self._committed)
        return self._committed

    def _goes_with(self, dtype: torch.dtype) -> bool:
        """Tell whether gradients of another type than those of the bucket go with them."""
        return False

    @abstractmethod
    def _closes(self, member: ParamEntry) -> bool:
        """Tell whether the bucket is complete with the member that it has last."""

    @abstractmethod
    def _submit(self, members: Sequence[ParamEntry], bucket: Sequence[LocalGradient], flags: Optional[Tensor]) -> None:
        """Have a bucket travel, with flags of what was used if it is a step's last."""

    @abstractmethod
    def _commit(self) -> None:
        """Have gradients be means where this rank has any, and know what was used; on the worker."""

    def _is_used(self, member: ParamEntry) -> bool:
        return member in self._used and member.parameter.grad is not None

    def _gradients_of(self, members: Sequence[ParamEntry]) -> list[LocalGradient]:
        """Return the gradients of a bucket, flat."""
        return [self._local_of(each) for each in members]

    def _local_of(self, member: ParamEntry) -> LocalGradient:
        """Return what this rank has added to a gradient, flat, where the mean is to be written."""
        is_used = self._is_used(member)
        return LocalGradient(member.name, (self._flat_grad if is_used else self._zeros_for)(member.parameter), is_used)

    def _zeros_for(self, parameter: Tensor) -> Tensor:
        """Return zeros for a parameter that was not used."""
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
        """Return what this rank holds of a gradient."""
        gradient = parameter.grad
        assert gradient is not None
        if self._context.is_sharded:
            return shard_of(parameter, gradient).view_as(local_tensor(parameter))
        return gradient.detach() if gradient.requires_grad else gradient  # by create_graph=True

    def _flags(self) -> Tensor:
        """Return which parameters this rank has used, uint8, in the agreed order."""
        all_used = self._order.all_used
        if not self._missing:
            return all_used
        missing = {each.parameter for each in self._missing}
        flags = torch.tensor([each.parameter not in missing for each in self._order.members], dtype=torch.uint8)
        # Not blocking is safe: a copy from memory that is not pinned has read its source when it returns.
        return flags.to(all_used.device, non_blocking=True)

    def _unused_anywhere(self) -> set[Tensor]:
        """Return those of the missing that no rank has used; the host waits for a GPU in such a step only."""
        if not self._missing or self._used_by_any is None:
            return set()
        return {each.parameter for each, used in zip(self._order.members, self._used_by_any.tolist()) if not used}


def _shares_memory(parameter: Tensor) -> bool:
    """Tell whether others hold all of a gradient's memory, such as the gradient of a parameter that was added to it."""
    assert parameter.grad is not None
    storage = parameter.grad.untyped_storage()
    return storage.nbytes() == parameter.grad.nbytes and torch._C._storage_Use_Count(storage._cdata) > _OWN_USES


def is_replaceable(flat: Tensor, parameter: Tensor) -> bool:
    """Tell whether a flat tensor is all of a gradient on a CPU that backward has just made, without a graph."""
    gradient = parameter.grad
    if gradient is None or gradient.requires_grad or gradient._version:
        return False
    return flat.device.type == "cpu" and parameter.is_contiguous() and flat.data_ptr() == gradient.data_ptr()
