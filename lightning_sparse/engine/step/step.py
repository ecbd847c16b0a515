"""One step: compensate, select, encode, exchange, decode; and at its end commit.

The way of one parameter's gradient ``g`` on one rank, with a residual ``r``, at a density below 1:

1. **Compensate**: the memory makes ``v = r + g``; with momentum correction ``g`` is a velocity, with a corrected Adam
   it is the update that Adam would make of it. The loss scale is divided out before.
2. **Select**: the compressor chooses the elements of ``v`` that are sent.
3. **Encode, exchange, decode**: a wire format writes them into payloads, and a collective carries each. Read from what
   arrives are the means over ranks, whether all of it is finite, whether any rank used the parameter, and what of the
   elements that were sent stays here (what the wire's type rounded off).
4. **Commit**, once all groups of the step have arrived: the new residual is ``v``, with what stays written over what
   was sent; the mean over ranks, zero where nobody sent, is written to the gradient. An Adam update is turned back into
   a gradient, which the optimizer divides again.

If anything that arrived is not finite, on any rank, no residual of the step changes; the gradients say so to a gradient
scaler, as with DDP. Where no rank used a parameter, its residual does not change, and DDP leaves its gradient alone. A
parameter whose density is 1 is a part of its group by itself, and is reduced whole: its residual goes with it.

Where there are two levels (:class:`~lightning_sparse.engine.step.node.Node`), ``g`` is this rank's share of the mean
gradient of its node, the other ranks are those with the same share on the other nodes, and step 4 ends with handing the
shares to the whole node.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import NamedTuple, Optional, TypeVar

import torch
from torch import Tensor

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.feedback import Hyperparameters
from lightning_sparse.compressors.group_selection import GroupSelection, grouped
from lightning_sparse.compressors.selection import Selection
from lightning_sparse.engine.collectives import Collectives
from lightning_sparse.engine.memory import Memory
from lightning_sparse.engine.observe import Mark, Recorder
from lightning_sparse.engine.step.node import Node, Steps
from lightning_sparse.engine.step.selecting import GroupSelector, Part
from lightning_sparse.engine.wire import Arrival, Payload, Phases, Wires
from lightning_sparse.functional import layer_deltas, norm_of, round_to

Result = TypeVar("Result")

_LEARNED_TOGETHER = 1 << 24  # elements whose mean gradients travel in one message, 32 MiB


class StepContext(NamedTuple):
    """Facts of the step in progress that come from outside the pipeline.

    Attributes:
        loss_scale: what its loss was multiplied by, as a tensor of one element; ``None`` for 1. It changes from step to
            step, so what is kept is kept without it.
        hyperparameters: by parameter name; empty where no optimizer is known.
        whole: names of the parameters whose gradients are sent whole in this step, whatever the compressor: those of
            which Adam's second moment is still to be learned.
        samples_deltas: whether to compare what is applied with the dense mean of what had accumulated, which costs a
            dense all-reduce; on all ranks or on none.
    """

    loss_scale: Optional[Tensor] = None
    hyperparameters: Mapping[str, Hyperparameters] = {}
    whole: AbstractSet[str] = frozenset()
    samples_deltas: bool = False


class LocalGradient(NamedTuple):
    """One parameter's gradient on this rank, before its exchange.

    Attributes:
        name: parameter name.
        gradient: flat view of the gradient's storage; the mean over ranks is written here.
        is_used: whether backward gave the parameter a gradient on this rank; ``None`` where that is not tracked.
    """

    name: str
    gradient: Tensor
    is_used: Optional[bool]


class Exchanged(NamedTuple):
    """Parameters of a group that travelled together, and what arrived of them; not yet written back.

    Attributes:
        names: parameter names.
        group: their local gradients.
        accumulated: of each, gradient plus residual, flat; the means are written over it.
        counts: for each the number of elements that its density asks for; a share of them, which may be a fraction,
            where elements were selected across the group.
        arrival: the means over ranks, what stays here of the elements that were sent, whether all is finite, and
            whether any rank used each parameter.
    """

    names: list[str]
    group: Sequence[LocalGradient]
    accumulated: list[Tensor]
    counts: Sequence[float]
    arrival: Arrival


class Pipeline:
    """Run groups of gradients through a compressor, a memory, a wire and the collectives.

    A step is a transaction of two halves. :meth:`exchange` runs group by group while backward goes on, and changes
    nothing that outlives the step. :meth:`commit` runs when all groups of the step have arrived: only then is it known
    whether every gradient on every rank was finite.

    Args:
        compressor: what is sent.
        memory: what is kept.
        wires: how it is written.
        collectives: how it travels.
        recorder: where facts go.
        density_of: fraction of elements to send of the parameter with a given name.
        node: the ranks that average their gradients first, where there are two levels; ``collectives`` are then between
            nodes.
        everybody: between all ranks; ``None`` where ``collectives`` are.

    Attributes:
        context: facts of the step in progress that come from outside.
    """

    def __init__(
        self,
        compressor: Compressor,
        memory: Memory,
        wires: Wires,
        collectives: Collectives,
        recorder: Recorder,
        density_of: Callable[[str], float],
        node: Optional[Node] = None,
        everybody: Optional[Collectives] = None,
    ) -> None:
        self.compressor = compressor
        self.memory = memory
        self.wires = wires
        self.collectives = collectives
        self.recorder = recorder
        self.density_of = density_of
        self.context = StepContext()
        self._node = node
        self._everybody = collectives if everybody is None else everybody
        self._shares: dict[str, LocalGradient] = {}  # of the mean gradient of the node, where they are known already
        self._selector = GroupSelector(compressor, wires)
        self._are_finite: list[Tensor] = []  # gradients of a sparse layout, in this step

    @property
    def waits_for_whole_step(self) -> bool:
        """Whether :meth:`measure_norm` has to see the gradients of the whole model before any group is exchanged."""
        return self.memory.clips_gradients

    def measure_norm(self, gradients: Sequence[LocalGradient]) -> None:
        """Tell the memory the norm of this rank's gradient in this step, for it to clip by.

        Args:
            gradients: of the whole model, in the order of its definition: no schedule changes a bit of the sum.
        """
        names = [local.name for local in gradients]
        if self._node is not None:
            for _, alike in groupby(gradients, key=lambda local: local.gradient.dtype):
                self._shares.update((share.name, share) for share in self._shared(self._node, list(alike)))
            gradients = [self._shares[name] for name in names]
        with self.recorder.span("select"):
            norm = norm_of([local.gradient for local in gradients])
        if self._node is not None:
            norm = self._run_in_node(self._node, self._node.norm_of(norm), names)
        self.memory.gradient_norm = norm if self.context.loss_scale is None else norm / self.context.loss_scale

    def exchange(self, group: Sequence[LocalGradient], ready: Optional[Mark] = None) -> list[Exchanged]:
        """Add the residuals of a group, send what is selected of it, and receive what the other ranks selected.

        The gradients of the group are used as working memory until :meth:`commit`.

        Args:
            group: its gradients.
            ready: when the last of them was ready, for the record.

        Returns:
            what arrived, in a part for each way: parameters that are sent whole travel by themselves.
        """
        names = [local.name for local in group]
        with self.recorder.group(names, ready):
            if self._node is not None:
                are_known = names[0] in self._shares
                group = [self._shares.pop(name) for name in names] if are_known else self._shared(self._node, group)
            gradients = [local.gradient for local in group]
            self.recorder.see_gradients(gradients, self.context.loss_scale)
            with self.recorder.span("select"):
                if self.context.loss_scale is not None:
                    torch._foreach_div_(gradients, self.context.loss_scale)
                accumulated = self.memory.compensate(names, gradients, self.context.hyperparameters)
                parts = self._select(group, accumulated)
            return [self._exchange_part(part, group, accumulated) for part in parts]

    def _shared(self, node: Node, group: Sequence[LocalGradient]) -> list[LocalGradient]:
        """Average gradients in the node, and return this rank's share of each, for which it stands from here on."""
        names = [local.name for local in group]
        shares = self._run_in_node(node, node.average([local.gradient for local in group]), names)
        are_used = [local.is_used for local in group]
        if are_used[0] is not None:
            are_used = list(self._run_in_node(node, node.any_of(list(map(bool, are_used))), names))
        return [LocalGradient(*local) for local in zip(names, shares, are_used)]

    def _select(self, group: Sequence[LocalGradient], accumulated: Sequence[Tensor]) -> list[Part]:
        names, whole = [local.name for local in group], self.context.whole
        densities = [1.0 if name in whole else self.density_of(name) for name in names]
        return self._selector.select(names, accumulated, densities, [local.is_used for local in group], whole)

    def _exchange_part(self, part: Part, group: Sequence[LocalGradient], accumulated: Sequence[Tensor]) -> Exchanged:
        members, tensors = [group[each] for each in part.positions], [accumulated[each] for each in part.positions]
        names = [local.name for local in members]
        self.recorder.see_selection(part.selection, part.counts)
        arrival = self._run_phases(part.wire.exchange(part.selection, part.tensors, self._used(members)), names)
        with self.recorder.span("encode"):
            arrival = part.split_by_parameter(arrival)
        self.recorder.see_sent(names, part.sent_by_parameter)
        return Exchanged(names, members, tensors, part.counts, arrival)

    def commit(self, step: Sequence[Exchanged]) -> None:
        """Keep what was not sent, and write the mean over ranks into the gradients.

        If anything that any rank sent is not finite, the memory of the whole step stays as it was. The value itself
        is written like any other, on every rank, so that a gradient scaler skips the step as it does with DDP.

        Args:
            step: all that :meth:`exchange` returned for the groups of the step.
        """
        are_finite, self._are_finite = self._are_finite, []
        if not step:
            return  # every gradient had a sparse layout
        finite = torch.stack([*are_finite, *(exchanged.arrival.finite for exchanged in step)]).all()
        if self._node is not None:  # what is not finite is in the share of one of its ranks
            finite = self._run_in_node(self._node, self._node.all_of(finite), step[0].names)
        means = self._finish_step(step, finite)
        self._learn(step, finite)
        with self.recorder.span("commit"):
            for exchanged, mean in zip(step, means):
                with self._deltas_sampled(exchanged):
                    self._keep(exchanged, finite)
                    mean.scatter(exchanged.accumulated)  # whose memory serves for the means from here on
                self._write_back(exchanged, mean)
        if self._node is not None:
            self._run_in_node(self._node, self._node.write_back(), step[0].names)
        self._selector.end_step()
        self.wires.end_step()

    def _keep(self, exchanged: Exchanged, finite: Tensor) -> None:
        used = exchanged.arrival.used
        accepted = finite if used is None else used & finite
        self.memory.update(exchanged.names, exchanged.accumulated, exchanged.arrival.kept, accepted)

    def _write_back(self, exchanged: Exchanged, mean: GroupSelection) -> None:
        means = exchanged.accumulated
        self.memory.to_gradients(exchanged.names, means, mean)
        if self.context.loss_scale is not None:
            torch._foreach_mul_(means, self.context.loss_scale)
        used = exchanged.arrival.used
        for position, (local, tensor) in enumerate(zip(exchanged.group, means)):
            if used is not None and not local.is_used:
                tensor.mul_(used[position])  # what nobody used is not applied, nor taken from what waits
            if tensor is not local.gradient:
                local.gradient.copy_(round_to(tensor, local.gradient.dtype))

    @contextmanager
    def _deltas_sampled(self, exchanged: Exchanged) -> Iterator[None]:
        """Compare the means that are written inside with those of all that had accumulated, if somebody asked."""
        if not self.context.samples_deltas:
            yield
            return
        names, accumulated = exchanged.names, exchanged.accumulated
        flat = torch.cat(accumulated).div_(self.collectives.ranks)
        flat = self._run_collective(Payload("all_reduce", flat), names)
        yield
        dense_means = flat.split([tensor.numel() for tensor in accumulated])
        deltas = layer_deltas(dense_means, accumulated, exchanged.counts)
        self.recorder.current.deltas.update(zip(names, deltas.unbind()))

    def reduce_sparse_layout(self, name: str, gradient: Tensor) -> None:
        """Average a ``sparse_coo`` gradient over ranks, in place: it goes the dense way, as in DDP."""
        with self.recorder.span("exchange"):
            self._run_collective(Payload("all_reduce", gradient), [name], self._everybody)
        gradient.div_(self._everybody.ranks)
        self._are_finite.append(gradient._values().isfinite().all())  # coalescing would have the host wait for a GPU

    def _learn(self, step: Sequence[Exchanged], finite: Tensor) -> None:
        """Average gradients, without residuals, in the few steps in which Adam's second moment learns from them."""
        local = self.memory.take_local_gradients()
        # The host waits for the device in such a step only, at most every tenth.
        if not local or not bool(finite):
            return
        self.recorder.current.marks.is_typical = False  # no plan is made from its times
        for exchanged in step:
            used = exchanged.arrival.used
            are_used = [True] * len(exchanged.group) if used is None else used.tolist()
            names = [name for name, is_used in zip(exchanged.names, are_used) if is_used and name in local]
            for together in _messages(names, local):
                some = {name: local.pop(name) for name in together}
                means = self._means(list(some.values()), list(some))
                squared_norms = (
                    self._squared_norms(list(some.values()), together) if self.memory.clips_gradients else None
                )
                if self._node is not None:
                    means = self._whole(self._node, means, together)
                self.memory.learn(together, means, squared_norms)

    def _squared_norms(self, gradients: list[Tensor], names: list[str]) -> Tensor:
        """Return the means, over nodes, of the squared norms of gradients, of which a node's ranks have shares."""
        squared = torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)).square_()
        with self.recorder.span("exchange"):
            squared = self._run_collective(Payload("all_reduce", squared), names, self._everybody)
        return squared.div_(self.collectives.ranks)

    def _whole(self, node: Node, shares: Sequence[Tensor], names: list[str]) -> Sequence[Tensor]:
        """Return whole means, of this rank's shares."""
        moments = (self.context.hyperparameters[name].adam for name in names)
        numels = [each.second.numel() for each in moments if each is not None]
        return self._run_in_node(node, node.whole(shares, numels, torch.bfloat16), names)

    def _means(self, tensors: Sequence[Tensor], names: list[str]) -> Sequence[Tensor]:
        """Return means over ranks, rounded to 16 bits on the way."""
        flat = torch.cat([tensor.to(torch.bfloat16) for tensor in tensors])
        with self.recorder.span("exchange"):
            flat = self._run_collective(Payload("all_reduce", flat), names).div_(self.collectives.ranks)
        return [mean.to(tensor.dtype) for mean, tensor in zip(flat.split(list(map(Tensor.numel, tensors))), tensors)]

    def _finish_step(self, step: Sequence[Exchanged], finite: Tensor) -> list[GroupSelection]:
        """Have the compressor finish the step, for all parameters but those of ``context.whole``."""
        means = [exchanged.arrival.means for exchanged in step]
        if type(self.compressor).finish_step is Compressor.finish_step:
            return means  # most methods have no state; then nobody has to look at what arrived of each parameter
        asked = {
            name: mean
            for exchanged in step
            for name, mean in zip(exchanged.names, exchanged.arrival.means)
            if name not in self.context.whole
        }
        before = list(asked.values())
        after = self._call_finish_step(list(asked), before, finite) if asked else before
        if after is before:  # a method that changes no mean returns the list that it was given
            return means
        changed = dict(zip(asked, after))
        return [
            grouped([changed.get(name, mean) for name, mean in zip(exchanged.names, exchanged.arrival.means)])
            for exchanged in step
        ]

    def _call_finish_step(self, names: list[str], means: Sequence[Selection], finite: Tensor) -> Sequence[Selection]:
        encoding = ExitStack()

        def all_gather(tensor: Tensor) -> Tensor:
            encoding.close()  # a collective counts as the network's time, not as the compressor's
            with self.recorder.span("exchange"):
                gathered = self._run_collective(Payload("all_gather", tensor), names)
            encoding.enter_context(self.recorder.span("encode"))
            return gathered

        with encoding:
            encoding.enter_context(self.recorder.span("encode"))
            return self.compressor.finish_step(names, means, finite, all_gather)

    def _run_phases(self, phases: Phases, names: list[str]) -> Arrival:
        """Run the collective that each phase of a wire format names, and hand its result to the next phase."""
        return self._run(phases, names, self.collectives)

    def _run_in_node(self, node: Node, steps: Steps[Result], names: list[str]) -> Result:
        return self._run(steps, names, node.collectives)

    def _run(self, steps: Steps[Result], names: list[str], collectives: Collectives) -> Result:
        received: Optional[Tensor] = None
        while True:
            try:
                with self.recorder.span("encode"):
                    payload = steps.send(received)  # type: ignore[arg-type]  # a generator starts with None
            except StopIteration as stop:
                result: Result = stop.value
                return result
            with self.recorder.span("exchange"):
                received = self._run_collective(payload, names, collectives)

    def _run_collective(self, payload: Payload, names: list[str], collectives: Optional[Collectives] = None) -> Tensor:
        collectives = self.collectives if collectives is None else collectives
        is_inside = self._node is not None and collectives is self._node.collectives
        self.recorder.add_bytes(collectives.sent_bytes(payload.collective, payload.tensor), is_inside)
        subject = f"the group of {len(names)} parameters from {names[0]!r} to {names[-1]!r}"
        with collectives.telling_of(subject, payload.collective):
            return collectives.run(*payload)

    def _used(self, group: Sequence[LocalGradient]) -> Optional[Tensor]:
        if group[0].is_used is None:
            return None
        used = torch.tensor([local.is_used for local in group], dtype=torch.uint8)
        # Not blocking is safe: a copy from memory that is not pinned has read its source when it returns.
        return used.to(self.collectives.device, non_blocking=True)


def _messages(names: Iterable[str], gradients: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Yield the names whose gradients travel in one message: few messages, little memory."""
    together: list[str] = []
    numel = 0
    for name in names:
        together.append(name)
        numel += gradients[name].numel()
        if numel >= _LEARNED_TOGETHER:
            yield together
            together, numel = [], 0
    if together:
        yield together
