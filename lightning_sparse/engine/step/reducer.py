"""The border: gradients are taken as backward makes them, travel in buckets, and are means after each backward."""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sparse.engine.collectives import Communicator, SharedOnCopy, ddp_parameters
from lightning_sparse.engine.memory.residual import LARGE, widened
from lightning_sparse.engine.observe import Timestamp, shown
from lightning_sparse.engine.step.step import BucketResult, LocalGradient, Pipeline
from lightning_sparse.engine.step.topology import UnwrappedModule, named_module, shard_of
from lightning_sparse.engine.step.worker import ExchangeWorker
from lightning_sparse.functional.elements import flatten_as, has_layout_of, laid_as, local_tensor
from lightning_sparse.schedule import Schedule

Wrapper = Union[DistributedDataParallel, UnwrappedModule]
_SMALL = LARGE  # gradients of fewer elements are copied in less time than a call for each takes
_OWN_USES = 2  # of a gradient's memory: the gradient, and who asks
_FIRST_DENSE_BYTES = 1024 * 1024  # of the first message of a dense step, so that the network begins soon; each
_DENSE_BYTES = 25 * 1024 * 1024  # other has twice those of the one before, up to DDP's, so that it stays busy
_LATER = torch.autograd.Variable._execution_engine.queue_callback  # to the end of the backward that is going on
_graph_number = torch._C._current_graph_task_id  # of backwards, one inside another; later ones have larger ones

SPARSE_LAYOUT = (
    "the gradient of {name!r} has a sparse layout, which this package no longer exchanges: give its layer sparse=False"
    " (what is zero costs nothing here)"
)
_TWICE = (
    "the gradient of {name!r} came twice in one backward, or the backward before ended in an error: parameters that"
    " several checkpointed parts of a model share need torch.utils.checkpoint(..., use_reentrant=False)"
)
_INSIDE = (
    "a backward inside another one, of torch.utils.checkpoint(..., use_reentrant=True), came before the other's first"
    " gradient, and was taken for all of it: use use_reentrant=False"
)


_FAILED = (
    "a backward begins, and the one before has ended in an error on this rank, with gradients half exchanged: training"
    " has to end on all ranks, or to go on with a model that is sparsified anew"
)


class NoOpReducer:
    """What stands in the place of DDP's reducer, and of its logger, which holds on to that and so to its buckets.

    DDP broadcasts buffers, and hands no gradient to anybody.
    """

    def _do_nothing(self, *given: Any) -> Any:
        """Expect no gradient, rebuild no bucket, and log nothing: what is measured is of an all-reduce not made."""

    prepare_for_forward = prepare_for_backward = _rebuild_buckets = _delay_all_reduce = _do_nothing
    set_runtime_stats_and_log = set_error_and_log = _do_nothing


def is_in_backward() -> bool:
    """Tell whether this is called from a backward, such as by a checkpoint that goes forward once more."""
    return _graph_number() > -1


def after_closure(act: Callable[[Optimizer], None]) -> Callable[..., Any]:
    """Return a hook before steps that acts as soon as an optimizer's gradients are there: after a closure, if any."""

    def hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_named = "closure" in kwargs
        closure = kwargs["closure"] if is_named else args[1] if len(args) > 1 else None
        if closure is None:
            act(optimizer)
            return None

        def close() -> Any:
            loss = closure()
            act(optimizer)
            return loss

        return (args, {**kwargs, "closure": close}) if is_named else ((args[0], close, *args[2:]), kwargs)

    return hook


class ReducedGradients:
    """Tell apart what exchanges have brought of a gradient, the same on all ranks, and what this rank has added since.

    A step of several backwards has several exchanges: each is given only what was added after the one before.
    """

    def __init__(self) -> None:
        self.begun: set[Tensor] = set()  # parameters exchanged since their step, whatever became of their gradients
        self._written: dict[Tensor, Tensor] = {}  # gradients that are means, as nothing has been added since
        self._copies: dict[Tensor, Tensor] = {}  # of means to which something has been added
        self._handles: dict[Tensor, Any] = {}
        self.optimizer_parameters: Callable[[], Collection[Tensor]] = tuple  # parameters that optimizers train

    def drop_infinities(self) -> None:
        """Set to zero what is no finite number in means that no optimizer will ever set to zero.

        Nobody steps by them. Left there, they would be in all later sums, and no step would be finite any more.
        """
        optimizer_parameters = set(self.optimizer_parameters() if self._written else ())
        for parameter, gradient in self._written.items() if optimizer_parameters else ():
            if parameter not in optimizer_parameters and parameter.grad is gradient:
                local_tensor(gradient).nan_to_num_(0, 0, 0)

    @property
    def has_means(self) -> bool:
        """Whether a gradient holds what an exchange has brought, so that backward would add to it."""
        return bool(self._written or self._copies)

    def watch(self, parameters: Sequence[Tensor]) -> None:
        """Watch what backward adds to, from the next one on; what is frozen for a while is left to a later call."""
        if len(self._handles) == len(parameters):
            return
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._handles:
                self._handles[parameter] = parameter.register_hook(partial(self._keep, parameter))

    def unwatch(self) -> None:
        """Watch no more; means stay known."""
        self.keep()
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def keep(self) -> None:
        """Copy all means, before somebody adds to what they are in."""
        for parameter in list(self._written):
            self._keep(parameter)

    def _keep(self, parameter: Tensor, *addend: Tensor) -> None:
        """Copy the mean in a gradient that backward is about to add to."""
        gradient = self._written.pop(parameter, None)
        if parameter.grad is None:
            self._copies.pop(parameter, None)
        elif gradient is not None and parameter.grad is gradient:  # else somebody has replaced it
            self._copies[parameter] = gradient.detach().clone()

    @property
    def continued(self) -> set[Tensor]:
        """Parameters whose gradients hold a mean of the step; that of what no optimizer has is of any step before."""
        held = {each for each in self._copies if each.grad is not None}
        held |= {each for each, mean in self._written.items() if each.grad is mean}
        return (
            held & optimizer_parameters if held and (optimizer_parameters := set(self.optimizer_parameters())) else held
        )

    def take(self, parameter: Tensor) -> Optional[Tensor]:
        """Return the mean that a gradient holds, ``None`` for none, and forget it."""
        if not self._written and not self._copies:
            return None
        written, copy = self._written.pop(parameter, None), self._copies.pop(parameter, None)
        return None if parameter.grad is None else written if parameter.grad is written else copy

    def note(self, parameters: Iterable[Tensor], unused: Set[Tensor]) -> None:
        """Take gradients for means after an exchange, also of what no rank has used: there is nothing of one rank."""
        for parameter in parameters:
            if (gradient := parameter.grad) is not None:
                self._written[parameter] = gradient
                if parameter not in unused:
                    self.begun.add(parameter)

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """End the step of parameters: what their gradients hold from now on is of the next."""
        for parameter in parameters:
            self.begun.discard(parameter)
            self._written.pop(parameter, None)
            self._copies.pop(parameter, None)

    def clear(self) -> None:
        """Take all gradients for the rank's own."""
        self.begun.clear()
        self._written.clear()
        self._copies.clear()


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


class ReducerContext(NamedTuple):
    """What gradients pass on their way, in every backward."""

    pipeline: Pipeline
    schedule: Schedule
    worker: ExchangeWorker
    reduced: ReducedGradients
    among: Communicator  # the ranks that average what is dense, and agree on the order of gradients
    overlaps_backward: bool  # else buckets go when backward has ended
    is_sharded: bool
    packages: dict[tuple[str, ...], "_Package"]  # memory of the backward before, by the names in it
    dense_dtype: Optional[torch.dtype] = None  # what is dense travels in it if it is wider; ``None``: as it is

    def dense_dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type in which a dense gradient of a type travels."""
        narrow = self.dense_dtype
        return dtype if narrow is None or narrow.itemsize >= dtype.itemsize else narrow


class _Missing(NamedTuple):
    """A parameter that this rank has not used."""

    parameter: Tensor
    gradient: Tensor  # what goes in the place of its gradient, and then the mean
    arrived: Optional[Tensor]  # that its gradient holds


class _Package(NamedTuple):
    """Memory in which small gradients lie side by side: many calls become few."""

    gradients: Mapping[str, LocalGradient]  # flat, by name
    views: list[Tensor]  # of the same, with the shapes and strides of parameters

    @classmethod
    def of(cls, members: Sequence[ParamEntry], like: Tensor) -> "_Package":
        """Take memory of the type and the device of a gradient."""
        flats = like.new_empty(sum(each.numel for each in members)).split([each.numel for each in members])
        # A parameter may leave gaps in its memory, which its gradient does not.
        forms = [torch.empty_like(local_tensor(each.parameter), device="meta") for each in members]
        return cls(
            {each.name: LocalGradient(each.name, flat, True) for each, flat in zip(members, flats)},
            [flat.as_strided(form.shape, form.stride(), flat.storage_offset()) for flat, form in zip(flats, forms)],
        )


class Backward(ABC):
    """What is exchanged of one backward, from its first gradient until all are means; then it is dropped.

    All ranks hand over all parameters in one order. A bucket goes when it, and all before it, are complete; what is
    missing in the end goes as zeros. The last message tells which parameters each rank has used: where none has,
    gradient and residual stay. ``used`` are those that this rank has, also in backwards before that exchanged nothing.
    """

    def __init__(self, route: ReducerContext, order: ParamOrder, used: Set[ParamEntry]) -> None:
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
        for parameter, gradient, arrived in self._missing:
            if parameter not in unused:
                parameter.grad = gradient if arrived is None else gradient.add_(arrived)

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

    def _zeros_for(self, parameter: Tensor, arrived: Optional[Tensor] = None) -> Tensor:
        """Return zeros for a parameter that was not used."""
        zeros = torch.zeros_like(parameter)
        self._missing.append(_Missing(parameter, zeros, arrived))
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


class _Message(NamedTuple):
    """Means of a dense step on their way."""

    wait: Callable[[], None]
    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]  # theirs, flat
    means: Sequence[Tensor]
    used: Tensor  # by how many ranks each was, if it is the last

    def write(self) -> None:
        """Have means that have arrived take the place of gradients, or on a device be written into them."""
        self.wait()
        copies, sources = list[Tensor](), list[Tensor]()
        for parameter, gradient, mean in zip(self.parameters, self.gradients, self.means):
            # On a device the memory is of the worker's stream, which would give it out again while others read it.
            if mean.dtype is gradient.dtype and _is_replaceable(gradient, parameter):
                parameter.grad = mean.view_as(parameter).data  # with a count of changes of its own
            else:
                copies.append(gradient)
                sources.append(mean)
        if copies:
            torch._foreach_copy_(copies, sources)


class DenseBackward(Backward):
    """All of each gradient is averaged, as by DDP, in one all-reduce each message, and nothing is kept."""

    _bytes = _FIRST_DENSE_BYTES
    _message: Optional[_Message] = None  # on its way

    def close(self) -> None:
        """End the message that is on its way, on the worker: no process group is given back with one."""
        if self._message is not None:
            with suppress(RuntimeError):  # other ranks may have left, and why is known
                self._message.wait()

    @override
    def _closes(self, member: ParamEntry) -> bool:
        return self._bucket_numel * member.parameter.dtype.itemsize >= self._bytes

    @override
    def _zeros_for(self, parameter: Tensor, arrived: Optional[Tensor] = None) -> Tensor:
        flat = super()._zeros_for(parameter)
        if parameter.grad is not None:  # others may have added to the same
            self._missing[-1].gradient.copy_(parameter.grad.detach())
        return flat

    @override
    def _submit(self, members: Sequence[ParamEntry], bucket: Sequence[LocalGradient], flags: Optional[Tensor]) -> None:
        gradients = [local.gradient for local in bucket]
        self._context.worker.submit(partial(self._average, [each.parameter for each in members], gradients, flags))
        self._bytes = min(2 * self._bytes, _DENSE_BYTES)

    def _average(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], flags: Optional[Tensor]) -> None:
        """Begin to average flat gradients of one type, with the flags of what was used, and end the message before.

        On the worker: the network is busy with one message while the next is gathered.
        """
        among = self._context.among
        numels = [*map(Tensor.numel, gradients), 0 if flags is None else len(flags)]
        flat = gradients[0].new_empty(sum(numels), dtype=self._context.dense_dtype_of(gradients[0].dtype))
        *means, rest = flat.split(numels)
        small = [pair for pair in zip(means, gradients) if pair[1].numel() < _SMALL]
        if small:
            copies, sources = map(list, zip(*small))
            torch._foreach_copy_(copies, sources)
            torch._foreach_mul_(copies, 1 / among.world_size)
        for mean, gradient in zip(means, gradients):
            if gradient.numel() >= _SMALL:  # in one pass over its memory
                torch.mul(gradient, 1 / among.world_size, out=mean)
        if flags is not None:
            rest.copy_(flags)
        before = self._message
        self._message = _Message(among.begin_all_reduce(flat), parameters, gradients, means, rest)
        if before is not None:
            before.write()

    @override
    def _commit(self) -> None:
        if self._message is not None:  # else nothing is trained
            self._message.write()
            self._used_by_any = self._message.used > 0
            self._message = None


class SparseBackward(Backward):
    """What a compressor selects of each bucket is sent, and what is not sent is kept by commit."""

    def __init__(self, route: ReducerContext, order: ParamOrder, used: Set[ParamEntry]) -> None:
        super().__init__(route, order, used)
        self._known = dict(route.packages)
        route.packages.clear()
        self._packed: list[tuple[list[Tensor], list[Tensor]]] = []  # gradients, and copies to be copied back
        # Groups that wait until the norm of all is known.
        self._held: list[tuple[Sequence[ParamEntry], Sequence[LocalGradient], Optional[Tensor]]] = []
        overlaps = route.overlaps_backward and not route.pipeline.memory.clips_gradients
        self._has_buckets = overlaps or route.pipeline.compressor.selects_across_bucket
        self._exchanged: list[BucketResult] = []
        self._means: list[Tensor] = []  # that have arrived before in the same step, the same on all ranks
        self._reduced: list[tuple[Tensor, Tensor]] = []  # gradients, and those means, which were taken out of them
        self._continues_step = False
        if route.overlaps_backward and route.pipeline.memory.corrects_adam:
            route.worker.submit(route.pipeline.refresh)

    @override
    def _goes_with(self, dtype: torch.dtype) -> bool:
        return widened(dtype) is widened(self._bucket[0].parameter.dtype)

    @override
    def _closes(self, member: ParamEntry) -> bool:
        # What has to wait for backward's end goes in one message, as the worker makes one exchange after the other; but
        # where parameters of a bucket compete, what waits for what changes no number.
        return self._has_buckets and self._context.schedule.closes_bucket(member.name, self._bucket_numel)

    @override
    def _submit(self, members: Sequence[ParamEntry], bucket: Sequence[LocalGradient], flags: Optional[Tensor]) -> None:
        pipeline, worker = self._context.pipeline, self._context.worker
        self._held.append((members, bucket, flags))
        if pipeline.memory.clips_gradients:
            if flags is None:
                return
            pairs = [pair for members, bucket, _ in self._held for pair in zip(members, bucket)]
            together = [local for _, local in sorted(pairs, key=lambda pair: pair[0].position)]
            worker.submit(partial(pipeline.measure_norms, together))
        for _, bucket, flags in self._held:
            worker.submit(partial(self._exchange, bucket, flags))
        self._held = []

    def _exchange(self, bucket: Sequence[LocalGradient], flags: Optional[Tensor]) -> None:
        self._exchanged += self._context.pipeline.exchange(bucket, flags)

    @override
    def _gradients_of(self, members: Sequence[ParamEntry]) -> list[LocalGradient]:
        """Return the gradients of a bucket; small ones are copied side by side first, and their means back."""
        # Where the format is "reduce" each message is one flat tensor anyway.
        packs = self._context.pipeline.compressor.wire_format != "reduce" and not self._context.reduced.has_means
        small = [each for each in members if each.numel < _SMALL and self._is_used(each)] if packs else []
        if len(small) < 2 or len({each.parameter.dtype for each in small}) > 1:
            return super()._gradients_of(members)
        sources = [laid_as(self._held_gradient(each.parameter), each.parameter) for each in small]
        names = tuple([each.name for each in small])
        package = self._context.packages[names] = self._known.get(names) or _Package.of(small, sources[0])
        self._packed.append((sources, package.views))
        self._context.worker.submit(partial(torch._foreach_copy_, package.views, sources))
        return [package.gradients.get(each.name) or self._local_of(each) for each in members]

    @override
    def _local_of(self, member: ParamEntry) -> LocalGradient:
        local, parameter = super()._local_of(member), member.parameter
        # A mean that has arrived before is added to what is in the gradient's memory at the end.
        can_trade = member.numel >= LARGE and not self._means and not self._context.is_sharded
        return (
            local._replace(parameter=parameter) if can_trade and _is_replaceable(local.gradient, parameter) else local
        )

    @override
    def _zeros_for(self, parameter: Tensor, arrived: Optional[Tensor] = None) -> Tensor:
        return super()._zeros_for(parameter, self._mean_in(parameter))

    @override
    def _flat_grad(self, parameter: Tensor) -> Tensor:
        arrived, flat = self._mean_in(parameter), super()._flat_grad(parameter)
        if arrived is not None:
            mean = flatten_as(local_tensor(arrived), local_tensor(parameter))
            self._reduced.append((flat, mean))
            # What is not finite does not become zero, so that the exchange hears of it.
            self._context.worker.submit(partial(torch._foreach_sub_, [flat], [mean]))
        return flat

    def _mean_in(self, parameter: Tensor) -> Optional[Tensor]:
        """Return the mean that a gradient holds since an exchange before in its step."""
        arrived = self._context.reduced.take(parameter)
        if arrived is not None:
            self._means.append(local_tensor(arrived))
        return arrived

    @override
    def _end(self) -> threading.Event:
        recorder, begun = self._context.pipeline.recorder, self._context.reduced.begun
        recorder.end_backward()
        # In the order of all ranks; what is missing is ready when backward ends.
        end = self._mark()
        recorder.current.ready = {each.name: self.marks.get(each, end) for each in self._order.travelling}
        self._continues_step = bool(begun) and any(each.parameter in begun for each in self._order.members)
        return super()._end()

    @override
    def _commit(self) -> None:
        pipeline, exchanged = self._context.pipeline, self._exchanged
        if self._continues_step and exchanged:
            pipeline.check_arrived(self._means)
        pipeline.commit(exchanged, self._order.places)
        for gradients, views in self._packed:
            torch._foreach_copy_(gradients, views)
        pipeline.close_record()
        for gradient, arrived in self._reduced:
            gradient.add_(arrived)
        self._used_by_any = exchanged[-1].result.used if exchanged else None

    @override
    def _write_missing(self, unused: Set[Tensor]) -> None:
        super()._write_missing(unused)
        self._context.reduced.note([each.parameter for each in self._order.members], unused)
        if unused:
            self._context.pipeline.memory.on_unused(
                each.name for each in self._order.members if each.parameter in unused
            )


class SparseReducer(SharedOnCopy):
    """Take gradients as backward makes them, and hand them to the object of their backward.

    All ranks hand over all parameters in one order, whatever each has used: that in which rank 0's first backward made
    them. Shards of a model go from the first one on after :meth:`prepare_for_backward`, and end with
    :meth:`finalize_backward`; all others are exchanged at the end of every backward. While ``is_dense``, all is sent,
    as by DDP, and nothing is kept. ``numel`` is how many elements they have.

    Args:
        begin: called before a backward's first gradient is taken, on the thread of backward, and told whether
            :meth:`prepare_for_backward` was called for it.
        end: called when gradients are means.
    """

    def __init__(
        self,
        wrapper: Wrapper,
        route: ReducerContext,
        begin: Callable[[bool], None],
        end: Callable[[], None],
        is_dense: bool,
    ) -> None:
        self.is_dense = is_dense
        self.is_paused = False  # gradients stay this rank's own, as with local steps
        self.allow_implicit_backward = True  # backwards of which nobody has told exchange theirs
        self._wrapper = wrapper
        self._context = route
        self._begin = begin
        self._end = end
        # With hooks, also of what is frozen: it may be unfrozen within a step.
        self._hooked: dict[Tensor, tuple[ParamEntry, Any]] = {}
        self.numel = 0
        self._used: set[ParamEntry] = set()  # those that backward has reached since the last exchange
        self._is_due = False  # a backward goes on whose gradients are exchanged when it ends, and none has come yet
        self._last_graph = -1  # the backward whose end was seen last
        self._heard_graph = -1  # that whose beginning was
        self._backward: Optional[Backward] = None  # whose gradients have begun to come, and are not means yet
        if isinstance(wrapper, DistributedDataParallel):
            wrapper.reducer = wrapper.logger = NoOpReducer()  # type: ignore[assignment]

    def track(self, trained: Mapping[str, Tensor]) -> None:
        """Take the gradients of these parameters of the model from now on, before any of a backward has come."""
        self._context.reduced.unwatch()  # others are to be watched
        named = {each: name for name, each in ddp_parameters(named_module(self._wrapper)).items()}
        for parameter in self._hooked.keys() - named.keys():
            self._hooked.pop(parameter)[1].remove()
        for parameter, name in named.items():
            if parameter not in self._hooked and parameter.is_floating_point():
                member = ParamEntry(name, parameter)
                self._hooked[parameter] = member, _hook(parameter, partial(self._on_grad_ready, member))
            elif parameter in self._hooked:
                self._hooked[parameter][0].name = name
        self._members = [self._hooked[parameter][0] for parameter in trained.values() if parameter in named]
        for position, each in enumerate(self._members):
            each.position = position
        self.numel = sum(each.numel for each in self._members)
        self._context.packages.clear()
        self._order = ParamOrder((), self._context.among.device)

    @property
    def order(self) -> list[str]:
        """Names of parameters in the order in which all ranks hand them over; none until they have agreed on one."""
        return [each.name for each in self._order.members]

    def restore_order(self, names: Sequence[str]) -> None:
        """Go on in an order that was agreed on, if it is of these parameters: buckets are then what they were."""
        known = {each.name: each for each in self._members}
        if known.keys() == set(names):
            self._order = ParamOrder([known[name] for name in names], self._order.all_used.device)

    def send_dense_in(self, dtype: Optional[torch.dtype]) -> int:
        """Have dense gradients travel in a type from the next backward on, and return the bytes of all of them."""
        self._context = self._context._replace(dense_dtype=dtype)
        return sum(each.numel * self._context.dense_dtype_of(each.parameter.dtype).itemsize for each in self._members)

    @property
    def is_open(self) -> bool:
        """Whether a backward's gradients have begun to come, and are not means yet."""
        return self._backward is not None

    @property
    def used(self) -> set[Tensor]:
        """Parameters that backward has reached since the last exchange."""
        return {each.parameter for each in self._members if each in self._used}

    def holds_own(self, parameters: Iterable[Tensor]) -> bool:
        """Tell whether a gradient of some parameters is this rank's own, and was to be exchanged."""
        used = set() if self.is_paused or self.is_open else self.used  # empty from an exchange to the next backward
        return bool(used) and any(each in used and each.grad is not None for each in parameters)

    def close(self) -> None:
        """Take back what was registered on the parameters, and end what a backward that failed has on its way."""
        if isinstance(self._backward, DenseBackward):
            self._context.worker.submit(self._backward.close, always=True)
        self._context.reduced.unwatch()
        for _, handle in self._hooked.values():
            handle.remove()

    def prepare_for_backward(self) -> None:
        """Know that a backward begins."""
        if self._backward is not None and not is_in_backward():
            raise RuntimeError(_FAILED)
        self._is_due = self._exchanges
        self._record_start()
        self._context.reduced.drop_infinities()
        self._attend()

    @property
    def _exchanges(self) -> bool:
        return bool(self._wrapper.require_backward_grad_sync) and not self.is_paused

    def on_backward_start(self, gradient: Optional[Tensor] = None) -> None:
        """Know of the backward that goes on, before any of its gradients, unless somebody has told of it."""
        if self._is_due:
            return
        if _graph_number() != self._heard_graph:  # else it has come to another output before
            self._record_start()
            if is_in_backward():  # before it users look for what is not finite, and step
                self._context.reduced.drop_infinities()
        self._attend()

    def _record_start(self) -> None:
        # While dense, the record in progress may be that of a round, which the worker writes.
        if self._exchanges and not self.is_dense:
            self._context.pipeline.recorder.begin_backward()

    def _attend(self) -> None:
        self._heard_graph = _graph_number()
        for parameter, (member, handle) in self._hooked.items():
            if next(reversed(parameter._post_accumulate_grad_hooks or ()), None) != handle.id:  # others act before
                handle.remove()
                self._hooked[parameter] = member, _hook(parameter, partial(self._on_grad_ready, member))
        if self._context.is_sharded:  # FSDP adds to gradients without a word to their parameters
            self._context.reduced.keep()
        elif self._context.reduced.has_means:
            self._context.reduced.watch([each.parameter for each in self._members])

    def _on_grad_ready(self, member: ParamEntry, parameter: Tensor) -> None:
        """Take a gradient that backward has added to for the last time."""
        self._used.add(member)
        if (backward := self._backward or self._opened()) is None:
            return
        if member in backward.marks:
            raise RuntimeError(_TWICE.format(name=member.name))
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise ValueError(SPARSE_LAYOUT.format(name=member.name))
        self._context.worker.wait_for_caller()  # a retained graph may write gradients on several streams
        backward.take(member)

    def _opened(self) -> Optional[Backward]:
        """Begin an exchange with a backward's first gradient, unless it stays this rank's own."""
        if not self._exchanges:
            return None
        if self._context.is_sharded:  # whoever tells of a backward tells of its end: FSDP hands shards over until then
            return self._open() if self._is_due and self._context.overlaps_backward else None
        if -1 < _graph_number() < self._last_graph:
            raise RuntimeError(_INSIDE)
        is_explicit = self._is_due or _graph_number() == self._heard_graph
        if not (is_explicit or self.allow_implicit_backward):
            return None
        backward = self._open()
        _LATER(self.finalize_backward if is_explicit else self._finalize_implicit)
        return backward

    def _finalize_implicit(self) -> None:
        """Finish a backward of which nobody has told: of the next one nobody will tell before it adds to gradients."""
        self.finalize_backward()
        self._attend()

    def _open(self) -> Backward:
        """Begin a step's exchange."""
        is_explicit, self._is_due = self._is_due, False
        self._begin(is_explicit)
        used = set(self._members) if self._context.is_sharded else self._used  # FSDP has reduced all of them
        self._backward = (DenseBackward if self.is_dense else SparseBackward)(self._context, self._order, used)
        return self._backward

    def finalize_backward(self) -> None:
        """Exchange what has not been, all ranks together, and have gradients be means."""
        self._last_graph = max(self._last_graph, _graph_number())
        backward = self._backward or (self._open() if self._is_due else None)
        if backward is None:
            return
        if not self._order.members:
            self._order = ParamOrder(self._agreed_order(backward), self._order.all_used.device)
        with shown("exposed"):
            backward.finalize_backward(self._order)
        self._used, self._backward = set(), None
        self._end()

    def _agreed_order(self, backward: Backward) -> list[ParamEntry]:
        """Return rank 0's order of gradients, those that it has not used last, as they are defined from the end."""
        unused = [each for each in reversed(self._members) if each not in backward.marks]
        if self._context.is_sharded:  # those of a module come all at once
            return self._members[::-1]
        route, order = self._context, [*backward.marks, *unused]
        own = torch.tensor([each.position for each in order]).to(route.among.device)
        rows = route.worker.run(lambda: route.among.all_gather(own))
        return [self._members[position] for position in rows[0].tolist()]


def _hook(parameter: Tensor, act: Callable[[Tensor], None]) -> Any:
    """Register what is called when a gradient has been added to, also where it is frozen for now."""
    is_trained = parameter.requires_grad
    try:
        return parameter.requires_grad_().register_post_accumulate_grad_hook(act)
    finally:
        parameter.requires_grad_(is_trained)


def _shares_memory(parameter: Tensor) -> bool:
    """Tell whether others hold all of a gradient's memory, such as the gradient of a parameter that was added to it."""
    assert parameter.grad is not None
    storage = parameter.grad.untyped_storage()
    return storage.nbytes() == parameter.grad.nbytes and torch._C._storage_Use_Count(storage._cdata) > _OWN_USES


def _is_replaceable(flat: Tensor, parameter: Tensor) -> bool:
    """Tell whether a flat tensor is all of a gradient on a CPU that backward has just made, without a graph."""
    gradient = parameter.grad
    if gradient is None or gradient.requires_grad or gradient._version:
        return False
    return flat.device.type == "cpu" and parameter.is_contiguous() and flat.data_ptr() == gradient.data_ptr()
