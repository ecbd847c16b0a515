"""A view of the optimizers: their settings, the momentum that the memory takes over, and the step in progress."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain
from typing import Any, Optional

from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module, Parameter
from torch.optim import ASGD, SGD, Optimizer

from lightning_sparse.compressors.base import FROM_OPTIMIZER, Clipping, ErrorFeedback
from lightning_sparse.engine.adam.correction import AdamCorrection
from lightning_sparse.engine.adam.memory import AdamMemory
from lightning_sparse.engine.adam.steps import AdamSteps, is_correctable
from lightning_sparse.engine.memory.residual import Hyperparameters, Memory
from lightning_sparse.engine.settings import Settings
from lightning_sparse.engine.step.reducer import after_closure
from lightning_sparse.engine.step.step import StepContext
from lightning_sparse.functional.elements import local_tensor
from lightning_sparse.loop.summary import UNCOUNTED, UNCOUNTED_BATCHES, warning_for

_CURE = (
    "choose torch.optim.SGD, or a memory without momentum: no MomentumCorrection among the callbacks, and"
    " compressor=DGC(momentum=None) or SDAGC(momentum=None)"
)
_CORRECTED = "have Adam's updates made before selection (optimizer_correction='auto', and a density below 1), or "
_MIXED = "have Adam and AdamW train all of the model, whose updates are made before selection if they are alone, or "
_TWO_NORMS = (
    "parameters of {names} are to be clipped by one norm: of Adam's what has arrived are updates, of others gradients."
    " Clip those of each optimizer by themselves, as by clip(norm=1.0, optimizer=optimizer), or leave Adam uncorrected"
    " (optimizer_correction=None)"
)
_SHOWN = 5  # names in a message
_NO_OPTIMIZER = Hyperparameters(float("nan"))  # when one begins to handle a parameter, that is no change of rate
# By the names of what they are given: moments, an average of squares, a small number that keeps a quotient finite,
# steps that follow signs (Rprop), or how many gradients a curvature is learned from (LBFGS).
_SIGNS_OF_LEARNING = frozenset({"betas", "beta2", "alpha", "rho", "eps", "etas", "history_size"})
_LINEAR = (SGD, ASGD)
_SECOND_MOMENTS = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_inf", "sum"})


class OptimizerView:
    """Read hyperparameters by parameter name, and hold the optimizers' momentum where the memory accumulates it.

    An optimizer without momentum applies weight decay without it, too, which is weaker by ``1 - momentum``: meanwhile
    weight decay is divided by that. Both are away only while an optimizer updates, after its closure, so that whoever
    looks finds what the user chose. Optimizers that cannot go with ``feedback`` are refused; without a memory nothing
    else is done. ``adam`` is the corrected optimizers' part of a step; ``None`` where there is none.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        optimizers: Sequence[Optimizer],
        feedback: ErrorFeedback,
        target_of: Callable[[str], float] = lambda name: 1.0,
        memory: Optional[Memory] = None,
    ) -> None:
        self._optimizers = optimizers
        self._feedback = feedback
        self.adam: Optional[AdamSteps] = None
        if isinstance(memory, AdamMemory):
            corrected = list(filter(is_correctable, optimizers))
            self.adam = AdamSteps(corrected, {}, target_of, memory, feedback.clip_norm)
        self.know(parameters)
        self._taken: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []  # groups, theirs, for the update
        self._handles: list[Any] = []
        if feedback.momentum is not None:
            cure = _CORRECTED if all(map(is_correctable, optimizers)) else _MIXED
            for optimizer in optimizers:
                _check(optimizer, feedback, parameters.values(), cure)
        if self.takes_momentum:
            for optimizer in optimizers:
                self._handles.append(optimizer.register_step_pre_hook(after_closure(self._take)))
                self._handles.append(optimizer.register_step_post_hook(self._give_back))
                self._handles.append(optimizer.register_state_dict_pre_hook(self._give_back))

    @property
    def takes_momentum(self) -> bool:
        """Whether the optimizers' momentum is taken over."""
        return self._feedback.momentum == FROM_OPTIMIZER

    def know(self, parameters: Mapping[str, Parameter]) -> None:
        """Record the parameters that the model has now, by name."""
        self._names = {parameter: name for name, parameter in parameters.items()}
        if self.adam is not None:
            self.adam.counts.know(self._names)

    def next_step(
        self,
        is_dense: bool = False,
        continued: AbstractSet[Tensor] = frozenset(),
        begun: AbstractSet[Tensor] = frozenset(),
    ) -> StepContext:
        """Return what the exchange has to know of the coming step.

        Those in ``begun`` have had one before in it, and gradients of those in ``continued`` hold what that brought.
        """
        next_step = StepContext() if self.adam is None else self.adam.next_step(is_dense, continued, begun)
        return next_step._replace(hyperparameters={**self.hyperparameters(continued), **next_step.hyperparameters})

    def hyperparameters(self, continued: AbstractSet[Tensor] = frozenset()) -> dict[str, Hyperparameters]:
        """Return them for the coming step, by parameter name; empty where the memory has no use for them."""
        if self._feedback.momentum is None and not self._feedback.rescale_on_lr_change:
            return {}
        self._give_back()  # an update that failed, or a closure that is called twice, has left it taken
        found = dict.fromkeys(self._names.values(), _NO_OPTIMIZER)
        for group in chain.from_iterable(optimizer.param_groups for optimizer in self._optimizers):
            if self.takes_momentum:
                momentum = group["momentum"], group["nesterov"]
            else:
                momentum = float(self._feedback.momentum or 0.0), self._feedback.nesterov
            settings = Hyperparameters(group["lr"], *momentum)
            found.update(
                (self._names[parameter], settings._replace(continues_step=parameter in continued))
                for parameter in group["params"]
                if parameter in self._names
            )
        return found

    def check_one_norm(self, parameters: Iterable[Tensor]) -> None:
        """Refuse to clip parameters by one norm of which some have updates in the place of gradients, and some not."""
        given = set(parameters)
        clipped = [each for each in self._optimizers if not given.isdisjoint(optimizer_parameters(each))]
        kinds = {self.adam is not None and is_correctable(each) for each in clipped}
        if len(kinds) > 1:
            raise ValueError(_TWO_NORMS.format(names=listed([type(each).__name__ for each in clipped])))

    @contextmanager
    def clipped_before(self, clipping: Clipping, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Have the next gradients clipped that updates are made of, and keep those updates out of sight meanwhile."""
        if self.adam is not None:
            self.adam.clips.ask(clipping, parameters)
        with nullcontext() if self.adam is None else self.adam.hidden():
            yield

    def note_arrived(self) -> None:
        """Know gradients that updates stand in, as the exchange has left them."""
        if self.adam is not None:
            self.adam.note_arrived()

    def close(self) -> None:
        """Give back what a step that failed has left taken, and take nothing any more."""
        if self.adam is not None:
            self.adam.close()
        for handle in self._handles:
            handle.remove()
        self._give_back()

    def _take(self, optimizer: Optimizer) -> None:
        self._give_back()  # what an update that failed has left taken
        for group in optimizer.param_groups:
            if momentum := group["momentum"]:
                own = {name: group[name] for name in ("momentum", "nesterov", "weight_decay")}
                meanwhile = {"momentum": 0.0, "nesterov": False, "weight_decay": own["weight_decay"] / (1 - momentum)}
                self._taken.append((group, own, meanwhile))
                group.update(meanwhile)

    def _give_back(self, *step: Any) -> None:
        """Give back what is still as it was taken: hooks of others may have set something else meanwhile."""
        for group, own, meanwhile in self._taken:
            group.update({name: own[name] for name in own if group[name] == meanwhile[name]})
        self._taken.clear()


class CountedSteps:
    """Hear of each step of optimizers, whoever makes it, and of weights that change without one.

    ``begin`` is called before a step, and ``end`` after one that counts, with the optimizer of those that are given.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        begin: Callable[[], None],
        end: Callable[[Optimizer], None],
        warn: Callable[[str], None],
    ) -> None:
        self._begin = begin
        self._end = end
        self._warn = warn
        self._stepping: Any = None  # who has begun a step: an optimizer, or this
        self._versions, self._uncounted = 0, 0  # of the weights; batches that have changed them without a step
        self._optimizers = optimizers
        self.handles: list[Any] = []  # that are removed at the end
        for optimizer in optimizers:
            for each in chain_of(optimizer):
                if calls_hooks(each):
                    self.handles.append(each.register_step_pre_hook(self._before))
                    self.handles.append(each.register_step_post_hook(partial(self._after, optimizer)))

    @contextmanager
    def step_of(self, optimizer: Optimizer) -> Iterator[None]:
        """Make an optimizer's step inside, which a scaler may skip, and end the step."""
        self._stepping = self
        try:
            yield
        finally:
            self._stepping = None
        self._end_step(optimizer)

    def _before(self, optimizer: Optimizer, *step: Any) -> None:
        self._begin()
        self._stepping = self._stepping or optimizer

    def _after(self, own: Optimizer, stepped: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """End a step, made outside of :meth:`step_of`, of an optimizer of ours, or of one inside it."""
        if self._stepping is not stepped:
            return
        self._stepping = None
        if not is_torchs_own(stepped, kwargs):
            self._end_step(own)

    def _end_step(self, optimizer: Optimizer) -> None:
        self._uncounted = 0
        self._end(optimizer)

    def count_skipped(self, scaler: GradScaler) -> None:
        """Count also steps that a scaler leaves out, on one rank maybe: rounds begin and end on all ranks."""
        step = scaler.step

        def counted(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            inside = unwrapped(optimizer)
            with self.step_of(inside) if any(each is inside for each in self._optimizers) else nullcontext():
                return step(optimizer, *args, **kwargs)

        scaler.step = counted  # type: ignore[method-assign]

    def see_weights(self, module: Module) -> None:
        """Warn where batch after batch changes the weights, and no step that is counted has."""
        versions = sum(each._version for each in module.parameters() if each.requires_grad)
        self._versions, before = versions, self._versions
        self._uncounted += versions != before
        if self._uncounted == UNCOUNTED_BATCHES and versions != before:
            self._warn(UNCOUNTED)

    def close(self) -> None:
        """Hear no more."""
        self._optimizers = ()
        for handle in self.handles:
            handle.remove()


def listed(names: Sequence[object]) -> str:
    """Name the first few, and count the others.

    Example::

        >>> listed(["a", "b"]), listed(["a", "b", "c", "d", "e", "f"])
        ("'a', 'b'", "'a', 'b', 'c', 'd', 'e' and 1 more")
    """
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def is_adaptive(optimizer: Optimizer) -> bool:
    """Return whether an optimizer learns something from gradients, or from their signs, but their mean.

    Told by its class for those of torch that do not, and for all others, of any library, by the names of their
    settings, or of those of an optimizer inside.
    """
    *_, optimizer = chain_of(optimizer)
    return not isinstance(optimizer, _LINEAR) and not _SIGNS_OF_LEARNING.isdisjoint(optimizer.defaults)


def warn_of_adaptive(settings: Settings, optimizers: Sequence[Optimizer], warn: Callable[[str], None]) -> list[Any]:
    """Warn of those that learn from sparse gradients; return hooks on those of which only what they keep will tell."""
    hooks = []
    for optimizer in optimizers if settings.is_sparse else ():
        if settings.adam is not None and is_correctable(optimizer):
            continue
        if is_adaptive(optimizer):
            warn(warning_for(optimizer))
        elif calls_hooks(inside := chain_of(optimizer)[-1]):
            hooks.append(_warn_after_step(optimizer, inside, warn))
    return hooks


def _warn_after_step(optimizer: Optimizer, inside: Optimizer, warn: Callable[[str], None]) -> Any:
    """Warn of an optimizer once the one inside of it keeps something, if that is a second moment."""
    found = list[bool]()  # a hook that removed itself would end the step in an error where another comes after it

    def look(*step: Any) -> None:
        if not found and (keeps := keeps_second_moment(inside)) is not None:
            found.append(keeps)
            if keeps:
                warn(warning_for(optimizer))

    return inside.register_step_post_hook(look)


def keeps_second_moment(optimizer: Optimizer) -> Optional[bool]:
    """Return whether an optimizer keeps an average of squares; ``None`` before it keeps anything."""
    kept = {key for state in chain_of(optimizer)[-1].state.values() if isinstance(state, dict) for key in state}
    return None if not kept else not _SECOND_MOMENTS.isdisjoint(kept)


def calls_hooks(optimizer: Optimizer) -> bool:
    """Return whether an optimizer calls hooks around its steps, as torch's do; wrappers of other packages may not."""
    with suppress(AttributeError):
        optimizer.register_step_post_hook(lambda *step: None).remove()
        return True
    return False


def chain_of(optimizer: Any) -> list[Any]:
    """Return an optimizer, and those that it wraps one inside of the other."""
    chain: list[Any] = []
    while isinstance(optimizer, Optimizer) and not any(each is optimizer for each in chain):
        chain.append(optimizer)
        optimizer = next((each for each in vars(optimizer).values() if isinstance(each, Optimizer)), None)
    return chain


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that makes the steps, whose hooks are called."""
    while isinstance(optimizer, Optimizer) and isinstance(inside := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inside
    return optimizer


def can_correct(settings: Settings, optimizers: Sequence[Optimizer]) -> bool:
    """Return whether Adam's updates can be made before selection; refuse if that was asked for, and cannot be."""
    if isinstance(settings.optimizer_correction, AdamCorrection):
        _check_correctable(optimizers)
    are_correctable = list(map(is_correctable, optimizers))
    corrects = any(are_correctable) if settings.asked.momentum is None else all(are_correctable)
    return corrects and bool(optimizers) and settings.can_correct_adam


def _check_correctable(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers of which one learns how large gradients are and cannot be corrected, or none can be."""
    refused = [each for each in optimizers if not is_correctable(each)]
    if any(map(is_adaptive, refused)) or len(refused) == len(optimizers):
        names = ", ".join(type(each).__name__ for each in refused)
        raise ValueError(
            f"optimizer_correction=AdamCorrection(...) was given, but {names} cannot be corrected: choose"
            " torch.optim.AdamW or torch.optim.Adam (not differentiable, and with their own step), or"
            " optimizer_correction='auto', which warns of optimizers that learn from sparse gradients"
        )


def is_torchs_own(optimizer: Optimizer, kwargs: Mapping[str, Any]) -> bool:
    """Tell the step of zeros that torch's sharded checkpoints make, to have states to load into, from a training's."""
    if kwargs.get("closure", kwargs) is not None or any(group["lr"] for group in optimizer.param_groups):
        return False
    gradients = (each.grad for each in optimizer_parameters(optimizer) if each.grad is not None)
    return not any(local_tensor(each).any() for each in gradients)  # a device is asked only if all else speaks for it


def before_step_of_training(act: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook before an optimizer's steps that is what ``act`` is, but nothing before torch's own."""

    def hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None if is_torchs_own(optimizer, kwargs) else act(optimizer, args, kwargs)

    return hook


def optimizer_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that an optimizer trains."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def all_optimizer_parameters(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Return the parameters that optimizers train."""
    return list(chain.from_iterable(map(optimizer_parameters, optimizers)))


def _check(optimizer: Optimizer, feedback: ErrorFeedback, parameters: Iterable[Tensor], of_adam: str) -> None:
    name = type(optimizer).__name__
    if not isinstance(optimizer, SGD) and set(parameters).isdisjoint(
        optimizer_parameters(optimizer)
    ):  # Lightning's stand-in
        raise ValueError(
            f"momentum={feedback.momentum!r} accumulates momentum before compression, in place of the momentum of SGD,"
            f" and no optimizer trains this model: return one from configure_optimizers, and {_CURE}"
        )
    if not isinstance(optimizer, SGD):
        corrects = feedback.momentum == FROM_OPTIMIZER and is_correctable(optimizer)
        raise ValueError(
            f"momentum={feedback.momentum!r} accumulates momentum before compression, in place of the momentum of SGD;"
            f" {name} works on the gradients themselves, not on velocities: {of_adam * corrects}{_CURE}"
        )
    for group in optimizer.param_groups:
        if group["dampening"]:
            raise ValueError(
                f"momentum={feedback.momentum!r} cannot take over {name}'s dampening={group['dampening']}: set it to 0"
            )
        if feedback.momentum != FROM_OPTIMIZER and group["momentum"]:
            raise ValueError(
                f"momentum={feedback.momentum} was given to the memory and momentum={group['momentum']} to {name}: give"
                " it to one of them, or to the optimizer alone and momentum='optimizer' to the memory"
            )
