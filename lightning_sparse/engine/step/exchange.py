"""The border: gradients are taken as backward makes them, travel in groups, and are means when ``finish`` returns."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_sparse.engine.collectives import Collectives, SharedOnCopy, ignored_by
from lightning_sparse.engine.memory.residual import widened
from lightning_sparse.engine.observe import Mark
from lightning_sparse.engine.step.shards import BareModel, ShardedModel, shard_of
from lightning_sparse.engine.step.step import Exchanged, LocalGradient, Pipeline
from lightning_sparse.engine.step.worker import ExchangeWorker
from lightning_sparse.functional.elements import laid_flat, local_tensor
from lightning_sparse.schedule import Schedule

Wrapper = Union[DistributedDataParallel, BareModel]
_SMALL = 1 << 15  # elements of a gradient that is copied in less time than a call for it alone takes
_FIRST_DENSE_BYTES = 1024 * 1024  # of the first message of a dense step, so that the network begins soon; each
_DENSE_BYTES = 25 * 1024 * 1024  # other has twice those of the one before, up to DDP's, so that it stays busy
_LATER = torch.autograd.Variable._execution_engine.queue_callback  # to the end of the backward that is going on
_graph_number = torch._C._current_graph_task_id  # of backwards, one inside another; later ones have larger ones

_TWICE = (
    "the gradient of {name!r} came twice in one backward, or the backward before ended in an error: parameters that"
    " several checkpointed parts of a model share need torch.utils.checkpoint(..., use_reentrant=False)"
)
_INSIDE = (
    "a backward inside another one, of torch.utils.checkpoint(..., use_reentrant=True), came before the other's first"
    " gradient, and was taken for all of it: use use_reentrant=False"
)


class SilentReducer:
    """What stands in the place of DDP's reducer, and of its logger, which holds on to that and so to its buckets.

    DDP broadcasts buffers, and hands no gradient to anybody.
    """

    def prepare_for_forward(self) -> None:
        """Expect nothing."""

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Expect no gradient."""

    def _rebuild_buckets(self) -> bool:
        return False

    def _delay_all_reduce(self) -> None:
        """Do without: a static graph's first step is like any other."""

    def set_runtime_stats_and_log(self) -> None:
        """Log nothing: what is measured is of an all-reduce that is not there."""

    def set_error_and_log(self, message: str) -> None:
        """Leave it to the error that DDP raises with it."""

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        return SimpleNamespace(strs_map={}, ints_map={})  # for Lightning, which looks for advice in it


def is_in_backward() -> bool:
    """Tell whether this is called from a backward, such as by a checkpoint that goes forward once more."""
    return _graph_number() > -1


class ArrivedGradients:
    """Tell apart what exchanges have brought of a gradient, the same on all ranks, and what this rank has added since.

    A step of several backwards has several exchanges: each is given only what was added after the one before.
    """

    def __init__(self) -> None:
        self.begun: set[Tensor] = set()  # parameters exchanged since their step, whatever became of their gradients
        self._written: dict[Tensor, Tensor] = {}  # gradients that are means, as nothing has been added since
        self._copies: dict[Tensor, Tensor] = {}  # of means to which something has been added
        self._handles: dict[Tensor, Any] = {}

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
        for parameter in list(self._written):
            self._keep(parameter)
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _keep(self, parameter: Tensor, *addend: Tensor) -> None:
        """Copy the mean in a gradient that backward is about to add to."""
        gradient = self._written.pop(parameter, None)
        if parameter.grad is None:
            self._copies.pop(parameter, None)
        elif gradient is not None and parameter.grad is gradient:  # else somebody has replaced it
            self._copies[parameter] = gradient.detach().clone()

    def state(self) -> dict[Tensor, Tensor]:
        """Return the means that have arrived, by parameter (not copied)."""
        known = {**self._copies, **self._written}
        return {parameter: arrived for parameter, arrived in known.items() if parameter.grad is not None}

    def restore_means(self, arrived: Mapping[Parameter, Tensor], begun: Iterable[Tensor]) -> None:
        """Go on from what :meth:`state` returned, and from ``begun``."""
        self._written.clear()
        self.begun = set(begun)
        self._copies = {parameter: tensor.clone() for parameter, tensor in arrived.items()}

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


class GradientSource(SharedOnCopy):
    """Where gradients come from; this is for rounds of shards, which exchange none."""

    is_dense = False  # the coming steps send everything, as DDP does, and keep nothing
    is_open = False  # a backward's gradients have begun to come, and are not means yet

    def track(self, module: Module, trained: Mapping[str, Tensor]) -> None:
        """Take the gradients of these parameters of a model from now on, before any of a backward has come."""

    def average_among(self, ranks: Collectives) -> None:
        """Have these ranks average what is dense, and agree on the order of gradients."""

    @property
    def used(self) -> set[Tensor]:
        """Parameters that backward has reached since the last exchange."""
        return set()

    def use(self, parameters: Iterable[Tensor]) -> None:
        """Take parameters for used."""

    def expect(self) -> None:
        """Know that a backward begins."""

    def hear(self, gradient: Optional[Tensor] = None) -> None:
        """Know of the backward that goes on, before any of its gradients."""

    def finish(self) -> None:
        """Exchange what has not been, all ranks together, and have gradients be means."""

    def close(self) -> None:
        """Take back what was registered on the parameters."""


class _Member:
    """A parameter whose gradient is exchanged; as an attribute is read faster than a tensor is looked up."""

    __slots__ = ("is_ready", "is_sparse", "is_used", "mark", "name", "numel", "parameter")

    def __init__(self, name: str, parameter: Tensor, is_sparse: bool) -> None:
        self.name = name
        self.parameter = parameter
        self.is_sparse = is_sparse  # its gradient's layout
        self.numel = local_tensor(parameter).numel()
        self.is_used = False  # backward has reached it since the last exchange
        self.is_ready = False  # in this backward
        self.mark: Optional[Mark] = None  # since when


class _Package(NamedTuple):
    """Memory in which small gradients lie side by side: many calls become few."""

    gradients: Mapping[str, LocalGradient]  # flat, by name
    views: list[Tensor]  # of the same, with the shapes and strides of parameters

    @classmethod
    def of(cls, members: Sequence[_Member], like: Tensor) -> "_Package":
        """Take memory of the type and the device of a gradient."""
        flats = like.new_empty(sum(each.numel for each in members)).split([each.numel for each in members])
        # A parameter may leave gaps in its memory, which its gradient does not.
        forms = [torch.empty_like(local_tensor(each.parameter), device="meta") for each in members]
        return cls(
            {each.name: LocalGradient(each.name, flat, True) for each, flat in zip(members, flats)},
            [flat.as_strided(form.shape, form.stride(), flat.storage_offset()) for flat, form in zip(flats, forms)],
        )


class _Missing(NamedTuple):
    """A parameter that this rank has not used."""

    parameter: Tensor
    gradient: Tensor  # zeros, and then the mean
    arrived: Optional[Tensor]  # that its gradient holds


class Exchange(GradientSource):
    """Take gradients as backward makes them, and hand them to the exchange worker in groups.

    All ranks hand over all parameters in one order, whatever each has used: that in which rank 0's first backward made
    them. A group goes when it, and all before it, are complete; what is missing in the end goes as zeros. The last
    message of a step tells which parameters each rank has used: where none has, gradient and residual stay.

    Without ``overlaps_backward`` groups go when backward has ended. Shards of a model (``wrapper`` is a
    :class:`ShardedModel`) go from the first one on after :meth:`expect`, and end with :meth:`finish`; all others are
    exchanged at the end of every backward. While ``is_dense``, groups are averaged as by DDP, in one all-reduce each.

    Args:
        begin: called before a backward's first gradient is taken, on the thread of backward, and told whether
            :meth:`expect` was called for it.
        end: called when gradients are means.
        among: the ranks that average what is dense, and agree on the order of gradients.
    """

    def __init__(
        self,
        wrapper: Wrapper,
        pipeline: Pipeline,
        schedule: Schedule,
        worker: ExchangeWorker,
        arrived: ArrivedGradients,
        begin: Callable[[bool], None],
        end: Callable[[], None],
        overlaps_backward: bool,
        among: Collectives,
    ) -> None:
        self._wrapper = wrapper
        self._pipeline = pipeline
        self._schedule = schedule
        self._worker = worker
        self._recorder = pipeline.recorder
        self._arrived = arrived
        self._begin = begin
        self._end = end
        self._among = among
        self._overlaps_backward = overlaps_backward
        self._is_sharded = isinstance(wrapper, ShardedModel)
        self._packs = pipeline.compressor.wire_format != "reduce"  # of which each message is one flat tensor anyway
        self._is_due = False  # a backward goes on whose gradients are exchanged when it ends, and none has come yet
        # With hooks, also of what is frozen: it may be unfrozen within a step.
        self._hooked: dict[Tensor, tuple[_Member, Any]] = {}
        self._mark = self._recorder.mark_of_gradients()
        self._last_graph = -1  # the backward whose end was seen last
        self._heard_graph = -1  # that whose beginning was
        self._packages: dict[tuple[str, ...], _Package] = {}  # of this step
        self._known_packages: dict[tuple[str, ...], _Package] = {}
        self._averaging: Any = None  # a message of a dense step that is on its way
        self._reset()
        if isinstance(wrapper, DistributedDataParallel):
            wrapper.reducer = wrapper.logger = SilentReducer()  # type: ignore[assignment]

    @override
    def track(self, module: Module, trained: Mapping[str, Tensor]) -> None:
        self._arrived.unwatch()  # others are to be watched
        self._packages, self._known_packages = {}, {}
        ignored = ignored_by(module)
        sparse = {each.weight for each in module.modules() if _makes_sparse_layout(each)}
        named = {each: name for name, each in module.named_parameters() if name not in ignored}
        for parameter in self._hooked.keys() - named.keys():
            self._hooked.pop(parameter)[1].remove()
        for parameter, name in named.items():
            if parameter not in self._hooked and parameter.is_floating_point():
                member = _Member(name, parameter, parameter in sparse)
                self._hooked[parameter] = member, _hook(parameter, partial(self._ready, member))
            elif parameter in self._hooked:
                self._hooked[parameter][0].name = name
        self._members = [self._hooked[parameter][0] for parameter in trained.values() if parameter in named]
        self._parameters = [each.parameter for each in self._members]
        self._positions = {each.name: position for position, each in enumerate(self._members)}
        self._all_used = torch.ones(len(self._members), dtype=torch.uint8).to(self._pipeline.collectives.device)
        self.average_among(self._among)

    @override
    def average_among(self, ranks: Collectives) -> None:
        self._among = ranks
        self._order: Sequence[_Member] = ()  # on which they agree, after the next backward
        self._travelling: Sequence[_Member] = ()  # those in it of which this rank has anything to send in a group
        self._places: Mapping[str, int] = {}  # in that order
        self._all_used = torch.ones(len(self._members), dtype=torch.uint8).to(self._pipeline.collectives.device)

    def _reset(self) -> None:
        """Forget the backward that has ended."""
        self.is_open = self._goes_dense = False
        self._used_by_any: Optional[Tensor] = None  # of parameters in the agreed order
        self._came: list[_Member] = []  # in the order of backward, until one is agreed
        self._place = 0  # in the order, of the next parameter that is handed over
        self._group: list[_Member] = []
        self._group_numel = 0
        self._dense_bytes = _FIRST_DENSE_BYTES
        self._held: list[list[_Member]] = []
        self._exchanged: list[Exchanged] = []
        self._known_packages, self._packages = self._packages, {}  # a step's memory is that of the step before
        self._packed: list[tuple[list[Tensor], list[Tensor]]] = []  # gradients, and copies to be copied back
        self._missing: list[_Missing] = []
        self._means: list[Tensor] = []  # that have arrived before in the same step, the same on all ranks
        self._taken: list[tuple[Tensor, Tensor]] = []  # gradients, and what was taken out of them for the exchange
        self._copied: list[tuple[Tensor, Tensor]] = []  # gradients, and what is exchanged in the place of their memory
        self._own_flags: Optional[Tensor] = None  # held for as long as a device may read them
        self._committed: Optional[threading.Event] = None

    @property
    @override
    def used(self) -> set[Tensor]:
        return {each.parameter for each in self._members if each.is_used}

    @override
    def use(self, parameters: Iterable[Tensor]) -> None:
        used = set(parameters)
        for each in self._members:
            each.is_used = each.is_used or each.parameter in used

    @override
    def close(self) -> None:
        self._worker.submit(self._end_average)  # of a backward that failed: no group is given back with one on its way
        self._arrived.unwatch()
        for _, handle in self._hooked.values():
            handle.remove()

    @override
    def expect(self) -> None:
        self._is_due = self._wrapper.require_backward_grad_sync
        self.hear()

    @override
    def hear(self, gradient: Optional[Tensor] = None) -> None:
        self._heard_graph = _graph_number()
        if self._arrived.has_means:
            self._arrived.watch(self._parameters)

    def _ready(self, member: _Member, parameter: Tensor) -> None:
        """Take a gradient that backward has added to for the last time."""
        member.is_used = True
        if not (self.is_open or self._opens()):
            return
        if member.is_ready:
            raise RuntimeError(_TWICE.format(name=member.name))
        member.is_ready = True
        member.mark = self._mark()
        self._worker.wait_for_caller()  # a graph that was kept from before may write gradients on several streams
        order = self._order
        if not order:
            self._came.append(member)
        elif self._overlaps_backward and member is order[self._place]:
            while self._place < len(order) and order[self._place].is_ready:
                self._hand_over(order[self._place])
            if self._place == len(order):
                self._end_backward()

    def _opens(self) -> bool:
        """Begin an exchange with a backward's first gradient, unless it stays this rank's own."""
        if not self._wrapper.require_backward_grad_sync:
            return False
        if self._is_sharded:  # whoever tells of a backward tells of its end: FSDP hands shards over until then
            if self._is_due and self._overlaps_backward:
                self._open()
            return self.is_open
        if -1 < _graph_number() < self._last_graph:
            raise RuntimeError(_INSIDE)
        is_told = self._open() or _graph_number() == self._heard_graph
        _LATER(self.finish if is_told else self._finish_untold)
        return True

    def _finish_untold(self) -> None:
        """Finish a backward of which nobody has told: of the next one nobody will tell before it adds to gradients."""
        self.finish()
        if not self._goes_dense:
            self._arrived.watch(self._parameters)

    def _open(self) -> bool:
        """Begin a step's exchange; return whether anybody has told of its backward."""
        is_told, self._is_due = self._is_due, False
        self._begin(is_told)
        self.is_open, self._goes_dense = True, self.is_dense
        self._mark = self._recorder.mark_of_gradients()
        return is_told

    @override
    def finish(self) -> None:
        self._last_graph = max(self._last_graph, _graph_number())
        if not self.is_open and self._is_due:
            self._open()
        if not self.is_open:
            return
        if self._committed is None:
            if not self._order:
                self._order = self._agreed_order()
                self._places = {each.name: place for place, each in enumerate(self._order)}
                self._travelling = [each for each in self._order if each.numel and not each.is_sparse]
            for member in self._order[self._place :]:
                self._hand_over(member)
            self._end_backward()
        assert self._committed is not None
        self._worker.wait(self._committed)
        self._write_missing()
        for member in self._members:
            member.is_used = member.is_ready = False
            member.mark = None
        self._reset()
        self._end()

    def _write_missing(self) -> None:
        """Write means where this rank has no gradient to write them into; nothing where no rank has one."""
        for gradient, copy in self._copied:
            gradient.copy_(copy)
        unused = self._unused_anywhere()
        for parameter, gradient, arrived in self._missing:
            if parameter not in unused:
                parameter.grad = gradient if arrived is None else gradient.add_(arrived)
        if not self._goes_dense:
            self._arrived.note(self._parameters, unused)

    def _agreed_order(self) -> list[_Member]:
        """Return rank 0's order of gradients, those that it has not used last, as they are defined from the end."""
        if self._is_sharded:  # those of a module come all at once, and through some entry points none before the step
            return self._members[::-1]
        order = self._came + [each for each in reversed(self._members) if not each.is_ready]
        own = torch.tensor([self._positions[each.name] for each in order]).to(self._pipeline.collectives.device)
        rows = self._worker.run(lambda: self._among.run("all_gather", own))
        return [self._members[position] for position in rows[0].tolist()]

    def _hand_over(self, member: _Member) -> None:
        """Add a gradient to its group, and the group to what travels if it is complete."""
        self._place += 1
        if member.is_sparse:
            self._reduce_sparse_layout(member)
            return
        if not member.numel:  # of some parameters a rank has nothing, but a gradient where any rank has one
            self._local_of(member)
            return
        dtype = member.parameter.dtype
        if self._group and dtype is not self._group[0].parameter.dtype and not self._goes_with(dtype):
            self._close_group()  # a message has values of one type
        self._group.append(member)
        self._group_numel += member.numel
        if self._goes_dense:
            closes = self._group_numel * dtype.itemsize >= self._dense_bytes
        else:
            closes = self._schedule.closes_group(member.name, self._group_numel)
        if closes and member is not self._travelling[-1]:  # the last message waits for backward's end: it tells of use
            self._close_group()

    def _goes_with(self, dtype: torch.dtype) -> bool:
        """Tell whether gradients of another type than those of the group go with them."""
        return not self._goes_dense and widened(dtype) is widened(self._group[0].parameter.dtype)

    def _close_group(self) -> None:
        members, self._group, self._group_numel = self._group, [], 0
        if self._clips:
            self._held.append(members)
        else:
            self._submit(members, self._gradients_of(members))

    def _is_used(self, member: _Member) -> bool:
        return (member.is_used or self._is_sharded) and member.parameter.grad is not None

    def _gradients_of(self, members: Sequence[_Member]) -> list[LocalGradient]:
        """Return the gradients of a group, flat; small ones are copied side by side first, and their means back."""
        packs = self._packs and not (self._goes_dense or self._arrived.has_means)
        small = [each for each in members if each.numel < _SMALL and self._is_used(each)] if packs else []
        if len(small) < 2 or len({each.parameter.dtype for each in small}) > 1:
            return [self._local_of(each) for each in members]
        sources = [self._held_gradient(each.parameter) for each in small]
        names = tuple([each.name for each in small])
        package = self._known_packages.get(names) or _Package.of(small, sources[0])
        self._packages[names] = package
        self._packed.append((sources, package.views))
        self._worker.submit(partial(torch._foreach_copy_, package.views, sources))
        return [package.gradients.get(each.name) or self._local_of(each) for each in members]

    def _held_gradient(self, parameter: Tensor) -> Tensor:
        """Return what this rank holds of a gradient."""
        gradient = parameter.grad
        assert gradient is not None
        if self._is_sharded:
            return shard_of(parameter, gradient).view_as(local_tensor(parameter))
        return gradient.detach() if gradient.requires_grad else gradient  # by create_graph=True

    def _local_of(self, member: _Member) -> LocalGradient:
        is_used = self._is_used(member)
        return LocalGradient(member.name, self._gradient_of(member.parameter, is_used), is_used)

    def _gradient_of(self, parameter: Tensor, is_used: bool) -> Tensor:
        """Return what this rank has added to a gradient, flat, where the mean is to be written."""
        arrived = None if self._goes_dense else self._arrived.take(parameter)
        if arrived is not None:
            self._means.append(arrived)
        if not is_used and self._goes_dense and parameter.grad is not None:
            held = parameter.grad.detach().clone()  # others may have added to the same
            self._missing.append(_Missing(parameter, held, None))
            return laid_flat(held, parameter)
        if not is_used:
            zeros = torch.zeros_like(parameter)
            self._missing.append(_Missing(parameter, zeros, arrived))
            return laid_flat(shard_of(parameter, zeros) if self._is_sharded else zeros)
        gradient = self._held_gradient(parameter)
        if self._is_sharded:
            return laid_flat(gradient)
        if gradient.stride() != parameter.stride():
            copy = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
            self._copied.append((gradient, copy))
            gradient = copy
        flat = laid_flat(gradient)
        if arrived is not None:
            mean = laid_flat(arrived, parameter)
            self._taken.append((flat, mean))
            # What is not finite does not become zero, so that the exchange hears of it.
            self._worker.submit(partial(torch._foreach_sub_, [flat], [mean]))
        return flat

    @property
    def _clips(self) -> bool:
        return self._pipeline.memory.clips_gradients and not self._goes_dense

    def _submit(
        self, members: Sequence[_Member], group: Sequence[LocalGradient], flags: Optional[Tensor] = None
    ) -> None:
        """Have a group travel, with flags of what was used if it is a step's last."""
        if self._goes_dense:
            gradients = [local.gradient for local in group]
            self._worker.submit(partial(self._average, [each.parameter for each in members], gradients, flags))
            self._dense_bytes = min(2 * self._dense_bytes, _DENSE_BYTES)
            return
        exchanged = self._exchanged
        self._worker.submit(lambda: exchanged.extend(self._pipeline.exchange(group, flags)))

    def _reduce_sparse_layout(self, member: _Member) -> None:
        parameter = member.parameter
        gradient = parameter.grad if self._is_used(member) else None
        if gradient is None:
            gradient = torch.zeros_like(parameter, layout=torch.sparse_coo)
            self._missing.append(_Missing(parameter, gradient, None))
        reduce = self._average_sparse if self._goes_dense else self._pipeline.reduce_sparse_layout
        self._worker.submit(partial(reduce, member.name, gradient))

    def _average_sparse(self, name: str, gradient: Tensor) -> None:
        self._among.run("all_reduce", gradient).div_(self._among.ranks)

    def _average(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], flags: Optional[Tensor]) -> None:
        """Begin to average flat gradients of one type, with the flags of what was used, and end the message before.

        On the worker: the network is busy with one message while the next is gathered.
        """
        self._pipeline.launched.begin_part()
        numels = [*map(Tensor.numel, gradients), 0 if flags is None else len(flags)]
        flat = gradients[0].new_empty(sum(numels))
        *means, rest = flat.split(numels)
        small = [pair for pair in zip(means, gradients) if pair[1].numel() < _SMALL]
        if small:
            copies, sources = map(list, zip(*small))
            torch._foreach_copy_(copies, sources)
            torch._foreach_mul_(copies, 1 / self._among.ranks)
        for mean, gradient in zip(means, gradients):
            if gradient.numel() >= _SMALL:  # in one pass over its memory
                torch.mul(gradient, 1 / self._among.ranks, out=mean)
        if flags is not None:
            rest.copy_(flags)
        wait = self._among.begin_all_reduce(flat)
        self._end_average()
        self._averaging = wait, means, parameters, gradients, rest

    def _end_average(self) -> None:
        """Have the means of the last message take the place of gradients, or on a device be written into them."""
        if self._averaging is None:
            return
        (wait, means, parameters, gradients, used), self._averaging = self._averaging, None
        wait()
        copies, sources = list[Tensor](), list[Tensor]()
        for mean, parameter, gradient in zip(means, parameters, gradients):
            # On a device the memory is of the worker's stream, which would give it out again while others read it.
            if mean.device.type == "cpu" and parameter.is_contiguous() and _is_all_of_new(gradient, parameter.grad):
                parameter.grad = mean.view_as(parameter).data  # with a count of changes of its own
            else:
                copies.append(gradient)
                sources.append(mean)
        if copies:
            torch._foreach_copy_(copies, sources)
        self._used_by_any = used > 0

    def _end_backward(self) -> None:
        """Let what was held and the last group go, and have the means written when all have arrived."""
        if not self._goes_dense:
            self._mark_ready()
        held = [members for members in (*self._held, self._group) if members]
        groups = [self._gradients_of(members) for members in held]
        if self._clips and groups:
            together = sorted(chain.from_iterable(groups), key=lambda local: self._positions[local.name])
            self._worker.submit(lambda: self._pipeline.measure_norms(together))
        self._own_flags = self._flags()
        flags = [*[None] * (len(groups) - 1), self._own_flags]
        for members, group, used in zip(held, groups, flags):
            self._submit(members, group, used)
        self._committed = threading.Event()
        commit = self._end_average if self._goes_dense else self._commit_of_step()
        self._worker.submit(commit, done=self._committed)

    def _mark_ready(self) -> None:
        """Record when all that travels was ready, in the order of all ranks; what is missing is when backward ends."""
        self._recorder.end_backward()
        end = self._mark()
        ready = {each.name: each.mark if each.is_ready else end for each in self._travelling}
        self._recorder.current.ready = ready

    def _commit_of_step(self) -> Callable[[], None]:
        exchanged, taken, means, packed = self._exchanged, self._taken, self._means, self._packed
        begun = self._arrived.begun
        continues_step = bool(begun) and any(each.parameter in begun for each in self._order)

        def commit() -> None:
            if continues_step and exchanged:
                self._pipeline.check_arrived(means, exchanged[0].names)
            self._pipeline.commit(exchanged, self._places)
            for gradients, views in packed:
                torch._foreach_copy_(gradients, views)
            self._pipeline.close_step()
            for gradient, arrived in taken:
                gradient.add_(arrived)
            self._used_by_any = exchanged[-1].result.used if exchanged else None

        return commit

    def _flags(self) -> Tensor:
        """Return which parameters this rank has used, uint8, in the agreed order."""
        if not self._missing:
            return self._all_used
        missing = {each.parameter for each in self._missing}
        flags = torch.tensor([each.parameter not in missing for each in self._order], dtype=torch.uint8)
        # Not blocking is safe: a copy from memory that is not pinned has read its source when it returns.
        return flags.to(self._all_used.device, non_blocking=True)

    def _unused_anywhere(self) -> set[Tensor]:
        """Return those of the missing that no rank has used; the host waits for a GPU in such a step only."""
        if not self._missing or self._used_by_any is None:
            return set()
        return {each.parameter for each, is_used in zip(self._order, self._used_by_any.tolist()) if not is_used}


def _hook(parameter: Tensor, act: Callable[[Tensor], None]) -> Any:
    """Register what is called when a gradient has been added to, also where it is frozen for now."""
    is_trained = parameter.requires_grad
    try:
        return parameter.requires_grad_().register_post_accumulate_grad_hook(act)
    finally:
        parameter.requires_grad_(is_trained)


def _is_all_of_new(flat: Tensor, gradient: Optional[Tensor]) -> bool:
    """Tell whether a flat tensor is all of a gradient that backward has just made, without a graph: nobody holds it."""
    if gradient is None or gradient.requires_grad or gradient._version:
        return False
    return flat.data_ptr() == gradient.data_ptr()


def _makes_sparse_layout(module: Module) -> bool:
    return isinstance(module, (Embedding, EmbeddingBag)) and module.sparse
