"""The reducer, which collects gradients during backward, and writes means over ranks when backward ends."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any, Optional, Union

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse.engine.collectives import SharedOnCopy, ddp_parameters
from lightning_sparse.engine.observe import shown
from lightning_sparse.engine.step.backward import (
    COLLECTING,
    ENDING,
    FINALIZING,
    Backward,
    DenseBackward,
    ParamEntry,
    ParamOrder,
    ReducerContext,
    SparseBackward,
)
from lightning_sparse.engine.step.topology import UnwrappedModule, named_module
from lightning_sparse.functional.elements import local_tensor

Wrapper = Union[DistributedDataParallel, UnwrappedModule]
graph_number = torch._C._current_graph_task_id  # returns the running backward's number, ascending; -1 if none runs
_LATER = torch.autograd.Variable._execution_engine.queue_callback  # queues a function for the end of backward

SPARSE_LAYOUT = (
    "the gradient of {name!r} has a sparse layout, which this package does not exchange. Set sparse=False in the layer,"
    " because compressed messages omit zeros anyway."
)
_TWICE = (
    "the gradient of {name!r} was ready twice in one backward, or the previous backward ended in an error. If"
    " checkpointed parts of a model share parameters, set torch.utils.checkpoint(..., use_reentrant=False). After an"
    " error in backward, end the training on all ranks, or call sparsify_gradients again."
)
_INSIDE = (
    "torch.utils.checkpoint(..., use_reentrant=True) ran a backward inside another backward, before the outer backward"
    " had a gradient. The exchange began too early. Set use_reentrant=False."
)


class NoOpReducer:
    """No-op replacement for DDP's reducer and logger, so that DDP's buckets take no memory."""

    def _do_nothing(self, *given: Any) -> Any:
        return None

    prepare_for_forward = prepare_for_backward = _rebuild_buckets = _delay_all_reduce = _do_nothing
    set_runtime_stats_and_log = set_error_and_log = _do_nothing


class ReducedGradients:
    """Record of the means in ``p.grad``, for optimizer steps with several backwards that each end with an exchange.

    A later backward adds this rank's gradient to a mean. Before the exchange, :meth:`take_means` removes the mean from
    ``p.grad``. After the exchange, :meth:`add_means` adds the removed mean to the new mean.
    """

    def __init__(self) -> None:
        self.begun: set[Tensor] = set()  # parameters exchanged since their last optimizer step
        self._means: dict[Tensor, Tensor] = {}  # ``p.grad`` to which no backward has added since the exchange
        self._copies: dict[Tensor, Tensor] = {}  # copy of the mean, if a backward may have added to ``p.grad``
        self._taken: dict[Tensor, Tensor] = {}  # means removed from ``p.grad`` while an exchange runs
        self._handles: dict[Tensor, Any] = {}

    def watch(self) -> None:
        """Register a hook on each trained parameter that copies the mean before a backward adds to ``p.grad``."""
        for parameter in self._means.keys() - self._handles.keys():
            if parameter.requires_grad:
                self._handles[parameter] = parameter.register_hook(partial(self._copy, parameter))

    def unwatch(self) -> None:
        """Remove the hooks of :meth:`watch`."""
        while self._handles:
            self._handles.popitem()[1].remove()

    def _copy(self, parameter: Tensor, addend: Tensor) -> None:
        mean = self._means.pop(parameter, None)
        if parameter.grad is None:
            self._copies.pop(parameter, None)
        elif parameter.grad is mean:  # False if a user has replaced the gradient
            self._copies[parameter] = mean.detach().clone()

    @property
    def continued(self) -> set[Tensor]:
        """Parameters for which ``p.grad`` contains the mean of an earlier exchange of this optimizer step."""
        held = {each for each in self._copies if each.grad is not None}
        held |= {each for each, mean in self._means.items() if each.grad is mean}
        return held & self.begun  # an unused parameter may still hold the mean of an earlier step

    def take_means(self, parameters: Sequence[Tensor]) -> Optional[list[Tensor]]:
        """Remove earlier means from each ``p.grad``. Return means of ``parameters``; ``None`` in a first exchange."""
        means, copies, self._taken = self._means, self._copies, {}
        self._means, self._copies = {}, {}
        for parameter, mean in means.items():
            if parameter.grad is mean:
                self._taken[parameter], parameter.grad = mean, None
        for parameter, mean in copies.items():
            if parameter.grad is not None and parameter not in self._taken:  # an infinite mean gives inf - inf = NaN
                self._taken[parameter], parameter.grad = mean, (parameter.grad - mean).detach()
        if self.begun.isdisjoint(parameters):
            return None
        return [local_tensor(self._taken[each]) for each in parameters if each in self._taken]

    def add_means(self, parameters: Iterable[Tensor], unused: Set[Tensor]) -> None:
        """Add removed means to new means, and record the sums. Parameters in ``unused`` count as not exchanged."""
        for parameter, mean in self._taken.items():  # not in place, because several gradients may share memory
            parameter.grad = mean if parameter.grad is None else (mean + parameter.grad).detach()
        self._taken.clear()
        for parameter in parameters:
            if (gradient := parameter.grad) is not None:
                self._means[parameter] = gradient
                if parameter not in unused:
                    self.begun.add(parameter)

    def drop(self, parameters: Iterable[Tensor]) -> None:
        """Drop the records of parameters after an optimizer step of these parameters."""
        for parameter in parameters:
            self.begun.discard(parameter)
            self._means.pop(parameter, None)
            self._copies.pop(parameter, None)

    def clear(self) -> None:
        """Drop all records of means. The next exchange then treats every ``p.grad`` as this rank's own gradient."""
        self.begun.clear()
        self._means.clear()
        self._copies.clear()


class SparseReducer(SharedOnCopy):
    """Collect gradients during backward and average them over ranks, in place of DDP's reducer.

    All ranks exchange gradients in the same order. With a replicated model, the exchange is
    complete when backward ends. With a sharded model, a caller begins the exchange by :meth:`prepare_for_backward`, and
    ends the exchange by :meth:`finalize_backward`. While ``is_dense``, complete gradients are averaged as in DDP.
    """

    def __init__(self, wrapper: Wrapper, context: ReducerContext) -> None:
        self.is_dense = False
        self.is_paused = False  # whether gradients are not exchanged, as in local steps
        self.allow_implicit_backward = True  # whether prepare_for_backward is optional
        self._wrapper = wrapper
        self._context = context
        # Frozen parameters have hooks, too, because a user may unfreeze parameters within a step.
        self._hooked: dict[Tensor, tuple[ParamEntry, Any]] = {}
        self.reduced = ReducedGradients()
        self._used: set[ParamEntry] = set()  # parameters with a gradient since the last exchange
        self._last_graph = -1  # number of the last backward that finalize_backward has ended
        self._model_graph = -1  # number of the backward in which _attend() last ran
        self._backward: Optional[Backward] = None  # the backward in progress
        if isinstance(wrapper, DistributedDataParallel):
            wrapper.reducer = wrapper.logger = NoOpReducer()  # type: ignore[assignment]

    def track(self, trained: Mapping[str, Tensor]) -> None:
        """Exchange the gradients of the parameters in ``trained`` (by name) from the next backward on."""
        self.reduced.unwatch()  # watch() then registers hooks on the new parameters.
        self.reduced.drop(self._hooked.keys() - set(trained.values()))
        named = {each: name for name, each in ddp_parameters(named_module(self._wrapper)).items()}
        for parameter in self._hooked.keys() - named.keys():
            self._hooked.pop(parameter)[1].remove()
        for parameter, name in named.items():
            if parameter not in self._hooked and parameter.is_floating_point():
                member = ParamEntry(name, parameter)
                self._hooked[parameter] = member, register_grad_hook(parameter, partial(self._on_grad_ready, member))
            elif parameter in self._hooked:
                self._hooked[parameter][0].name = name
        members = [self._hooked[parameter][0] for parameter in trained.values() if parameter in named]
        self._context.packages.clear()
        self._order = ParamOrder(members, self._context.among.device)

    def send_dense(self, is_warm_up: bool) -> tuple[int, int]:
        """Set the dtype of dense messages, possibly narrower in Adam's warm-up. Return a step's elements and bytes."""
        self._context = self._context._replace(dense_dtype=self._context.warm_up_dtype if is_warm_up else None)
        dtype_of, members = self._context.dense_dtype_of, self._order.members
        nbytes = sum(each.numel * dtype_of(each.parameter.dtype).itemsize for each in members)
        return sum(each.numel for each in members), nbytes

    @property
    def is_open(self) -> bool:
        """Whether gradients of a backward are collected or exchanged now."""
        return self._backward is not None

    def holds_own(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether a gradient in ``parameters`` was not exchanged; false while paused, or during an exchange."""
        if self.is_paused or self.is_open or not self._used:
            return False
        used = {each.parameter for each in self._order.members if each in self._used}
        return any(each in used and each.grad is not None for each in parameters)

    def close(self) -> None:
        """Remove all hooks."""
        self.reduced.unwatch()
        for _, handle in self._hooked.values():
            handle.remove()

    def prepare_for_backward(self) -> None:
        """Prepare for a backward that the caller ends by :meth:`finalize_backward`."""
        self._record_start()
        self._attend()
        if self._exchanges and not self.is_open:
            self._open(is_announced=True)

    def on_backward_start(self, gradient: Optional[Tensor] = None) -> None:
        """Prepare for the gradients of a backward. A hook on the output of the model, or on the loss, calls this."""
        if self._backward is not None:
            self._finalize_at_end(self._backward)
            return
        if graph_number() != self._model_graph:  # False if another output has called this in the same backward
            self._record_start()
        self._attend()

    @property
    def _exchanges(self) -> bool:
        return bool(self._wrapper.require_backward_grad_sync) and not self.is_paused

    def _record_start(self) -> None:
        if self._exchanges:
            self._context.pipeline.recorder.begin_backward()

    def _attend(self) -> None:
        """Move this reducer's hooks behind users' hooks on each parameter, and copy means before gradients change."""
        self._model_graph = graph_number()
        for parameter, (member, handle) in self._hooked.items():
            if next(reversed(parameter._post_accumulate_grad_hooks or ()), None) != handle.id:
                handle.remove()
                self._hooked[parameter] = member, register_grad_hook(parameter, partial(self._on_grad_ready, member))
        if not self._context.is_sharded:  # FSDP adds to gradients only in exchanged backwards
            self.reduced.watch()

    def _on_grad_ready(self, member: ParamEntry, parameter: Tensor) -> None:
        self._used.add(member)
        if self._backward is None and not self._begins_exchange():
            return
        backward = self._backward or self._open(is_announced=False)
        if member in backward.marks:
            raise RuntimeError(_TWICE.format(name=member.name))
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise ValueError(SPARSE_LAYOUT.format(name=member.name))
        self._finalize_at_end(backward)
        self._context.worker.wait_for_caller()  # with retain_graph, gradients may come from several streams
        backward.take(member)

    def _begins_exchange(self) -> bool:
        """Return whether the first gradient of a backward begins an exchange."""
        if not self._exchanges or self._context.is_sharded:
            return False
        if -1 < graph_number() < self._last_graph:
            raise RuntimeError(_INSIDE)
        return self.allow_implicit_backward or graph_number() == self._model_graph

    def _open(self, is_announced: bool) -> Backward:
        self._context.begin()
        used = set(self._order.members) if self._context.is_sharded else self._used  # FSDP: only p.grad shows the use
        if self.is_dense:
            self._backward = DenseBackward(self._context, self._order, used)
        else:
            means = self.reduced.take_means([each.parameter for each in self._order.members])
            if means is not None:
                self._context.worker.submit(partial(self._context.pipeline.check_alike, means))
            self._backward = SparseBackward(self._context, self._order, used)
        self._backward.is_announced = is_announced or graph_number() == self._model_graph
        return self._backward

    def _finalize_at_end(self, backward: Backward) -> None:
        """Call :meth:`finalize_backward` when this backward ends, except with FSDP, which writes shards later."""
        if backward.phase == COLLECTING and not self._context.is_sharded:
            backward.phase = ENDING
            _LATER(self.finalize_backward)

    def finalize_backward(self) -> None:
        """Exchange all gradients that are not sent yet, and write means. A second call is a no-op."""
        self._last_graph = max(self._last_graph, graph_number())
        backward = self._backward
        if backward is None or backward.phase == FINALIZING:
            return
        backward.phase = FINALIZING
        if not self._order.is_agreed:
            self._order = ParamOrder(self._agreed_order(backward), self._context.among.device, is_agreed=True)
        with shown("exposed"):
            unused = backward.finalize_backward(self._order)
            if isinstance(backward, SparseBackward):
                members = self._order.members
                self.reduced.add_means([each.parameter for each in members], unused)
                if unused:
                    self._context.pipeline.memory.on_unused(each.name for each in members if each.parameter in unused)
        self._used, self._backward = set(), None
        self._context.end()
        if not backward.is_announced:  # The next backward may start without a call of _attend(), too.
            self._attend()

    def _agreed_order(self, backward: Backward) -> list[ParamEntry]:
        """Return rank 0's order of ready gradients, then unused parameters in reverse order of definition."""
        members, among = self._order.members, self._context.among  # members are in order of definition
        backwards = members[::-1]
        if self._context.is_sharded:  # FSDP reduces a module's gradients at once, in no order
            return backwards
        places = {each: place for place, each in enumerate(backward.marks)}  # also parameters that are not exchanged
        order = sorted(backwards, key=lambda each: places.get(each, len(places)))
        numbers = {each: number for number, each in enumerate(members)}
        own = torch.tensor([numbers[each] for each in order]).to(among.device)
        rows = self._context.worker.run(lambda: among.all_gather(own))
        return [members[number] for number in rows[0].tolist()]


def is_in_backward() -> bool:
    """Return whether a backward runs on this thread. True in forwards that activation checkpointing repeats."""
    return graph_number() > -1


def after_closure(act: Callable[[Optimizer], None]) -> Callable[..., Any]:
    """Return an optimizer's step pre-hook that calls ``act`` before the step, or after each call of the closure."""

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


def register_grad_hook(parameter: Tensor, act: Callable[[Tensor], None]) -> Any:
    """Register ``act`` as post-accumulate-grad hook on a trained or frozen parameter. Return the handle."""
    is_trained = parameter.requires_grad
    try:
        return parameter.requires_grad_().register_post_accumulate_grad_hook(act)
    finally:
        parameter.requires_grad_(is_trained)
