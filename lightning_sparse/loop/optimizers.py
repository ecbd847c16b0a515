"""Access to the user's optimizers: hyperparameters, momentum that is applied before compression, and step counts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain
from typing import Any, Optional

from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module, Parameter
from torch.optim import ASGD, SGD, Optimizer

from lightning_sparse.compressors.base import FROM_OPTIMIZER, ErrorFeedback
from lightning_sparse.engine.adam.memory import AdamMemory
from lightning_sparse.engine.adam.steps import AdamSteps, is_correctable
from lightning_sparse.engine.memory import Hyperparameters, Memory, optimizer_parameters
from lightning_sparse.engine.settings import Settings
from lightning_sparse.engine.step.reducer import after_closure
from lightning_sparse.engine.step.step import StepContext
from lightning_sparse.loop.summary import CHANGED, NEEDS_DENSE, UNCOUNTED, UNCOUNTED_BATCHES, warn_user

_ADDED = (
    "momentum correction needs one exchanged backward per optimizer step, because each exchange applies the momentum."
    " Call backward once on the sum of the losses, or run all backwards except the last inside no_sync() (in a"
    " LightningModule: optimizer.toggle_model(sync_grad=False)). Pass a new optimizer to sparsify_gradients."
)
_SHOWN = 5  # maximum number of names in a message
_NO_OPTIMIZER = Hyperparameters(float("nan"))  # NaN, so that a parameter's first learning rate counts as no change
# Hyperparameters that only adaptive optimizers have: decay rates of moments and squares, the epsilon of a quotient,
# Rprop's step factors, and the number of gradients that LBFGS stores.
_SIGNS_OF_LEARNING = frozenset({"betas", "beta2", "alpha", "rho", "eps", "etas", "history_size"})
_LINEAR = (SGD, ASGD)


class OptimizerView:
    """Read hyperparameters. If momentum is applied before compression, disable momentum in optimizer steps.

    Momentum amplifies weight decay by ``1 / (1 - momentum)``, so an update without momentum uses ``weight_decay /
    (1 - momentum)``. Param groups hold these values only during the update, so hooks and closures read the user's
    values. If Adam is corrected, ``adam`` applies updates in place of the optimizers.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        optimizers: Sequence[Optimizer],
        feedback: ErrorFeedback,
        target_of: Callable[[str], float],
        memory: Memory,
        warn: Callable[[str], None] = warn_user,
    ) -> None:
        self._optimizers = optimizers
        self._feedback = feedback
        self._takes_momentum = feedback.momentum == FROM_OPTIMIZER  # whether compression applies optimizers' momentum
        self.adam: Optional[AdamSteps] = None
        if isinstance(memory, AdamMemory):
            corrected = list(filter(is_correctable, optimizers))
            self.adam = AdamSteps(corrected, {}, target_of, memory, partial(warn, CHANGED))
        self.set_names(parameters)
        # Each entry: a parameter group, the user's values, and the values during the update.
        self._taken: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        self._handles: list[Any] = []
        if self._takes_momentum:
            for optimizer in optimizers:
                self._handles.append(optimizer.register_step_pre_hook(after_closure(self._take)))
                self._handles.append(optimizer.register_step_post_hook(self._give_back))
                self._handles.append(optimizer.register_state_dict_pre_hook(self._give_back))

    def set_names(self, parameters: Mapping[str, Parameter]) -> None:
        """Set the model's current parameters, by name."""
        self._names = {parameter: name for name, parameter in parameters.items()}
        if self.adam is not None:
            self.adam.counts.names = self._names

    def next_step(self, is_dense: bool = False, continued: AbstractSet[Tensor] = frozenset()) -> StepContext:
        """Return the :class:`StepContext` of the next exchange.

        For parameters in ``continued``, ``.grad`` holds the mean of an earlier exchange of this step.
        """
        next_step = StepContext() if self.adam is None else self.adam.next_step(is_dense, continued)
        return next_step._replace(hyperparameters=self._hyperparameters(continued))

    def _hyperparameters(self, continued: AbstractSet[Tensor]) -> dict[str, Hyperparameters]:
        """Return the hyperparameters of the next step, by parameter name; empty if compression uses none."""
        if self._feedback.momentum is None and not self._feedback.rescale_on_lr_change:
            return {}
        self._give_back()  # restores the optimizer's momentum if an update failed, or a closure runs again
        found = dict.fromkeys(self._names.values(), _NO_OPTIMIZER)
        for group in chain.from_iterable(optimizer.param_groups for optimizer in self._optimizers):
            if self._takes_momentum:
                momentum = group["momentum"], group["nesterov"]
            else:
                momentum = float(self._feedback.momentum or 0.0), self._feedback.nesterov
            settings = Hyperparameters(group["lr"], *momentum)
            named = [parameter for parameter in group["params"] if parameter in self._names]
            if settings.momentum and not continued.isdisjoint(named):
                raise RuntimeError(_ADDED)
            found.update((self._names[parameter], settings) for parameter in named)
        return found

    def close(self) -> None:
        """Remove all hooks, and restore the user's hyperparameters after a failed step."""
        if self.adam is not None:
            self.adam.close()
        for handle in self._handles:
            handle.remove()
        self._give_back()

    def _take(self, optimizer: Optimizer) -> None:
        self._give_back()  # needed after a failed update, when momentum is still zero
        for group in optimizer.param_groups:
            if momentum := group["momentum"]:
                own = {name: group[name] for name in ("momentum", "nesterov", "weight_decay")}
                meanwhile = {"momentum": 0.0, "nesterov": False, "weight_decay": own["weight_decay"] / (1 - momentum)}
                self._taken.append((group, own, meanwhile))
                group.update(meanwhile)

    def _give_back(self, *step: Any) -> None:
        # If another hook has changed a value since :meth:`_take`, do not overwrite this value.
        for group, own, meanwhile in self._taken:
            group.update({name: own[name] for name in own if group[name] == meanwhile[name]})
        self._taken.clear()


class CountedSteps:
    """Count optimizer steps, also steps through a wrapper. Warn if weights change without a counted step.

    Hooks call ``begin`` before every step of an optimizer, and ``end(optimizer)`` after every counted step of one of
    ``optimizers``.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], begin: Callable[..., Any], end: Callable[[Optimizer], None]
    ) -> None:
        self._begin, self._end = begin, end
        self._stepping: Any = None  # optimizer of the step in progress, or ``self`` inside :meth:`step_of`
        self._versions, self._uncounted = 0, 0  # sum of version counters; batches that changed weights without a step
        self._optimizers = optimizers
        self._handles: list[Any] = []
        for optimizer in optimizers:
            for each in chain_of(optimizer):
                if calls_hooks(each):
                    self._handles.append(each.register_step_pre_hook(self._before))
                    self._handles.append(each.register_step_post_hook(partial(self._after, optimizer)))

    @contextmanager
    def step_of(self, optimizer: Optimizer) -> Iterator[None]:
        """Count one step of ``optimizer`` inside the context, even if a scaler skips the step."""
        self._stepping = self
        try:
            yield
        finally:
            self._stepping = None
        self._end_step(optimizer)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _creates_state(optimizer, kwargs):
            return None
        step = self._begin(optimizer, args, kwargs)
        self._stepping = self._stepping or optimizer
        return step

    def _after(self, own: Optimizer, stepped: Optimizer, *step: Any) -> None:
        if self._stepping is stepped:
            self._stepping = None
            self._end_step(own)

    def _end_step(self, optimizer: Optimizer) -> None:
        self._uncounted = 0
        self._end(optimizer)

    def count_skipped(self, scaler: GradScaler) -> None:
        """Also count steps that a scaler skips: one rank may skip alone, and all ranks must count equally."""
        step = scaler.step

        def counted(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            inside = unwrapped(optimizer)
            with self.step_of(inside) if any(each is inside for each in self._optimizers) else nullcontext():
                return step(optimizer, *args, **kwargs)

        scaler.step = counted  # type: ignore[method-assign]

    def see_weights(self, module: Module) -> None:
        """Warn if consecutive batches change the weights without a counted step."""
        versions = sum(each._version for each in module.parameters() if each.requires_grad)
        self._versions, before = versions, self._versions
        self._uncounted += versions != before
        if self._uncounted == UNCOUNTED_BATCHES and versions != before:
            warn_user(UNCOUNTED)

    def close(self) -> None:
        """Remove all hooks."""
        self._optimizers = ()
        for handle in self._handles:
            handle.remove()


def listed(names: Sequence[object]) -> str:
    """Return the first names as text, with the number of further names.

    Example::

        >>> listed(["a", "b"]), listed(["a", "b", "c", "d", "e", "f"])
        ("'a', 'b'", "'a', 'b', 'c', 'd', 'e' and 1 more")
    """
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def is_adaptive(optimizer: Optimizer) -> bool:
    """Return whether an optimizer adapts steps to statistics of gradients, such as magnitudes or signs.

    SGD and ASGD are not adaptive. All other optimizers are adaptive if ``defaults`` has a typical name, such as
    ``betas``. For a wrapper, the innermost optimizer counts.
    """
    *_, optimizer = chain_of(optimizer)
    return not isinstance(optimizer, _LINEAR) and not _SIGNS_OF_LEARNING.isdisjoint(optimizer.defaults)


def warn_of_adaptive(settings: Settings, optimizers: Sequence[Optimizer]) -> None:
    """Warn of adaptive optimizers, which need dense gradients."""
    for optimizer in optimizers if settings.is_sparse else ():
        is_corrected = settings.adam is not None and is_correctable(optimizer)
        if is_adaptive(optimizer) and not is_corrected:
            warn_user(NEEDS_DENSE.format(name=type(optimizer).__name__))


def calls_hooks(optimizer: Optimizer) -> bool:
    """Return whether an optimizer supports step hooks. Some wrappers of other packages lack step hooks."""
    with suppress(AttributeError):
        optimizer.register_step_post_hook(lambda *step: None).remove()
        return True
    return False


def chain_of(optimizer: Any) -> list[Any]:
    """Return an optimizer and all nested optimizers, the outermost first."""
    chain: list[Any] = []
    while isinstance(optimizer, Optimizer) and not any(each is optimizer for each in chain):
        chain.append(optimizer)
        optimizer = next((each for each in vars(optimizer).values() if isinstance(each, Optimizer)), None)
    return chain


def unwrapped(optimizer: Any) -> Any:
    """Return the innermost optimizer, which makes the steps and calls the hooks."""
    while isinstance(optimizer, Optimizer) and isinstance(inside := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inside
    return optimizer


def _creates_state(optimizer: Optimizer, kwargs: Mapping[str, Any]) -> bool:
    """Return whether this step changes no weights. Sharded checkpoints of torch make such a step to create states."""
    return kwargs == {"closure": None} and not any(group["lr"] for group in optimizer.param_groups)


def all_optimizer_parameters(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Return the parameters of all optimizers."""
    return list(chain.from_iterable(map(optimizer_parameters, optimizers)))
