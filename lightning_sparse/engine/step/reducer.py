"""The reducer: it takes gradients as backward makes them, and writes means when backward ends."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Optional, Union

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.engine.collectives import SharedOnCopy, ddp_parameters
from lightning_sparse.engine.observe import shown
from lightning_sparse.engine.step.backward import Backward, ParamEntry, ParamOrder, ReducerContext
from lightning_sparse.engine.step.dense import DenseBackward
from lightning_sparse.engine.step.hooks import graph_number, is_in_backward, register_grad_hook
from lightning_sparse.engine.step.sparse import SparseBackward
from lightning_sparse.engine.step.topology import UnwrappedModule, named_module

Wrapper = Union[DistributedDataParallel, UnwrappedModule]
_LATER = torch.autograd.Variable._execution_engine.queue_callback  # to the end of the backward that is going on

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
                self._hooked[parameter] = member, register_grad_hook(parameter, partial(self._on_grad_ready, member))
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
        if graph_number() != self._heard_graph:  # else it has come to another output before
            self._record_start()
            if is_in_backward():  # before it users look for what is not finite, and step
                self._context.reduced.drop_infinities()
        self._attend()

    def _record_start(self) -> None:
        # While dense, the record in progress may be that of a round, which the worker writes.
        if self._exchanges and not self.is_dense:
            self._context.pipeline.recorder.begin_backward()

    def _attend(self) -> None:
        self._heard_graph = graph_number()
        for parameter, (member, handle) in self._hooked.items():
            if next(reversed(parameter._post_accumulate_grad_hooks or ()), None) != handle.id:  # others act before
                handle.remove()
                self._hooked[parameter] = member, register_grad_hook(parameter, partial(self._on_grad_ready, member))
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
        if -1 < graph_number() < self._last_graph:
            raise RuntimeError(_INSIDE)
        is_explicit = self._is_due or graph_number() == self._heard_graph
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
        self._last_graph = max(self._last_graph, graph_number())
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
