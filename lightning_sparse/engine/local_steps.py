"""Rounds of local steps: every rank trains by itself for some steps, then what its parameters changed by is exchanged.

The change goes the way of a gradient (any compressor, memory and wire), and its mean over ranks is the gradient of an
outer step, which moves the shared model. With everything sent this is local SGD (Stich, arXiv 1805.09767), with an
outer Nesterov momentum DiLoCo (Douillard et al., arXiv 2311.08105), overlapping with training as in Streaming DiLoCo
(arXiv 2501.18512), and with top-k and error feedback SparseLoCo (Sarfi et al., arXiv 2508.15706).

Where ours differs: an exchange that overlaps with steps is applied as a correction, which keeps what those steps have
learned, where Streaming DiLoCo mixes them with the shared model; and the mean is over all ranks, as in SparseLoCo's
formula, where its released code divides by the number of ranks that sent an element.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from operator import or_
from threading import Event
from time import perf_counter
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from lightning_sparse.engine.memory.residual import widened
from lightning_sparse.engine.replicas import ReplicaAverager, averaged
from lightning_sparse.engine.settings import LocalSteps
from lightning_sparse.engine.step.levels import Replicas
from lightning_sparse.engine.step.step import LocalGradient, Pipeline, StepContext
from lightning_sparse.engine.step.worker import ExchangeWorker
from lightning_sparse.engine.wire.base import Payload
from lightning_sparse.functional.elements import held_of, laid_flat, round_to
from lightning_sparse.functional.reductions import fingerprint
from lightning_sparse.schedule import Schedule

COMMUNICATION_SHARE = 0.05  # of the time, that rounds of a length of their own choice are to take for exchanges
_FIRST_STEPS = 8  # of a round, until times are known
_TIMED_ROUNDS = 3
_SAVED = ("names", "due", "corrections")  # of an exchange that is on its way
PLACES = ("a step", "a validation", "the end of an epoch")  # where ranks are when they begin an exchange
_MOST_STEPS = 500  # DiLoCo's; longer rounds have not been shown to train as well


def fitting_steps(step_seconds: float, exchange_seconds: float) -> int:
    """Return how many local steps keep exchanges at 5 % of the time, 500 at most.

    >>> fitting_steps(step_seconds=0.1, exchange_seconds=0.2)
    40
    """
    return min(_MOST_STEPS, max(1, math.ceil(exchange_seconds / (COMMUNICATION_SHARE * step_seconds))))


@dataclass
class _PendingSync:
    """An exchange, from its beginning until it is applied after step ``due``."""

    names: list[str]
    due: int
    corrections: Optional[list[Tensor]]  # added to each tensor; ``None``: the shared model replaces them
    noted: int = 0  # what ranks have noted, as bits
    changes: list[Tensor] = field(default_factory=list)  # held for as long as a device may read them
    done: Event = field(default_factory=Event)


class _Told(NamedTuple):
    """What each rank tells the others before an exchange, in numbers."""

    place: float  # that it has come to, as a position in ``PLACES``
    samples: float  # since the last exchange; NaN where they cannot be told
    batches: float
    step: float
    missed_steps: float  # of others, since all ranks last met
    is_stale: float  # whether its model is not the shared one
    noted: float


class Rounds(Replicas):
    """Exchange what parameters have changed by since the last round, and keep the shared model.

    Buffers of floating point are exchanged with them. What else ranks write (frozen parameters, integers, new buffers)
    they have alike when a round ends early, as before a validation and at the end. The model is asked for its tensors
    when they are used: it may have others by then, or other names for them. ``begin`` is called for each exchange that
    begins, and what it returns on the worker before that exchange.
    """

    are_apart = True

    def __init__(
        self,
        module: Module,
        names: Sequence[str],
        local: LocalSteps,
        pipeline: Pipeline,
        schedule: Schedule,
        worker: ExchangeWorker,
        begin: Callable[[], Callable[[], StepContext]] = lambda: StepContext,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._local = local
        self._begin = begin
        self._say = say
        self._every = local.every if isinstance(local.every, int) else _FIRST_STEPS
        self._origin = 0  # step at which a round of this length began after one that was ended early
        self._times: Optional[list[tuple[int, float, float]]] = None if isinstance(local.every, int) else []
        self._applied_at = perf_counter()
        self._pipeline = pipeline
        self._recorder = pipeline.recorder
        self._levels = pipeline.levels
        self._everybody, self._holders = pipeline.levels.everybody, pipeline.levels.holders
        self._schedule = schedule
        self._worker = worker
        self.notes: dict[Any, Callable[[], bool]] = {}  # what each exchange tells all ranks that any of them has noted
        self._noted = 0  # by the exchange that was applied last, and not heard yet
        self._missed_steps = 0  # that others have made, since all ranks last met
        self.pace = (1, 1)  # steps of an epoch: of this rank, and of the rank with the most
        self._epoch = (0, 0)  # the step at which it began, and steps that this rank has made since
        self._step = self._skipped = 0
        self._steps_of: dict[int, int] = {}
        self._is_told_of_batches = False
        self._samples = self._batches = 0.0  # since the last exchange began; NaN samples where they cannot be told
        self._has_begun = False
        self._pending: Optional[_PendingSync] = None
        self._averager = ReplicaAverager(module, self._holders.collectives, self._recorder)
        self._is_resumed = False
        self._names: frozenset[str] = frozenset()
        self._known: dict[Tensor, str] = {}  # parameters, by which they are found where they get another name
        self._shared: dict[str, Tensor] = {}  # parameters that are trained, then what is exchanged beside them
        self._seen: dict[str, Tensor] = {}  # fingerprints of what is not shared, when all ranks last had the same of it
        self._momenta: dict[str, Tensor] = {}
        self._away: Optional[dict[str, Tensor]] = None
        self.covered_steps = self._every  # local steps that the last exchange was about
        self._last_wait = self._total_wait = 0.0  # seconds
        self._know(module, names)

    @property
    def trained(self) -> frozenset[str]:
        """Names of the parameters whose changes are exchanged."""
        return self._names

    @override
    def follow(self, module: Module, names: Sequence[str]) -> None:
        if not (self._is_resumed and self._names == frozenset(names)):  # the round that was resumed has these
            self.synchronize()
            self._know(module, names)

    def _know(self, module: Module, names: Sequence[str]) -> None:
        """Know what is exchanged, where replicas are the same."""
        self._module = module
        renamed = {self._known.get(parameter, name): name for name, parameter in module.named_parameters()}
        shared, momenta = (
            {renamed.get(name, name): each for name, each in kept.items()} for kept in (self._shared, self._momenta)
        )
        self._known = {parameter: name for name, parameter in module.named_parameters()}
        self._momenta = momenta
        tensors = averaged(self._named())
        buffers = {name for name, _ in module.named_buffers()}
        beside = [name for name, tensor in tensors.items() if name in buffers and tensor.is_floating_point()]
        self._names = frozenset(names)
        self._shared = {
            name: known
            if (known := shared.get(name)) is not None and known.shape == tensors[name].shape
            else _wide(tensors[name])
            for name in (*names, *beside)
        }
        self._begun = self._step  # when the last exchange did
        self._is_stale = False  # whether a step has been made since
        self._seen = self._fingerprints()

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's tensors, parameters under the names that they had when they were followed."""
        named = chain(self._module.named_parameters(), self._module.named_buffers())
        return ((self._known.get(tensor, name), tensor) for name, tensor in named)

    @property
    def _beside(self) -> list[str]:
        """Names of what is exchanged beside the parameters that are trained."""
        return list(self._shared)[len(self._names) :]

    def _tensors(self) -> dict[str, Tensor]:
        """Return the model's tensors that are shared, but those that it no longer has, or has in another shape."""
        held = {name: held_of(tensor) for name, tensor in self._named() if name in self._shared}
        held = {name: torch.view_as_real(each) if each.is_complex() else each for name, each in held.items()}
        return {name: tensor for name, tensor in held.items() if tensor.shape == self._shared[name].shape}

    def _unshared(self) -> dict[str, Tensor]:
        """Return what ranks may write without an optimizer: frozen parameters, integers, buffers that have changed."""
        known = self._names | self._tensors().keys()
        return {name: tensor for name, tensor in averaged(self._named()).items() if name not in known}

    def _check_followed(self) -> None:
        """Refuse to end a round without what is trained by now, or with what the model no longer has."""
        present = {name: each.requires_grad and held_of(each).numel() > 0 for name, each in self._named()}
        changes = {
            "new": [name for name, is_trained in present.items() if is_trained and name not in self._names],
            "gone": sorted(self._names - present.keys()),
        }
        if any(changes.values()):
            told = "; ".join(f"{change}: {', '.join(map(repr, names))}" for change, names in changes.items() if names)
            raise RuntimeError(
                f"other parameters are trained than when this round of local steps began ({told}), and ranks would"
                " train them apart. Change what is trained before a training_step, or, in a loop of your own, close()"
                " and sparsify the model anew"
            )

    def _has_moved(self) -> bool:
        """Tell whether what is trained is not that of the shared model, whoever has written it; a device is waited for.

        An exchange of nothing would move the shared model, too, by its momentum.
        """
        trained = [(name, tensor) for name, tensor in self._tensors().items() if name in self._names]
        moved = [tensor.ne(round_to(self._shared[name], tensor.dtype)).any() for name, tensor in trained]
        return bool(moved) and bool(torch.stack(moved).any())

    @property
    def steps_since_ended(self) -> int:
        """Steps since rounds began, or since one was ended early."""
        return self._step - self._origin

    @property
    def is_synchronous(self) -> bool:
        """Whether the next step is DDP's, as rounds have not begun, and are not to begin yet."""
        made = max(self._steps_of.values(), default=0)
        return not self._has_begun and made < self._local.synchronous_steps

    @override
    def begin(self) -> None:
        if self._is_resumed and (trained := self._trained()) != self._names:
            # As without a stop, where they are followed before their first step.
            self._is_resumed = False
            self.follow(self._module, [name for name, _ in self._module.named_parameters() if name in trained])
        if self._has_begun:
            return
        self._has_begun, self._steps_of, self._epoch = True, {}, (self._step, 0)
        self.adopt()

    @override
    def adopt(self) -> None:
        """Share the model that there is now, averaged over ranks; all must call, and the round so far is part of it."""
        self._worker.run(self._averager.average)
        self._pending, self._away, self._is_stale = None, None, False
        for name, tensor in self._tensors().items():
            shared = self._shared[name]  # where a narrow tensor is what it rounds to, it stays as it is
            shared.copy_(torch.where(_as(shared, tensor.dtype) == tensor, shared, tensor))
        self._seen = self._fingerprints()

    @override
    def see_batch(self, samples: Optional[int]) -> None:
        self._is_told_of_batches = True
        self._batches += 1
        self._samples += math.nan if samples is None else samples

    @override
    def count_step(self, optimizer: int, agreed: Sequence[float] = ()) -> None:
        """Count a step of an optimizer; apply the exchange that is due, and begin one at the end of a round.

        A round counts those of the optimizer with the most, skipped or not. A rank with fewer in an epoch makes its
        share of a round: each of its steps stands for as many as the rank with the most makes meanwhile.
        """
        self._steps_of[optimizer] = self._steps_of.get(optimizer, 0) + 1
        self._is_resumed = False
        if not self._has_begun:
            return
        self._is_stale = True
        if self._steps_of[optimizer] <= self._step:
            return
        if not self._is_told_of_batches:
            self._samples, self._batches = self._samples + 1, self._batches + 1
        steps = self._count_in_epoch()
        self._skip(steps - 1)
        self._skipped += steps - 1
        for _ in range(steps):
            self._step += 1
            self._apply_until(self._step)
            if (self._step - self._origin) % self._every == 0:
                self._check_followed()
                self._submit(self._local.overlap_steps, agreed)
            self._apply_until(self._step)
            self._choose_length()

    def _count_in_epoch(self) -> int:
        """Count a step of this rank; return how many of the rank with the most it stands for."""
        own, most = self.pace
        began, made = self._epoch[0], self._epoch[1] + 1
        self._epoch = (began, made)
        return 1 if most == 1 else max(0, began + made * most // own - self._step)

    def skipped(self) -> int:
        """Return how many steps those of this rank have stood for beside themselves, since it was last asked."""
        skipped, self._skipped = self._skipped, 0
        return skipped

    def _skip(self, steps: int) -> None:
        """Count steps of other ranks, for which this one has no batch, as if it had made them."""
        self._missed_steps += steps
        if steps:
            self._steps_of = {number: self._steps_of.get(number, 0) + steps for number in self._steps_of or (0,)}

    def _choose_length(self) -> None:
        """Choose, when some rounds have been timed, how many steps one has from now on, the same on all ranks."""
        times = self._times
        if times is None or len(times) <= _TIMED_ROUNDS:
            return
        steps, seconds, waited = (sum(each) for each in zip(*times[1:]))  # the first exchange makes connections
        numbers = (seconds / steps, waited / (len(times) - 1))
        step, exchange = self._worker.run(lambda: self._everybody.collectives.mean_of_numbers(numbers))
        self._times, self._origin = None, self._step
        self._every = fitting_steps(step, exchange)
        self._say(
            f"a step takes {1e3 * step:.1f} ms and an exchange {1e3 * exchange:.1f} ms: rounds of {self._every} local"
            f" steps, so that exchanges take {exchange / (step * self._every):.1%} of the time."
        )

    @override
    def synchronize(self) -> None:
        """End the round early, and go on from the shared model; all ranks must call."""
        if not self._has_begun:
            return
        # What is pending, applied as a correction, leaves ranks apart by what that rounds.
        numbers = self._numbers(is_stale=self._is_stale or self._pending is not None or self._has_moved())
        self._apply_until(self._step + self._every)
        everywhere = self._worker.run(lambda: self._tell(numbers))
        if any(told.is_stale for told in everywhere):
            self._submit(0, everywhere=everywhere)
        self._apply_until(self._step)
        tensors = averaged(self._named())
        rest = {name: tensor for name, tensor in tensors.items() if name not in self._names}
        self._worker.run(lambda: self._averager.average_differing(rest))
        for name in self._beside:
            if name in rest and rest[name].shape == self._shared[name].shape:
                self._shared[name].copy_(rest[name])
        self._seen = self._fingerprints()
        self._origin = self._step

    def _trained(self) -> set[str]:
        """Return the names of the parameters that are trained now."""
        parameters = self._module.named_parameters()
        return {name for name, each in parameters if each.requires_grad and held_of(each).numel()}

    @override
    def meet(self, place: str, agreed: Sequence[float] = ()) -> Optional[bool]:
        if not self._has_begun and (self._steps_of or self.is_synchronous):
            return True
        self.begin()  # a rank may have had no batch yet
        if self._pending is not None:
            self._worker.wait(self._pending.done)
            self._note(self._pending)
        if self._noted:
            return None
        # What is late on a rank that trains has been applied by those that wait: all have to end that round.
        is_stale = self._is_stale or self._pending is not None or self._has_moved()
        numbers = self._numbers(agreed, PLACES.index(place), is_stale)
        everywhere = self._worker.run(lambda: self._tell(numbers))
        are_uneven = len({told.step for told in everywhere}) > 1 or any(told.missed_steps for told in everywhere)
        missed = int(max(told.step for told in everywhere)) - self._step
        self._step += missed
        self._skip(missed)
        if self._pending is not None:
            self._pending.due += missed
        if all(told.place for told in everywhere):
            return self._met(everywhere, PLACES.index(place), are_uneven)
        self._apply_until(self._step + self._every)
        self._submit(0, agreed, everywhere)
        self._apply_until(self._step)
        self._choose_length()
        return None

    def _met(self, everywhere: Sequence[_Told], place: int, are_uneven: bool) -> Optional[bool]:
        """Answer for :meth:`meet` when no rank has anything left to train before it meets the others."""
        furthest = max(told.place for told in everywhere)
        if place < furthest:
            return False
        if any(told.place < furthest for told in everywhere):
            return None
        self._is_stale = any(told.is_stale for told in everywhere)
        self.are_uneven, self._missed_steps = are_uneven, 0
        if PLACES[place] == "the end of an epoch":
            self._epoch = (self._step, 0)
        return True

    def hears(self, note: Any) -> bool:
        """Return whether an exchange that was applied brought one of ``notes``; ``False`` once it has been asked."""
        bit = 1 << list(self.notes).index(note)
        is_noted, self._noted = bool(self._noted & bit), self._noted & ~bit
        return is_noted

    def _note(self, pending: _PendingSync) -> None:
        self._noted, pending.noted = self._noted | pending.noted, 0

    def _numbers(self, agreed: Sequence[float] = (), place: int = 0, is_stale: bool = True) -> tuple[float, ...]:
        """Return what this rank tells before an exchange that begins now."""
        noted = sum(asked() << bit for bit, asked in enumerate(self.notes.values()))
        counts = (self._samples, self._batches, self._step, self._missed_steps)
        return (*_Told(place, *counts, is_stale, noted), *agreed)

    def _tell(self, numbers: Sequence[float]) -> list[_Told]:
        """Tell all ranks and return what each tells, where those that train agree on learning rates; on the worker."""
        count = len(_Told._fields)
        rows = self._everybody.collectives.gather_numbers(numbers).tolist()
        _check_agreed([row[count:] for row in rows if not row[0]])
        return [_Told(*row[:count]) for row in rows]

    def _submit(self, overlap: int, agreed: Sequence[float] = (), everywhere: Optional[Sequence[_Told]] = None) -> None:
        """Begin an exchange, which is applied after some more steps; ranks may have told ``everywhere`` before it."""
        numbers = self._numbers(agreed)
        steps, self._begun, self._is_stale = self._step - self._begun, self._step, False
        present = self._tensors()
        # A tensor that the model no longer has is taken for unchanged: ranks exchange the same names.
        tensors = {name: present.get(name, shared) for name, shared in self._shared.items()}
        starts = [tensor.clone() for tensor in tensors.values()] if overlap else None
        pending = self._pending = _PendingSync(list(tensors), self._step + overlap, starts)
        pending.changes = [self._change(name, tensor) for name, tensor in tensors.items()]
        prepare = self._begin()  # here, and not when the worker gets to it: what ranks have asked for is the same
        self._samples = self._batches = 0.0

        def exchange() -> None:
            self._exchange(pending, prepare, steps, self._tell(numbers) if everywhere is None else everywhere)

        self._worker.submit(exchange, pending.done.set)

    def _change(self, name: str, tensor: Tensor) -> Tensor:
        """Return what a tensor has changed by, as a gradient: flat, and in the order in which the shared one lies."""
        shared = self._shared[name]
        base, own = laid_flat(shared), laid_flat(tensor, shared)
        if name in self._names:
            return _difference(_as(self._levels.part_of(base), own.dtype), self._levels.part_of(own))
        # The mean may be finite, and nothing finite leads there from an infinity.
        return _difference(_as(base, own.dtype).nan_to_num(0, 0, 0), own)

    def _have_changed(self) -> dict[str, Tensor]:
        """Return for each tensor that is not shared whether this rank has written it since all had the same."""
        return {name: each != self._seen.get(name, ~each) for name, each in self._fingerprints().items()}

    def _to_save(self, written: Sequence[str], together: bool) -> dict[str, Tensor]:
        """Return what this rank has of what is not shared and ranks hold differently, or of what it has written."""
        unshared = self._unshared()
        if not (together and self._has_begun):
            return {name: unshared[name] for name in written}
        # Also on a rank that has not written it: Lightning's file has what rank 0 wrote.
        return {name: unshared[name] for name in self._worker.run(lambda: self._averager.differing(unshared))}

    def _fingerprints(self) -> dict[str, Tensor]:
        return {name: fingerprint(tensor) for name, tensor in self._unshared().items()}

    def _exchange(
        self, pending: _PendingSync, prepare: Callable[[], StepContext], steps: int, everywhere: Sequence[_Told]
    ) -> None:
        """Exchange changes and move the shared model by their mean; on the worker."""
        self._recorder.begin_backward()
        self._recorder.end_backward()
        pending.noted = reduce(or_, (int(told.noted) for told in everywhere))
        names, changes, trained = pending.names, pending.changes, len(self._names)
        counts = [(told.samples, told.batches) for told in everywhere]
        in_step = self._levels.node_ranks if self._levels.are_in_step else 1
        weight = _weight(counts, self._everybody.collectives.rank, in_step)
        if weight == 0:  # a product with an infinity, as in a mask, would be no number
            torch._foreach_zero_(changes)
        elif weight != 1:  # before residuals are added, so that all of what counts arrives in the end
            torch._foreach_mul_(changes, weight)
        self._pipeline.context = prepare()
        gradients = [LocalGradient(name, change, None) for name, change in zip(names[:trained], changes)]
        self._pipeline.commit(self._pipeline.exchange_in_groups(gradients, self._schedule.closes_group))
        self._average(names[trained:], changes[trained:])
        self._move(names, changes, trained)
        if pending.corrections is not None:
            for name, start in zip(names, pending.corrections):
                start.copy_(_difference(_as(self._shared[name], start.dtype), start))
        self.covered_steps = self._recorder.current.covered_steps = steps
        self._pipeline.selector.release()  # the next exchange is many steps away: what is not in use is given back
        self._pipeline.close_step()

    def _average(self, names: Sequence[str], changes: Sequence[Tensor]) -> None:
        """Average changes over replicas, in place: all of each, whatever the compressor."""
        if not changes:
            return
        flat = self._holders.call(Payload("all_reduce", torch.cat(list(changes)).div_(self._holders.ranks)), names)
        for change, mean in zip(changes, flat.split([change.numel() for change in changes])):
            change.copy_(mean)

    def _move(self, names: Sequence[str], changes: Sequence[Tensor], parameters: int) -> None:
        """Make an outer step, that of ``torch.optim.SGD``; what is not trained takes its mean as it is."""
        local, parts = self._local, list[Tensor]()
        wholes = [laid_flat(self._shared[name]) for name in names]
        for position, (name, change, shared) in enumerate(zip(names, changes, wholes)):
            if position >= parameters:
                shared.nan_to_num_(0, 0, 0).sub_(change)
                continue
            if local.outer_momentum:
                momentum = self._momenta.setdefault(name, torch.zeros_like(change))
                momentum.mul_(local.outer_momentum).add_(change)
                change = change.add_(momentum, alpha=local.outer_momentum) if local.nesterov else momentum
            parts.append(self._levels.part_of(shared).sub_(change, alpha=local.outer_lr))
        self._levels.put_together(parts, wholes[:parameters], names[:parameters])

    def _apply_until(self, step: int) -> None:
        """Apply the exchange that is due after a step."""
        pending = self._pending
        if pending is None or pending.due > step:
            return
        self._pending = None
        self._wait(pending)
        self._note(pending)
        tensors = self._tensors()
        for position, name in enumerate(pending.names):
            if name not in tensors:
                continue
            if pending.corrections is None:
                tensors[name].copy_(round_to(self._shared[name], tensors[name].dtype))
            else:
                tensors[name].add_(pending.corrections[position])

    def _wait(self, pending: _PendingSync) -> None:
        start = self._now()
        self._worker.wait(pending.done)
        self._last_wait = self._now() - start
        self._total_wait += self._last_wait
        if self._times is not None:
            self._times.append((self.covered_steps, start - self._applied_at, self._last_wait))
        self._applied_at = perf_counter()

    def _now(self) -> float:
        """Return the time, in the few rounds that are timed once a device has done all that it was told."""
        device = self._averager.device
        if self._times is not None and device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
        return perf_counter()

    @override
    @contextmanager
    def shared_model(self) -> Iterator[None]:
        if self._away is not None or not self._has_begun:
            yield
            return
        self._worker.settle()  # an exchange that is on its way ends first: the same model on all ranks
        self._away = {}
        for name, tensor in self._tensors().items():
            self._away[name] = tensor.clone()
            tensor.copy_(round_to(self._shared[name], tensor.dtype))
        try:
            yield
        finally:
            tensors = self._tensors()
            for name, tensor in (self._away or {}).items():  # none where the model has been adopted meanwhile
                if name in tensors:
                    tensors[name].copy_(tensor)
            self._away = None

    @property
    @override
    def waited_seconds(self) -> float:
        return self._total_wait

    @override
    def in_stats(self, stats: dict[str, float]) -> dict[str, float]:
        return {**stats, "exposed_seconds": self._last_wait, "local_steps": float(self.covered_steps)}

    @override
    def state_dict(self, together: bool = False) -> dict[str, Any]:
        # No exchange may be in progress. While steps are synchronous, Lightning's file holds all of the one model.
        own: Mapping[str, Tensor] = {}
        written: list[str] = []
        if self._has_begun:
            own = self._tensors() if self._away is None else self._away
            written = [name for name, has_changed in self._have_changed().items() if has_changed]
        pending = self._pending
        rounds = {
            "has_begun": self._has_begun,
            "step": self._step,
            "every": self._every if self._times is None else None,
            "origin": self._origin,
            "steps_of": dict(self._steps_of),
            "begun": self._begun,
            "epoch": self._epoch,
            "seen": (self._samples, self._batches),
            "is_stale": self._is_stale,
            "local": dict(own),
            "beside": self._beside,
            "written": written,
            "unshared": self._to_save(written, together),
            # In Lightning's file the shared model has the type of the parameters.
            "shared": {name: self._shared[name] for name, each in own.items() if widened(each.dtype) is not each.dtype},
            "momentum": dict(self._momenta),
            "pending": None if pending is None else {name: getattr(pending, name) for name in _SAVED},
        }
        return {"rounds": rounds}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where another round stood, with the shared model that the model's tensors hold now."""
        if "rounds" not in state:
            return
        state = state["rounds"]
        self._is_resumed = False
        present = (name for name, _ in self._module.named_parameters())
        if names := [name for name in present if name in state["local"] and name not in state["beside"]]:
            self._know(self._module, names)  # others may be frozen here until training goes on
        for name, tensor in state["local"].items():
            if name in self._shared and self._shared[name].shape != tensor.shape:
                raise ValueError(f"{name!r} has the shape {tuple(self._shared[name].shape)}, not {tuple(tensor.shape)}")
        device = self._averager.device
        self._has_begun = state["has_begun"]
        self._step, self._steps_of = int(state["step"]), dict(state["steps_of"])
        self._origin = int(state["origin"])
        if not isinstance(self._local.every, int) and state["every"] is not None:
            self._every, self._times = int(state["every"]), None
        self._begun, self._is_stale = int(state["begun"]), bool(state["is_stale"])
        self._samples, self._batches = state.get("seen", (0.0, 0.0))
        self._epoch = state.get("epoch", (self._step, 0))
        self._missed_steps = self._skipped = 0
        unshared = self._unshared()
        earlier = {name: state["local"][name] for name in state["beside"] if name in state["local"]}
        for name, tensor in {**earlier, **state["unshared"]}.items():  # versions before shared what is written, too
            if name in unshared and unshared[name].shape == tensor.shape:
                unshared[name].copy_(tensor)
        self._seen = {name: each for name, each in self._fingerprints().items() if name not in state["written"]}
        for name, tensor in self._tensors().items():
            self._shared[name].copy_(state["shared"].get(name, tensor))
            tensor.copy_(state["local"].get(name, tensor))
        self._is_resumed = self._has_begun
        self._momenta = {name: each.to(device, copy=True) for name, each in state["momentum"].items()}
        saved, self._pending = state["pending"], None
        if saved is not None:
            corrections = [each.to(device) for each in saved["corrections"]]
            self._pending = _PendingSync(**{**saved, "corrections": corrections})
            self._pending.done.set()


def _check_agreed(everywhere: Sequence[Sequence[float]]) -> None:
    if any(each != everywhere[0] for each in everywhere):
        raise RuntimeError(
            f"learning rates differ between ranks, {everywhere[0][0]} is that of one: a schedule went by a number"
            " that is each rank's own. Log what it monitors with self.log(..., sync_dist=True)"
        )


def _weight(everywhere: Sequence[tuple[float, float]], rank: int, in_step: int = 1) -> float:
    """Return how much a change counts, 1 on average: by samples, or by batches unless all know their samples.

    So many ranks that train ``in_step`` have one change, which counts by what all of them have seen.

    >>> [_weight([(6, 2), (2, 2)], rank) for rank in (0, 1)]
    [1.5, 0.5]
    >>> [_weight([(math.nan, 3), (2, 1)], rank) for rank in (0, 1)]
    [1.5, 0.5]
    >>> [_weight([(4, 1), (2, 1), (1, 1), (1, 1)], rank, in_step=2) for rank in range(4)]
    [1.5, 1.5, 0.5, 0.5]
    >>> _weight([(0, 0), (0, 0)], rank=0)  # steps without a batch
    1.0
    """
    samples, batches = ([row[column] for row in everywhere] for column in (0, 1))
    counts = batches if math.isnan(math.fsum(samples)) else samples
    total, first = math.fsum(counts), rank - rank % in_step
    return len(counts) / in_step * math.fsum(counts[first : first + in_step]) / total if total else 1.0


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(widened(tensor.dtype), copy=True)


def _difference(one: Tensor, other: Tensor) -> Tensor:
    """Return one less the other; 0 where they are the same infinity."""
    return (one - other).masked_fill_(one == other, 0)


def _as(shared: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the shared model as a parameter of a type holds it, wide: rounding is no change of the parameter."""
    return shared if shared.dtype is dtype else round_to(shared, dtype).to(shared.dtype)
