"""Reduction of the gradients of one backward, in buckets and in the same order on all ranks.

:class:`SparseBackward` sends selected elements, and :class:`DenseBackward` all elements.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from typing_extensions import override

from lightning_sparse.engine.collectives import Communicator, ExchangeWorker
from lightning_sparse.engine.memory import widened
from lightning_sparse.engine.observe import Timestamp
from lightning_sparse.engine.step.step import BucketResult, Pipeline
from lightning_sparse.engine.step.topology import LocalGradient, shard_of
from lightning_sparse.functional.elements import flatten_as, has_layout_of, laid_as, local_tensor
from lightning_sparse.schedule import Schedule

_SMALL = 1 << 15  # number of elements; smaller gradients are copied into one buffer, which saves kernel launches
_FIRST_DENSE_BYTES = 1024 * 1024  # bytes of a dense step's first message, short so that the network starts early
_DENSE_BYTES = 25 * 1024 * 1024  # maximum bytes of a dense message, as in DDP; sizes double up to this maximum
COLLECTING, ENDING, FINALIZING = range(3)  # phases of a backward; ENDING if finalize_backward is queued
_OWN_USES = 2  # number of references to the storage of an unshared gradient: p.grad, and the query


class ParamEntry:
    """A parameter to exchange. Dictionaries have entries as keys, because an entry hashes faster than a tensor."""

    __slots__ = ("name", "numel", "parameter")

    def __init__(self, name: str, parameter: Tensor) -> None:
        self.name = name
        self.parameter = parameter
        self.numel = local_tensor(parameter).numel()


class ParamOrder:
    """The exchanged parameters: in order of definition until rank 0's first backward sets the order of exchange."""

    def __init__(self, members: list[ParamEntry], device: torch.device, is_agreed: bool = False) -> None:
        self.members = members
        self.is_agreed = is_agreed  # whether all ranks exchange in this order
        self.places = {each.name: place for place, each in enumerate(members)}
        self.travelling = [each for each in members if each.numel]  # non-empty parameters, which buckets send
        self.all_used = torch.ones(len(members), dtype=torch.uint8).to(device)  # usage flags, all 1


class Package(NamedTuple):
    """A flat buffer with copies of small gradients side by side, so that few kernels process many gradients."""

    gradients: Mapping[str, LocalGradient]  # flat pieces of the buffer, by name
    views: list[Tensor]  # pieces of the buffer, with the shapes and strides of the parameters

    @classmethod
    def of(cls, members: Sequence[ParamEntry], like: Tensor) -> "Package":
        """Allocate a buffer for parameters, with the dtype and the device of the gradient ``like``."""
        flats = like.new_empty(sum(each.numel for each in members)).split([each.numel for each in members])
        # empty_like() gives strides without gaps, as gradients have. The memory of a parameter may have gaps.
        forms = [torch.empty_like(local_tensor(each.parameter), device="meta") for each in members]
        return cls(
            {each.name: LocalGradient(each.name, flat, True) for each, flat in zip(members, flats)},
            [flat.as_strided(form.shape, form.stride(), flat.storage_offset()) for flat, form in zip(flats, forms)],
        )


class ReducerContext(NamedTuple):
    """Objects and settings of a :class:`SparseReducer` that every backward uses."""

    pipeline: Pipeline
    schedule: Schedule
    worker: ExchangeWorker
    among: Communicator  # ranks that average dense gradients and agree on the order
    overlaps_backward: bool  # whether buckets are sent during backward
    is_sharded: bool  # whether FSDP shards the model
    begin: Callable[[], None]  # called before the first gradient
    end: Callable[[], None]  # called when all gradients are means
    packages: dict[tuple[str, ...], Package]  # buffers of the previous backward, by parameter names
    warm_up_dtype: Optional[torch.dtype]  # ``dense_dtype`` in Adam's warm-up
    dense_dtype: Optional[torch.dtype] = None  # dtype in which dense gradients of wider dtypes are sent

    def dense_dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a dense gradient of ``dtype`` is sent."""
        narrow = self.dense_dtype
        return dtype if narrow is None or narrow.itemsize >= dtype.itemsize else narrow


class Backward(ABC):
    """Average the gradients of one backward over ranks, from the first gradient until all gradients are means.

    All ranks exchange all parameters in one order. A bucket is sent when this bucket and all earlier buckets are
    complete. Gradients that are missing when backward ends are sent as zeros. The last message has the usage flags:
    one flag per parameter, set if this rank has used the parameter. If no rank has used a parameter, the gradient and
    the residual of the parameter do not change.

    Args:
        route: objects and settings of the reducer.
        order: order of exchange; not agreed in the first backward.
        used: parameters that this rank has used since the last exchange, in this or an earlier backward.
    """

    def __init__(self, route: ReducerContext, order: ParamOrder, used: Set[ParamEntry]) -> None:
        self.is_announced = False  # whether a hook saw the start of backward
        self.phase = COLLECTING
        self.marks: dict[ParamEntry, Timestamp] = {}  # time when each gradient was ready; ordered by time
        self._context = route
        self._order = order
        self._waiting = deque(order.members if order.is_agreed else ())  # parameters not yet in a bucket
        self._used = used
        self._bucket: list[ParamEntry] = []
        self._bucket_numel = 0
        self._missing: dict[Tensor, Tensor] = {}  # zeros, and later the mean, of parameters that this rank has not used
        self._copied: list[tuple[list[Tensor], list[Tensor]]] = []  # gradients, and the copies that are exchanged
        self._committed: Optional[Future[Optional[Tensor]]] = None  # result of the task _commit

    def take(self, member: ParamEntry) -> None:
        """Record a ready gradient. Put ready gradients into buckets, up to the next missing gradient in the order."""
        self.marks[member] = self._context.pipeline.recorder.mark_gradient()
        waiting = self._waiting
        if not (waiting and member is waiting[0] and self._context.overlaps_backward):
            return
        while waiting and waiting[0] in self.marks:
            self._enqueue(waiting.popleft())
        if not waiting:
            self._end()

    def finalize_backward(self, order: ParamOrder) -> Set[Tensor]:
        """Send the remaining gradients, wait for all means, and return the parameters that no rank has used."""
        if order is not self._order:  # ranks agree on an order after the first backward
            self._order, self._waiting = order, deque(order.members)
        while self._waiting:
            self._enqueue(self._waiting.popleft())
        used = self._context.worker.wait(self._committed or self._end())
        for gradients, copies in self._copied:
            torch._foreach_copy_(gradients, copies)
        unused = self._unused_anywhere(used)
        for parameter, gradient in self._missing.items():
            if parameter not in unused:
                parameter.grad = gradient
        return unused

    def _enqueue(self, member: ParamEntry) -> None:
        if not member.numel:  # not sent; the gradient becomes an empty tensor if any rank used the parameter
            self._local_of(member)
            return
        if self._bucket and self._message_dtype(member) is not self._message_dtype(self._bucket[0]):
            self._close_bucket()  # all values of a message have one dtype
        self._bucket.append(member)
        self._bucket_numel += member.numel
        # The last bucket has the usage flags. _end() closes this bucket after all parameters are in buckets.
        if self._closes(member) and member is not self._order.travelling[-1]:
            self._close_bucket()

    def _close_bucket(self, is_last: bool = False) -> None:
        members, self._bucket, self._bucket_numel = self._bucket, [], 0
        self._submit(self._gradients_of(members), is_last)

    def _end(self) -> Future[Optional[Tensor]]:
        if self._bucket:
            self._close_bucket(is_last=True)
        self._committed = self._context.worker.submit(self._commit)
        return self._committed

    def _message_dtype(self, member: ParamEntry) -> torch.dtype:
        """Return the dtype to which all gradients of a bucket are converted."""
        return member.parameter.dtype

    @abstractmethod
    def _closes(self, member: ParamEntry) -> bool:
        """Return whether the current bucket ends with ``member``."""

    @abstractmethod
    def _submit(self, bucket: Sequence[LocalGradient], is_last: bool) -> None:
        """Queue a bucket for the worker. The message of the last bucket also has the usage flags."""

    @abstractmethod
    def _commit(self) -> Optional[Tensor]:
        """Finish after all buckets, on the worker. Return whether any rank used each parameter, in order."""

    def _is_used(self, member: ParamEntry) -> bool:
        return member in self._used and member.parameter.grad is not None

    def _gradients_of(self, members: Sequence[ParamEntry]) -> list[LocalGradient]:
        return [self._local_of(each) for each in members]

    def _local_of(self, member: ParamEntry) -> LocalGradient:
        is_used = self._is_used(member)
        return LocalGradient(member.name, (self._flat_grad if is_used else self._zeros_for)(member.parameter), is_used)

    def _zeros_for(self, parameter: Tensor) -> Tensor:
        zeros = self._missing[parameter] = torch.zeros_like(parameter)
        return flatten_as(shard_of(parameter, zeros) if self._context.is_sharded else zeros)

    def _flat_grad(self, parameter: Tensor) -> Tensor:
        gradient = self._held_gradient(parameter)
        if not self._context.is_sharded and (not has_layout_of(gradient, parameter) or _shares_memory(parameter)):
            copy = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
            self._copied.append(([gradient], [copy]))
            gradient = copy
        return flatten_as(gradient)

    def _held_gradient(self, parameter: Tensor) -> Tensor:
        gradient = parameter.grad
        assert gradient is not None
        if self._context.is_sharded:
            return shard_of(parameter, gradient).view_as(local_tensor(parameter))
        return gradient.detach() if gradient.requires_grad else gradient  # true after create_graph=True

    def _flags(self) -> Tensor:
        all_used = self._order.all_used
        if not self._missing:
            return all_used
        flags = torch.tensor([each.parameter not in self._missing for each in self._order.members], dtype=torch.uint8)
        # non_blocking is safe, because a copy from unpinned memory returns only after the read of the source.
        return flags.to(all_used.device, non_blocking=True)

    def _unused_anywhere(self, used: Optional[Tensor]) -> set[Tensor]:
        """Return the parameters that no rank has used. Synchronizes with a GPU if this rank has an unused parameter."""
        if not self._missing or used is None:
            return set()
        return {each.parameter for each, is_used in zip(self._order.members, used.tolist()) if not is_used}


class SparseBackward(Backward):
    """Average gradients by sending the elements that a compressor selects. Other elements become residuals."""

    def __init__(self, route: ReducerContext, order: ParamOrder, used: Set[ParamEntry]) -> None:
        super().__init__(route, order, used)
        if route.pipeline.recorder.current.backward_start is None:  # No hook has recorded the start.
            route.pipeline.recorder.begin_backward()
        self._known = dict(route.packages)
        route.packages.clear()
        self._exchanged: list[BucketResult] = []
        if route.overlaps_backward and route.pipeline.memory.corrects_adam:
            route.worker.submit(route.pipeline.refresh)

    @override
    def _message_dtype(self, member: ParamEntry) -> torch.dtype:
        return widened(member.parameter.dtype)

    @override
    def _closes(self, member: ParamEntry) -> bool:
        # Without overlap, all gradients form one bucket. Exception: if a compressor selects across each bucket (OMGS),
        # the selection depends on the buckets. The schedule then forms the same buckets with and without overlap.
        # Clipping needs the norm of all gradients, and therefore a single bucket in any case.
        context, pipeline = self._context, self._context.pipeline
        has_buckets = context.overlaps_backward or pipeline.compressor.selects_across_bucket
        has_buckets = has_buckets and not pipeline.memory.clips_gradients
        return has_buckets and context.schedule.closes_bucket(member.name, self._bucket_numel)

    @override
    def _submit(self, bucket: Sequence[LocalGradient], is_last: bool) -> None:
        self._context.worker.submit(partial(self._exchange, bucket, is_last))

    def _exchange(self, bucket: Sequence[LocalGradient], is_last: bool) -> None:
        if not (self._context.overlaps_backward or self._exchanged):
            self._context.pipeline.refresh()
        self._exchanged += self._context.pipeline.exchange(bucket, self._flags() if is_last else None)

    @override
    def _gradients_of(self, members: Sequence[ParamEntry]) -> list[LocalGradient]:
        # The format "reduce" copies gradients into a flat tensor. A package would be a second copy.
        packs = self._context.pipeline.compressor.wire_format != "reduce"
        small = [each for each in members if each.numel < _SMALL and self._is_used(each)] if packs else []
        if len(small) < 2 or len({each.parameter.dtype for each in small}) > 1:
            return super()._gradients_of(members)
        sources = [laid_as(self._held_gradient(each.parameter), each.parameter) for each in small]
        names = tuple([each.name for each in small])
        package = self._context.packages[names] = self._known.get(names) or Package.of(small, sources[0])
        self._copied.append((sources, package.views))
        self._context.worker.submit(partial(torch._foreach_copy_, package.views, sources))
        return [package.gradients.get(each.name) or self._local_of(each) for each in members]

    @override
    def _end(self) -> Future[Optional[Tensor]]:
        recorder = self._context.pipeline.recorder
        recorder.current.backward_end = recorder.clock.mark()
        # The time of a missing gradient is the end of backward.
        end = recorder.mark_gradient()
        recorder.current.ready = {each.name: self.marks.get(each, end) for each in self._order.travelling}
        return super()._end()

    @override
    def _commit(self) -> Optional[Tensor]:
        pipeline, exchanged = self._context.pipeline, self._exchanged
        pipeline.commit(exchanged, self._order.places)
        pipeline.close_record()
        return exchanged[-1][1].used if exchanged else None


class DenseBackward(Backward):
    """Average complete gradients by all-reduces, as DDP does. Residuals do not change."""

    _bytes = _FIRST_DENSE_BYTES
    _used_by_any: Optional[Tensor] = None  # usage flags in the last message

    @override
    def _closes(self, member: ParamEntry) -> bool:
        return self._bucket_numel * member.parameter.dtype.itemsize >= self._bytes

    @override
    def _zeros_for(self, parameter: Tensor) -> Tensor:
        flat = super()._zeros_for(parameter)
        if parameter.grad is not None:  # The gradient may hold a mean of an earlier exchange of this step.
            self._missing[parameter].copy_(parameter.grad.detach())
        return flat

    @override
    def _submit(self, bucket: Sequence[LocalGradient], is_last: bool) -> None:
        self._context.worker.submit(partial(self._average, [local.gradient for local in bucket], is_last))
        self._bytes = min(2 * self._bytes, _DENSE_BYTES)

    def _average(self, gradients: Sequence[Tensor], is_last: bool) -> None:
        """Average flat gradients and usage flags in one all-reduce, and write the means to the gradients."""
        among, flags = self._context.among, self._flags() if is_last else None
        numels = [*map(Tensor.numel, gradients), 0 if flags is None else len(flags)]
        flat = gradients[0].new_empty(sum(numels), dtype=self._context.dense_dtype_of(gradients[0].dtype))
        *means, used = flat.split(numels)
        for mean, gradient in zip(means, gradients):
            torch.mul(gradient, 1 / among.world_size, out=mean)
        if flags is not None:
            used.copy_(flags)
        with among.translate_errors(f"{len(flat)} elements of gradients", "all_reduce"):
            among.all_reduce(flat)
        torch._foreach_copy_(list(gradients), means)
        if flags is not None:
            self._used_by_any = used > 0

    @override
    def _commit(self) -> Optional[Tensor]:
        return self._used_by_any


def _shares_memory(parameter: Tensor) -> bool:
    """Return whether ``parameter.grad`` may share memory with another tensor, as the gradients of ``a + b`` do."""
    assert parameter.grad is not None
    storage = parameter.grad.untyped_storage()
    return storage.nbytes() == parameter.grad.nbytes and torch._C._storage_Use_Count(storage._cdata) > _OWN_USES
