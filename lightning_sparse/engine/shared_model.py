"""The shared model: what all ranks have between two rounds of local steps, and what each rank's own differs from it by.

The mean of the changes is the gradient of an outer step on it, that of ``torch.optim.SGD``. The module is asked for its
tensors when they are used: it may have others by then, or other names for them.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, compress
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import SGD

from lightning_sparse.engine.memory.residual import Renaming, renamed, widened
from lightning_sparse.engine.replicas import ReplicaAverager, averaged
from lightning_sparse.engine.settings import LocalSteps
from lightning_sparse.engine.step.step import LocalGradient, Pipeline, StepContext
from lightning_sparse.engine.step.worker import ExchangeWorker
from lightning_sparse.engine.wire.base import Payload
from lightning_sparse.functional.elements import flatten_as, local_tensor, round_to, runs
from lightning_sparse.schedule import Schedule


class SharedModel:
    """Tensors of the model that all ranks share, moved by the means of what ranks have changed.

    Buffers of floating point are exchanged with the parameters that are trained. What else ranks write (frozen
    parameters, those that no optimizer has, such as an average's, integers, new buffers) they have alike when a round
    ends early, as before a validation and at the end.

    Attributes:
        optimizer_parameters: returns the parameters of all optimizers; if none is of the model, all of it is trained.
    """

    def __init__(
        self,
        module: Module,
        names: Sequence[str],
        local: LocalSteps,
        pipeline: Pipeline,
        schedule: Schedule,
        worker: ExchangeWorker,
    ) -> None:
        self.module = module
        self._pipeline = pipeline
        self._schedule = schedule
        self._worker = worker
        self._averager = ReplicaAverager(module, pipeline.levels.same_shard)
        self.device = self._averager.device
        self.optimizer_parameters: Callable[[], Collection[Tensor]] = tuple
        self.trained = frozenset(names)  # of the parameters whose changes are exchanged
        self._parameters: dict[str, Tensor] = dict(module.named_parameters())
        self._local = local
        self._momenta: dict[str, Tensor] = {}  # of the mean changes
        self._away: Optional[dict[str, Tensor]] = None  # this rank's own tensors, while the shared ones are shown
        tensors = averaged(self._named())
        buffers = {name for name, _ in self.module.named_buffers()}
        beside = [name for name, tensor in tensors.items() if name in buffers and tensor.is_floating_point()]
        self._shared = {  # parameters that are trained, then what is exchanged beside them
            name: tensors[name].to(widened(tensors[name].dtype), copy=True) for name in (*names, *beside)
        }

    def restarted(self, trained: Sequence[str], names: Renaming) -> "SharedModel":
        """Return the shared model of these parameters, where replicas are the same; some had other names before."""
        parts = (self._local, self._pipeline, self._schedule, self._worker)
        other = SharedModel(self.module, trained, *parts)
        other.optimizer_parameters = self.optimizer_parameters
        other._momenta = renamed(self._momenta, names)
        before = renamed({name: each for name, each in self._shared.items() if name in self.trained}, names)
        other._shared.update({name: each for name, each in before.items() if name in other.trained})
        return other

    def inactive(self) -> frozenset[str]:
        """Return the names of what no optimizer has, or is frozen and has not moved; a device may be waited for.

        Where that rests on all ranks nothing moves it: no momentum, and no residual from before it was frozen.
        """
        frozen = {name for name in self.trained if not self._parameters[name].requires_grad}
        held = {name: each for name, each in self._tensors().items() if name in frozen} if frozen else {}
        return self._left_alone().union(held.keys() - self._moved(held))

    def _moved(self, tensors: Mapping[str, Tensor]) -> set[str]:
        """Return the names of tensors that are not those of the shared model, whoever has written them."""
        flags = [each.ne(round_to(self._shared[name], each.dtype)).any() for name, each in tensors.items()]
        return set(compress(tensors, torch.stack(flags).tolist())) if flags else set()

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        return chain(self.module.named_parameters(), self.module.named_buffers())

    @property
    def _beside(self) -> list[str]:
        """Names of what is exchanged beside the parameters that are trained."""
        return list(self._shared)[len(self.trained) :]

    def _tensors(self) -> dict[str, Tensor]:
        """Return the model's tensors that are shared, but those that it no longer has, or has in another shape.

        A parameter may have another name by now, and another one may have its name.
        """
        present = set(self.module.parameters())
        known: dict[str, Tensor] = {name: each for name, each in self._parameters.items() if each in present}
        known.update((name, each) for name, each in self.module.named_buffers() if name not in known)
        held = {name: local_tensor(each) for name, each in known.items() if name in self._shared}
        held = {name: torch.view_as_real(each) if each.is_complex() else each for name, each in held.items()}
        return {name: tensor for name, tensor in held.items() if tensor.shape == self._shared[name].shape}

    def _left_alone(self) -> frozenset[str]:
        """Return the names of what could be trained and no optimizer has, whose changes are its own way to a value."""
        optimizer_parameters = set(self.optimizer_parameters())
        ours = frozenset(name for name, each in self._parameters.items() if each in optimizer_parameters)
        return self.trained - ours if ours else ours

    def exchanged(self) -> dict[str, Tensor]:
        """Return the tensors that are shared but for those that no optimizer has."""
        left_alone = self._left_alone()
        return {name: tensor for name, tensor in self._tensors().items() if name not in left_alone}

    def _unshared(self) -> dict[str, Tensor]:
        """Return what ranks may write without an optimizer: frozen parameters, integers, buffers that have changed."""
        known = self.trained | self._tensors().keys()
        return {name: tensor for name, tensor in averaged(self._named()).items() if name not in known}

    def has_moved(self) -> bool:
        """Tell whether what is trained is not that of the shared model, whoever has written it; a device is waited for.

        An exchange of nothing would move the shared model, too, by its momentum.
        """
        return bool(self._moved({name: each for name, each in self.exchanged().items() if name in self.trained}))

    def reset_shared_model(self, all_of_it: bool = True) -> None:
        """Share the model that there is now, averaged over ranks, or only what of it is trained; all must call."""
        adopted = {name: each for name, each in averaged(self._named()).items() if all_of_it or name in self.trained}
        self._worker.run(lambda: self._averager.average(adopted))
        self._away = None
        for name, tensor in self._tensors().items():
            if name in adopted:
                shared = self._shared[name]  # where a narrow tensor is what it rounds to, it stays as it is
                shared.copy_(torch.where(_as(shared, tensor.dtype) == tensor, shared, tensor))

    def exchange(self, inactive: frozenset[str], context: StepContext, steps: int) -> None:
        """Exchange what this rank's tensors have changed by in so many steps, and go on from the shared model.

        A tensor that the model no longer has is taken for unchanged: ranks exchange the same names.
        """
        present, recorder = self.exchanged(), self._pipeline.recorder
        now = [flatten_as(present.get(name, shared), shared) for name, shared in self._shared.items()]
        before = [self._before(name, each.dtype) for name, each in zip(self._shared, now)]
        changes = dict(zip(self._shared, _differences(before, now)))
        with recorder.waiting():
            self._worker.run(partial(self._move, changes, inactive, context, steps))
        if present:
            shared = [round_to(self._shared[name], tensor.dtype) for name, tensor in present.items()]
            torch._foreach_copy_(list(present.values()), shared)

    def _before(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a tensor of the shared model, flat, as one of a type holds it."""
        before = _as(flatten_as(self._shared[name]), dtype)
        # Of what is not trained the mean may be finite, and nothing finite leads there from an infinity.
        return before if name in self.trained else before.nan_to_num(0, 0, 0)

    def _move(self, changes: Mapping[str, Tensor], inactive: frozenset[str], context: StepContext, steps: int) -> None:
        """Exchange changes, and move the shared model by their mean; on the worker."""
        pipeline = self._pipeline
        pipeline.context = context
        moving = {name: each for name, each in changes.items() if name in self.trained and name not in inactive}
        gradients = [LocalGradient(name, part, None) for name, part in moving.items()]
        pipeline.commit(pipeline.exchange_in_buckets(gradients, self._schedule.closes_bucket))
        self._move_beside([changes[name] for name in self._beside])
        self._step(moving)
        pipeline.recorder.current.covered_steps = steps
        pipeline.selector.release()  # the next exchange is many steps away: what is not in use is given back
        pipeline.close_record()
        pipeline.recorder.samples = None  # who asked may have looked by now, and then asks for the next

    def _move_beside(self, changes: Sequence[Tensor]) -> None:
        """Average changes of what is not trained, all of each, whatever the compressor, and apply them as they are."""
        if not changes:
            return
        replicas = self._pipeline.levels.same_shard
        means = replicas.call(Payload("all_reduce", torch.cat(list(changes)).div_(replicas.world_size)))
        for name, mean in zip(self._beside, means.split([change.numel() for change in changes])):
            flatten_as(self._shared[name]).nan_to_num_(0, 0, 0).sub_(mean)

    def _step(self, means: Mapping[str, Tensor]) -> None:
        """Move the shared model by mean changes as if these were gradients, by ``torch.optim.SGD``."""
        how, momentum = self._local, "momentum_buffer"
        parts = [flatten_as(self._shared[name]) for name in means]
        # Made for each round, as an optimizer knows its tensors by identity. All at once only where calls count more
        # than the memory of a step of all of them.
        is_together = self.device.type != "cpu"
        outer = SGD([{"params": parts}], how.outer_lr, how.outer_momentum, nesterov=how.nesterov, foreach=is_together)
        for part, (name, mean) in zip(parts, means.items()):
            part.grad, outer.state[part][momentum] = mean, self._momenta.get(name)
        outer.step()
        outer.zero_grad()
        if how.outer_momentum:
            self._momenta.update({name: outer.state[part][momentum] for name, part in zip(means, parts)})

    def unify_rest(self) -> None:
        """Have all ranks hold the same of what is not trained; all must call."""
        trained = self.trained.intersection(self.exchanged())
        rest = {name: tensor for name, tensor in averaged(self._named()).items() if name not in trained}
        self._worker.run(lambda: self._averager.average(rest))
        for name in self._beside:
            if name in rest and rest[name].shape == self._shared[name].shape:
                self._shared[name].copy_(rest[name])

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Have the model hold the shared tensors inside."""
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
        """Show the shared tensors no more: have the model hold this rank's ``own`` again, or stay as it is."""
        tensors = self._tensors()
        for name, tensor in (self._away or {}).items():  # none where the model has been adopted meanwhile
            if own and name in tensors:
                tensors[name].copy_(tensor)
        self._away = None

    def state(self, has_begun: bool, together: bool) -> dict[str, Any]:
        """Return what this rank keeps, not copied; of one model, before rounds begin, Lightning's file holds all."""
        own = {**self._tensors(), **(self._away or {})} if has_begun else {}
        unshared: dict[str, Tensor] = {}
        if has_begun and together:
            unshared = self._unshared()
            # Also on a rank that has not written it: Lightning's file has what rank 0 wrote.
            differing = self._worker.run(lambda: self._averager.differing(unshared))
            unshared = {name: unshared[name] for name in differing}
        return {
            "local": own,
            "beside": self._beside,
            "unshared": unshared,
            # In Lightning's file the shared model has the type of the parameters.
            "shared": {name: self._shared[name] for name, each in own.items() if widened(each.dtype) is not each.dtype},
            "momentum": dict(self._momenta),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, with the shared model that the model's tensors hold now."""
        if state["local"]:
            # What a first forward has given another shape, and is each rank's own, has that shape from the start here.
            known = self.trained | state["local"].keys()
            self._shared = {name: each for name, each in self._shared.items() if name in known}
        for name, tensor in state["local"].items():
            if name in self._shared and self._shared[name].shape != tensor.shape:
                raise ValueError(f"{name!r} has the shape {tuple(self._shared[name].shape)}, not {tuple(tensor.shape)}")
        unshared = self._unshared()
        for name, tensor in state["unshared"].items():
            if name in unshared and unshared[name].shape == tensor.shape:
                unshared[name].copy_(tensor)
        for name, tensor in self._tensors().items():
            self._shared[name].copy_(state["shared"].get(name, tensor))
            tensor.copy_(state["local"].get(name, tensor))
        self._momenta = {name: each.to(self.device, copy=True) for name, each in state["momentum"].items()}


def _differences(ones: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """Return flat tensors less others; 0 where they are the same infinity."""
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(other.dtype for other in others):
        alike = [place for place, other in enumerate(others) if other.dtype is dtype]
        for first, stop, flat in runs([ones[place] for place in alike]):
            some = alike[first:stop]
            other = others[some[0]] if len(some) == 1 else torch.cat([others[place] for place in some])
            difference = (flat - other).masked_fill_(flat == other, 0)
            found.update(zip(some, difference.split([others[place].numel() for place in some])))
    return [found[place] for place in range(len(ones))]


def _as(shared: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the shared model as a parameter of a type holds it, wide: rounding is no change of the parameter."""
    return shared if shared.dtype is dtype else round_to(shared, dtype).to(shared.dtype)
