"""Rounds of local steps: each rank trains alone for several steps, then ranks exchange changes of parameters.

An exchange compresses changes like gradients, with a compressor and error feedback. The mean change over ranks is the
gradient of an outer step, which moves the shared model. Dense changes make local SGD (Stich, arXiv 1805.09767). An
outer Nesterov momentum makes DiLoCo (Douillard et al., arXiv 2311.08105). Top-k and error feedback make SparseLoCo
(Sarfi et al., arXiv 2508.15706). This package averages over all ranks, as in SparseLoCo's paper. SparseLoCo's released
code divides an element's sum by the number of ranks that sent the element.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any, Optional

import torch
from torch import Tensor
from torch._utils import _take_tensors
from torch.nn import Module
from typing_extensions import override

from lightning_sparse.engine.collectives import ExchangeWorker
from lightning_sparse.engine.memory import Renaming, renamed, widened
from lightning_sparse.engine.replicas import ReplicaAverager, Replicas, averaged
from lightning_sparse.engine.settings import LocalSteps
from lightning_sparse.engine.step.step import Pipeline
from lightning_sparse.engine.step.topology import LocalGradient
from lightning_sparse.functional.elements import flatten_as, local_tensor, round_to

_BUCKET_BYTES = 1 << 25  # bytes of changes in a bucket; nothing overlaps, so buckets only limit the memory
_UNEQUAL = (
    "ranks differ in the number of steps: rank {first} has made {0} optimizer steps{1}, but rank {other} has made"
    " {2}{3}. A round of local steps must end on all ranks after the same step. Give all ranks equally many batches,"
    " as with ddp"
)
_ENDS = ("", " and has reached a validation or the end")


class LocalStepsController(Replicas):
    """Count local steps, and exchange changes of parameters after each round. Call ``begin`` before each exchange."""

    def __init__(self, shared: "SharedModel", begin: Callable[[], None] = lambda: None) -> None:
        self.shared = shared
        self._begin = begin
        self._steps_of: dict[int, int] = {}  # number of steps, by index of the optimizer
        self._begun: dict[int, int] = {}  # these numbers when the round began
        self.has_begun = False

    @property
    def is_shared(self) -> bool:
        """Whether all ranks' trained parameters equal the shared model: no optimizer has stepped in this round."""
        return not self.has_begun or self._steps_of == self._begun

    @property
    def _steps(self) -> int:  # number of steps in the round, of the optimizer with the most steps
        return max(self._steps_of.values(), default=0) - max(self._begun.values(), default=0)

    def restart(self, trained: Sequence[str], names: Renaming) -> None:
        """End the round early, and exchange changes of ``trained`` parameters from now on. All ranks must call this.

        Args:
            trained: names of the parameters to exchange.
            names: new name of each earlier parameter, or ``None`` if the model has lost the parameter.
        """
        self.synchronize()
        self.shared = self.shared.restarted(trained, names)

    def begin_round(self) -> None:
        """Begin the first round of local steps, unless a round has begun. All ranks must call this."""
        if self.shared.is_shown:
            raise RuntimeError("steps inside shared_model() would be lost: exit the context before training")
        if not self.has_begun:
            self.has_begun = True
            self.reset_shared_model()

    def leave(self) -> None:
        """Drop this round's changes of parameters, because a checkpoint will be loaded. All ranks must call this."""
        self.shared.swap_out(own=False)
        self.has_begun = False

    @override
    def reset_shared_model(self) -> None:
        """Set the shared model to the mean of all ranks' models, and restart the round. All ranks must call this."""
        if self.has_begun:
            self.shared.reset_shared_model()
            self._begun = dict(self._steps_of)

    @override
    def count_step(self, optimizer: int) -> None:
        """Count a step of an optimizer, and exchange changes at the end of a round.

        The optimizer with the most steps sets the length of a round. Steps that a gradient scaler skips count, too.
        """
        self._steps_of[optimizer] = self._steps_of.get(optimizer, 0) + 1
        if self._steps >= self.shared.local.every:
            self._exchange(self._meet(ends=False))

    @override
    def synchronize(self) -> None:
        """End the round early: exchange changes, and set all ranks to the shared model. All ranks must call this."""
        if not self.has_begun:
            return
        self.shared.swap_out()  # Inside shared_model() the module has the shared model: restore this rank's tensors.
        if moved := self._meet(ends=True):
            self._exchange(moved)
        self.shared.unify_rest()
        self._begun = dict(self._steps_of)

    def _meet(self, ends: bool) -> set[str]:
        """Compare step counts. Return the names of parameters that any rank has moved."""
        moved, step = self.shared.moved(), max(self._steps_of.values(), default=0)
        flags = torch.stack(list(moved.values()))
        mine = torch.cat([torch.tensor([step, ends]).to(flags.device, non_blocking=True), flags])
        gathered = self.shared.gather_numbers(mine).tolist()
        places = [(int(step), _ENDS[int(has_ended)]) for step, has_ended, *_ in gathered]
        if other := next((rank for rank, place in enumerate(places) if place != places[0]), 0):
            raise RuntimeError(_UNEQUAL.format(*places[0], *places[other], first=0, other=other))
        return {name for name, *each in zip(moved, *(row[2:] for row in gathered)) if any(each)}

    def _exchange(self, moved: set[str]) -> None:
        steps, self._begun = self._steps, dict(self._steps_of)
        self._begin()
        self.shared.exchange(moved, steps)

    @override
    @contextmanager
    def shared_model(self) -> Iterator[None]:
        if not self.has_begun:
            yield
            return
        with self.shared.shown():
            yield

    @override
    def statistics(self, steps: int) -> dict[str, float]:
        return {"local_steps": float(steps)}

    @override
    def state_dict(self, together: bool = False) -> dict[str, Any]:
        # A save does not end the round. Early ends raise the loss: two per round raised the final loss of a small GPT
        # by 1.6 to 4.5 % (measured with DiLoCo's outer momentum, 300 steps, three seeds).
        steps = {"steps_of": dict(self._steps_of), "begun": dict(self._begun)}
        return {"rounds": {"has_begun": self.has_begun, **steps, **self.shared.state(self.has_begun, together)}}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a saved round. The module must have the values of the shared model."""
        if "rounds" not in state:
            return
        state = state["rounds"]
        self.shared.load(state)
        self.has_begun = state["has_begun"]
        self._steps_of, self._begun = dict(state["steps_of"]), dict(state["begun"])


class SharedModel:
    """Copies of trained parameters, equal on all ranks. Each exchange moves the copies by the ranks' mean change.

    All ranks hold these values between two rounds. A module may replace or rename tensors, so each method looks up
    tensors.

    Ranks may also write other tensors: buffers, frozen parameters, parameters without an optimizer. Other tensors
    become equal on all ranks when a round ends early: before a validation, and at the end of the training.
    """

    def __init__(
        self,
        module: Module,
        names: Sequence[str],
        local: LocalSteps,
        pipeline: Pipeline,
        worker: ExchangeWorker,
    ) -> None:
        self.module = module
        self._pipeline = pipeline
        self._worker = worker
        self._averager = ReplicaAverager(module, pipeline.levels.same_shard)
        self._parameters: dict[str, Tensor] = dict(module.named_parameters())
        self.local = local
        self._momenta: dict[str, Tensor] = {}  # momentum of the outer step, by parameter name
        self._away: Optional[dict[str, Tensor]] = None  # copies of this rank's tensors while shown() is active
        tensors = averaged(module)
        # values of the shared model in fp32 or wider, by name of the trained parameter
        self._shared = {name: tensors[name].to(widened(tensors[name].dtype), copy=True) for name in names}

    @property
    def is_shown(self) -> bool:
        """Whether the context :meth:`shown` is active."""
        return self._away is not None

    def restarted(self, trained: Sequence[str], names: Renaming) -> "SharedModel":
        """Return a shared model for other trained parameters. Call this only while replicas are equal.

        Args:
            trained: names of the parameters to exchange.
            names: new name of each earlier parameter.
        """
        other = SharedModel(self.module, trained, self.local, self._pipeline, self._worker)
        other._momenta = renamed(self._momenta, names)
        before = renamed(self._shared, names)
        other._shared.update({name: each for name, each in before.items() if name in other._shared})
        return other

    def moved(self) -> dict[str, Tensor]:
        """Return a flag for each parameter, bool ``[]``: whether this rank's tensor differs from the shared value.

        An exchange omits a parameter that no rank has moved. Neither outer momentum nor an old residual then changes
        the parameter. Every rank returns a flag for every parameter, and false for an empty shard.
        """
        held = self.exchanged().items()
        moved = {name: each.ne(round_to(self._shared[name], each.dtype)).any() for name, each in held}
        is_unmoved = torch.zeros((), dtype=torch.bool, device=self._averager.device)
        return {name: moved.get(name, is_unmoved) for name in self._parameters}

    def gather_numbers(self, numbers: Tensor) -> Tensor:
        """Gather numbers from every rank of the job, as ``[world_size, len(numbers)]``."""
        return self._worker.run(partial(self._pipeline.levels.world.gather_numbers, numbers))

    def exchanged(self) -> dict[str, Tensor]:
        """Return the module's parameters that the shared model includes.

        Parameters are matched by identity, because a renamed parameter's old name may now belong to another parameter.
        """
        present = set(self.module.parameters())
        known = {name: each for name, each in self._parameters.items() if each in present}
        return {name: local_tensor(each) for name, each in known.items() if name in self._shared}

    def _rest(self) -> dict[str, Tensor]:
        """Return the tensors that no exchange includes. A rank may have written such tensors without an optimizer."""
        exchanged = self.exchanged()
        return {name: tensor for name, tensor in averaged(self.module).items() if name not in exchanged}

    def reset_shared_model(self) -> None:
        """Average the ranks' models, and set the shared model to the mean. All ranks must call this."""
        self._worker.run(self._averager.average)
        self._away = None
        for name, tensor in self.exchanged().items():
            shared = self._shared[name]  # fp32 values that round to the module's values do not change
            shared.copy_(torch.where(round_to(shared, tensor.dtype) == tensor, shared, tensor))

    def exchange(self, moved: Set[str], steps: int) -> None:
        """Exchange this rank's changes, and set the module to the new shared model.

        All ranks must exchange the same names. A tensor that the module has lost is sent as a change of zero.

        Args:
            moved: names of parameters that have changed on at least one rank.
            steps: number of optimizer steps since the last exchange.
        """
        present, shared = self.exchanged(), self._shared
        with self._pipeline.recorder.waiting():
            changes = {name: _change(each, present.get(name, each)) for name, each in shared.items() if name in moved}
            self._worker.run(partial(self._move, changes, steps))
            if present:
                rounded = [round_to(shared[name], tensor.dtype) for name, tensor in present.items()]
                torch._foreach_copy_(list(present.values()), rounded)

    def _move(self, changes: Mapping[str, Tensor], steps: int) -> None:
        """Exchange changes, and apply the mean changes to the shared model. Runs on the worker thread."""
        pipeline = self._pipeline
        pipeline.commit([each for bucket in _buckets(changes) for each in pipeline.exchange(bucket)])
        self._step(changes)
        pipeline.recorder.current.covered_steps = steps
        pipeline.selector.release()  # frees working memory until the next exchange, many steps later
        pipeline.close_record()
        pipeline.recorder.samples = None  # Each request for samples covers one exchange.

    def _step(self, means: Mapping[str, Tensor]) -> None:
        """Make a step of SGD on the shared model, with ``means`` as gradients, as ``torch.optim.SGD`` does."""
        factor, momenta = self.local.outer_momentum, self._momenta
        for name, mean in means.items():
            update = mean
            if factor:
                momenta[name] = momenta[name].mul_(factor).add_(mean) if name in momenta else mean
                update = mean.add(momenta[name], alpha=factor) if self.local.nesterov else momenta[name]
            flatten_as(self._shared[name]).add_(update, alpha=-self.local.outer_lr)

    def unify_rest(self) -> None:
        """Make all tensors except exchanged parameters equal on all ranks. All ranks must call this."""
        self._worker.run(lambda: self._averager.average(self._rest()))

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Set the module to the values of the shared model inside the context."""
        if self._away is not None:
            yield
            return
        self._away = {}
        for name, tensor in self.exchanged().items():
            self._away[name] = tensor.clone()
            tensor.copy_(round_to(self._shared[name], tensor.dtype))
        try:
            yield
        finally:
            self.swap_out()

    def swap_out(self, own: bool = True) -> None:
        """End the context :meth:`shown`. If ``own``, restore this rank's tensors. Otherwise change no tensor."""
        tensors = self.exchanged()
        for name, tensor in (self._away or {}).items():  # ``None`` after reset_shared_model()
            if own and name in tensors:
                tensors[name].copy_(tensor)
        self._away = None

    def state(self, has_begun: bool, together: bool) -> dict[str, Any]:
        """Return this rank's state, without copies. Before rounds begin, the state has no tensors."""
        own = {**self.exchanged(), **(self._away or {})} if has_begun else {}
        unshared: dict[str, Tensor] = {}
        if has_begun and together:
            unshared = self._rest()
            # Every rank saves the tensors that differ between ranks. The model's checkpoint has only rank 0's values.
            differing = self._worker.run(lambda: self._averager.differing(unshared))
            unshared = {name: unshared[name] for name in differing}
        return {
            "local": own,
            "unshared": unshared,
            # The model's checkpoint has rounded values of the shared model. This state has the fp32 values.
            "shared": {name: self._shared[name] for name, each in own.items() if widened(each.dtype) is not each.dtype},
            "momentum": dict(self._momenta),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state of :meth:`state`. The module must already have the values of the shared model."""
        rest = self._rest()
        for name, tensor in state["unshared"].items():
            if name in rest and rest[name].shape == tensor.shape:
                rest[name].copy_(tensor)
        for name, tensor in self.exchanged().items():
            self._shared[name].copy_(state["shared"].get(name, tensor))
            tensor.copy_(state["local"].get(name, tensor))
        self._momenta = {name: each.to(self._averager.device, copy=True) for name, each in state["momentum"].items()}


def _change(shared: Tensor, tensor: Tensor) -> Tensor:
    """Return ``shared - tensor``, flat, after rounding ``shared`` to the dtype of the module's ``tensor``."""
    now = flatten_as(tensor, shared)
    before = round_to(flatten_as(shared), now.dtype).to(shared.dtype)
    return (before - now).masked_fill_(before == now, 0)  # equal infinities have the difference 0


def _buckets(changes: Mapping[str, Tensor]) -> Iterator[list[LocalGradient]]:
    names = {change: name for name, change in changes.items()}
    for alike in _take_tensors(list(names), _BUCKET_BYTES):  # Tensors of a bucket have one dtype.
        yield [LocalGradient(names[each], each, None) for each in alike]
