"""The contract with DDP, and its pitfalls. The only file that knows what a bucket is.

This module must not postpone its annotations: DDP checks the hook's second argument, by name and by real type.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # public, but not in its __all__
from torch.futures import Future
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_sparse.engine.collectives import Uncopied
from lightning_sparse.engine.memory.residual import widened
from lightning_sparse.engine.step.step import Exchanged, LocalGradient, Pipeline
from lightning_sparse.engine.step.worker import ExchangeWorker
from lightning_sparse.functional.elements import laid_flat
from lightning_sparse.schedule import Schedule

# A bucket costs a call, a future and an event, some 15 microseconds of a CPU, so small parameters share one. They wait
# for each other only as long as backward takes for so few elements, or for so small a part of the model.
_LARGEST_BUCKET_MB = 1.0
_BUCKETS = 16
_BYTES_OF_MB = 1 << 20
_LATER = torch.autograd.Variable._execution_engine.queue_callback  # to the end of the backward that is going on


def bucket_cap_mb(module: torch.nn.Module) -> float:
    """Return the ``bucket_cap_mb`` with which DDP hands gradients over soon after they become ready, in few calls.

    It is 1 MiB, or a 16th of what is trained where that is less; a larger parameter gets a bucket of its own, or closes
    that of those before it.

    Args:
        module: to be wrapped.

    Example::

        >>> bucket_cap_mb(torch.nn.Linear(1024, 1024, bias=False))
        0.25
    """
    trained = (parameter for parameter in module.parameters() if parameter.requires_grad)
    nbytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    return max(1, min(_LARGEST_BUCKET_MB * _BYTES_OF_MB, nbytes / _BUCKETS)) / _BYTES_OF_MB


class ArrivedGradients:
    """Tell apart what exchanges have brought of a gradient, the same on all ranks, and what this rank has added since.

    A step of several backwards has several exchanges: each is given only what was added after the one before.
    """

    def __init__(self) -> None:
        self.is_watched = False
        self.continues_step = False  # whether what is being exchanged was before, in the same step; alike on all ranks
        self.begun: set[Tensor] = set()  # parameters exchanged since their step, whatever became of their gradients
        self._received: list[Tensor] = []  # parameters that are being exchanged
        self._written: dict[Tensor, Tensor] = {}  # gradients that are means, as nothing has been added since
        self._copies: dict[Tensor, Tensor] = {}  # of means to which something has been added
        self._handles: list[Any] = []

    def watch(self, parameters: Iterable[Parameter]) -> None:
        """Watch what backward adds to."""
        self.is_watched = True
        trained = (parameter for parameter in parameters if parameter.requires_grad)
        self._handles = [parameter.register_hook(partial(self._keep, parameter)) for parameter in trained]

    def unwatch(self) -> None:
        """Watch no more; means stay known, also when gradients lie in the memory of a new wrapper."""
        self.is_watched = False
        for parameter in list(self._written):
            self._keep(parameter)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _keep(self, parameter: Tensor, *addend: Tensor) -> None:
        """Copy the mean in a gradient that backward is about to add to."""
        gradient = self._written.pop(parameter, None)
        if parameter.grad is None:
            self._copies.pop(parameter, None)
        elif gradient is not None:  # which DDP may have moved since, and somebody replaced
            self._copies[parameter] = gradient.detach().clone()

    def state(self) -> dict[Tensor, Tensor]:
        """Return the means that have arrived, by parameter (not copied)."""
        known = {**self._copies, **self._written}
        return {parameter: arrived for parameter, arrived in known.items() if parameter.grad is not None}

    def restore(self, arrived: Mapping[Parameter, Tensor], begun: Iterable[Tensor]) -> None:
        """Go on from what :meth:`state` returned, and from ``begun``."""
        self._written.clear()
        self.begun = set(begun)
        self._copies = {parameter: tensor.clone() for parameter, tensor in arrived.items()}

    def take(self, parameters: Sequence[Tensor], gradients: Iterable[Tensor]) -> list[tuple[Tensor, Optional[Tensor]]]:
        """Return gradients, flat, that hold a mean, each with it (``None`` for nothing else), and forget the means."""
        if not self.is_watched:
            return []
        self._received += parameters
        self.continues_step = self.continues_step or not self.begun.isdisjoint(parameters)
        found: list[tuple[Tensor, Optional[Tensor]]] = []
        for parameter, gradient in zip(parameters, gradients) if self._written or self._copies else ():
            written, copy = self._written.pop(parameter, None), self._copies.pop(parameter, None)
            if written is not None and parameter.grad is written:
                found.append((gradient, None))
            elif copy is not None and parameter.grad is not None:
                found.append((gradient, laid_flat(copy, parameter)))
        return found

    def note(self) -> None:
        """Take the gradients that have been exchanged for means."""
        received, self._received = self._received, []
        self.begun.update(received)
        self._written.update((each, each.grad) for each in received if each.grad is not None)

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


class Stream(Uncopied):
    """Where gradients come from; this is for rounds of local steps, which exchange none."""

    used: Optional[set[Parameter]] = None  # that have taken part since the last exchange, where that is tracked

    def close(self) -> None:
        """Take back what was registered on the parameters."""


class GradientStream(Stream):
    """Take gradients from DDP as they become ready, and hand them to the exchange worker in groups.

    Buckets change after the first step: everything is keyed by parameter name. Where ``overlaps_backward`` is false,
    groups come after all that backward itself exchanges, in one order on all ranks.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        pipeline: Pipeline,
        schedule: Schedule,
        worker: ExchangeWorker,
        overlaps_backward: bool,
        begin: Callable[[], None],
        arrived: ArrivedGradients,
    ) -> None:
        self._pipeline = pipeline
        self._schedule = schedule
        self._worker = worker
        self._recorder = pipeline.recorder
        self._overlaps_backward = overlaps_backward
        self._begin = begin
        self._arrived = arrived
        self._taken: list[tuple[Tensor, Tensor]] = []  # out of gradients, until they have been exchanged
        self._names = {parameter: name for name, parameter in ddp.module.named_parameters()}
        self._is_static = ddp.static_graph
        ignored = ddp.parameters_to_ignore
        self._awaited: int = sum(each.requires_grad and name not in ignored for each, name in self._names.items())
        self._positions = {name: position for position, name in enumerate(self._names.values())}
        self._handles: list[Any] = []
        if ddp.find_unused_parameters or ddp.static_graph:
            # DDP gives the hook zeros for the others, without saying so.
            self.used = used = set[Parameter]()
            trained = (each for each in self._names if each.requires_grad)
            self._handles = [each.register_post_accumulate_grad_hook(used.add) for each in trained]
        device = next(iter(self._names)).device
        self._future_devices = None if device.type == "cpu" else [device]
        self._group: list[LocalGradient] = []
        self._group_numel = 0
        self._held: list[list[LocalGradient]] = []
        self._held_sparse: list[Callable[[], None]] = []
        self._exchanged: list[Exchanged] = []
        self._futures: list[tuple[Future[Tensor], Tensor]] = []
        self._known: dict[int, _KnownBucket] = {}
        self._keeps_buckets = False
        ddp.register_comm_hook(self, exchange_hook)

    @override
    def close(self) -> None:
        self._arrived.unwatch()
        for handle in self._handles:
            handle.remove()

    def receive(self, bucket: GradBucket) -> Future[Tensor]:
        """Take a bucket; its future ends when it holds the mean, or an exchange failed, which the loop then raises."""
        if not self._futures:
            self._begin()
        buffer = bucket.buffer()
        future: Future[Tensor] = Future(devices=self._future_devices)
        self._futures.append((future, buffer))
        if buffer.layout is torch.sparse_coo:
            self._submit_sparse_layout(bucket, buffer)
        else:
            self._collect(bucket, buffer)
        if self._is_last(bucket):
            self._end_backward()
        return future

    def _is_last(self, bucket: GradBucket) -> bool:
        if self._keeps_buckets or not self._is_static:
            return bucket.is_last()
        # Each bucket of a static graph's first step says that it is the first: dtypes and layouts have one each.
        self._awaited -= len(bucket.parameters())
        return self._awaited == 0

    def _collect(self, bucket: GradBucket, buffer: Tensor) -> None:
        if self._group and widened(buffer.dtype) != widened(self._group[0].gradient.dtype):
            self._submit_group()  # a message has values of one type
        gradients = self._gradients_of(bucket, buffer)
        self._recorder.add_ready([local.name for local in gradients])
        self._worker.follow()  # a graph that was kept from before may write buckets of one group on several streams
        found = self._arrived.take(self._known[bucket.index()].parameters, (local.gradient for local in gradients))
        if found:
            self._worker.submit(partial(self._take_out, found))
        # Of a parameter that backward left out, the bucket may still hold what an optimizer stepped with before.
        spent = [local.gradient for local in gradients if local.is_used is False]
        if spent:
            self._worker.submit(partial(torch._foreach_zero_, spent))
        for local in gradients:
            self._group.append(local)
            self._group_numel += local.gradient.numel()
            if self._schedule.closes_group(local.name, self._group_numel):
                self._submit_group()

    def _take_out(self, found: Sequence[tuple[Tensor, Optional[Tensor]]]) -> None:
        pairs = [(gradient, gradient.clone() if arrived is None else arrived) for gradient, arrived in found]
        # What is not finite does not become zero, so that the exchange hears of it.
        torch._foreach_sub_([gradient for gradient, _ in pairs], [arrived for _, arrived in pairs])
        self._taken += pairs

    def _gradients_of(self, bucket: GradBucket, buffer: Tensor) -> list[LocalGradient]:
        known = self._known.get(bucket.index())
        if known is None or known.buffer is not buffer:
            known = self._known[bucket.index()] = self._read(bucket, buffer)
        if (used := self.used) is None:
            return known.gradients
        pairs = zip(known.gradients, known.parameters)
        return [local._replace(is_used=parameter in used) for local, parameter in pairs]

    def _read(self, bucket: GradBucket, buffer: Tensor) -> "_KnownBucket":
        numels = [parameter.numel() for parameter in bucket.parameters()]
        pieces = (buffer,) if len(numels) == 1 else buffer.split(numels)
        parameters = [parameter for parameter, numel in zip(bucket.parameters(), numels) if numel]
        pieces = [piece for piece in pieces if piece.numel()]
        gradients = [LocalGradient(self._names[parameter], piece, None) for parameter, piece in zip(parameters, pieces)]
        return _KnownBucket(buffer, parameters, gradients)

    def _submit_group(self) -> None:
        group, self._group, self._group_numel = self._group, [], 0
        if group and (self._pipeline.memory.clips_gradients or not self._overlaps_backward):
            self._held.append(group)
        elif group:
            self._submit_exchange(group)

    def _submit_exchange(self, group: list[LocalGradient]) -> None:
        exchanged, ready = self._exchanged, self._recorder.current.marks.ready[group[-1].name]
        self._worker.submit(lambda: exchanged.extend(self._pipeline.exchange(group, ready)))

    def _release_held(self) -> None:
        held, self._held = self._held, []
        if held and self._pipeline.memory.clips_gradients:
            step = sorted((local for group in held for local in group), key=lambda local: self._positions[local.name])
            self._worker.submit(lambda: self._pipeline.measure_norms(step))
        for group in held:
            self._submit_exchange(group)
        held_sparse, self._held_sparse = self._held_sparse, []
        for task in held_sparse:
            self._worker.submit(task)

    def _submit_sparse_layout(self, bucket: GradBucket, buffer: Tensor) -> None:
        self._submit_group()
        name = self._names[bucket.parameters()[0]]
        reduce = partial(self._pipeline.reduce_sparse_layout, name, buffer)
        if self._overlaps_backward:
            self._worker.submit(reduce)
        else:
            self._held_sparse.append(reduce)

    def _end_backward(self) -> None:
        self._submit_group()
        self._recorder.end_backward()
        if self._arrived.is_watched:
            # Two callbacks later: in the next one DDP gives gradients back.
            _LATER(lambda: _LATER(self._note_arrived))
        # The first step of a static graph hands over all buckets when backward, with all that it exchanges, is over.
        if self._overlaps_backward or (self._is_static and not self._keeps_buckets):
            self._submit_commit()
        else:
            # Before that DDP reduces which parameters were used; it waits for the futures in a callback after this one.
            _LATER(self._submit_commit)

    def _note_arrived(self) -> None:
        self._arrived.note()
        self._taken.clear()  # only now: the caller's stream has waited for that on which it was added

    def _submit_commit(self) -> None:
        self._release_held()
        exchanged, self._exchanged = self._exchanged, []
        futures, self._futures = self._futures, []
        continues_step, self._arrived.continues_step = self._arrived.continues_step, False
        if self.used is not None:
            self.used.clear()
        if not self._keeps_buckets:
            self._keeps_buckets = True
            self._known.clear()  # or the memory of the buckets that DDP now replaces would stay with us

        def commit() -> None:
            if continues_step and exchanged:
                self._pipeline.check_arrived([arrived for _, arrived in self._taken], exchanged[0].names)
            self._pipeline.commit(exchanged)
            self._pipeline.close_step()
            if self._taken:
                torch._foreach_add_([gradient for gradient, _ in self._taken], [arrived for _, arrived in self._taken])

        def complete() -> None:
            for future, buffer in futures:
                future.set_result(buffer)

        self._worker.submit(commit, settle=complete)


def exchange_hook(state: GradientStream, bucket: GradBucket) -> Future[torch.Tensor]:
    """Exchange a bucket's gradients; the form in which DDP wants its hook."""
    return state.receive(bucket)


class _KnownBucket(NamedTuple):
    """A bucket's gradients, of parameters that have elements; DDP hands them over again in every step."""

    buffer: Tensor
    parameters: Sequence[Tensor]
    gradients: list[LocalGradient]
