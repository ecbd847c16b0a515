"""The plain loop's door: a ``DistributedDataParallel`` whose gradients are exchanged by the engine."""

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Optional, Union

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import Self

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.feedback import FROM_OPTIMIZER, Clipping
from lightning_sparse.compressors.layout import layout_of
from lightning_sparse.engine import Engine
from lightning_sparse.engine.adam.correction import AdamCorrection
from lightning_sparse.engine.adam.steps import is_correctable
from lightning_sparse.engine.memory.residual import waiting_kinds
from lightning_sparse.engine.settings import AUTO, Settings, refuse
from lightning_sparse.engine.wire.owners import Owners
from lightning_sparse.loop.checks import check_parameters, check_reducer, warning_of_meeting
from lightning_sparse.loop.optimizers import (
    TAKES_MOMENTUM,
    OptimizerView,
    can_correct,
    handled,
    is_adaptive,
    takes_adam,
    tells_warm_up,
    warning_for,
)
from lightning_sparse.loop.summary import summary
from lightning_sparse.schedule import Auto, Schedule

_LOGGER = logging.getLogger(__name__)
_SHOWN = 5  # names in a message
_LATER = torch.autograd.Variable._execution_engine.queue_callback  # to the end of the backward that is going on


def sparsify(
    ddp_model: DistributedDataParallel,
    optimizer: Union[Optimizer, Iterable[Optimizer]],
    compressor: Union[str, Compressor] = "topk",
    density: Optional[float] = None,
    schedule: Union[str, Schedule] = "merged",
    wire: str = "float32",
    warmup_epochs: Optional[int] = None,
    optimizer_correction: Union[str, AdamCorrection, None] = AUTO,
    exchange: Union[str, Owners] = AUTO,
    overlaps_backward: bool = True,
    scaler: Optional[GradScaler] = None,
    total_steps: Optional[int] = None,
    timeout: Optional[timedelta] = None,
) -> "Sparsifier":
    """Have a wrapped model send only the part of each gradient that matters most, in a training loop of your own.

    Call it on all ranks, once, before the first backward. Gradients travel while backward goes on, as soon as DDP hands
    a bucket over: build it with ``bucket_cap_mb=lightning_sparse.bucket_cap_mb(model)``, or they wait for larger ones.
    On one process it makes the same checks, and does nothing.

    Args:
        ddp_model: the model, wrapped, of all processes.
        optimizer: that trains it, or several; those that others have wrapped, such as Accelerate, are unwrapped.
        compressor: as of :class:`~lightning_sparse.SparseDDPStrategy`, but none that lets replicas drift apart.
        density: as there, like the following.
        schedule: but not ``"auto"``, which wraps the model anew.
        wire: see there.
        warmup_epochs: see there; where there are any, call :meth:`Sparsifier.set_epoch` at the start of each.
        optimizer_correction: see there.
        exchange: see there.
        overlaps_backward: see there.
        scaler: the gradient scaler, if there is one: residuals are kept without its scale.
        total_steps: optimizer steps of the whole training, for the warm-up of Adam's correction; ``None`` if not known.
        timeout: how long an exchange may wait for other ranks; ``None`` for the backend's default.

    Raises:
        ValueError: for a value out of range, a name that is not known, or something that a plain loop has no way for.
        TypeError: for an object of the wrong kind.
        RuntimeError: if the model has a communication hook already.
    """
    optimizers = [_unwrapped(each) for each in ([optimizer] if isinstance(optimizer, Optimizer) else optimizer)]
    settings = Settings(
        compressor, density, schedule, wire, warmup_epochs, optimizer_correction, exchange, overlaps_backward
    )
    check_settings(settings)
    check_facts(scaler, total_steps)
    return Sparsifier(ddp_model, optimizers, settings, scaler, total_steps, timeout, _say)


def _unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that makes the steps, whose hooks are called."""
    while isinstance(optimizer, Optimizer) and isinstance(inside := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inside
    return optimizer


def _say(line: str) -> None:
    _LOGGER.info("sparsify: %s", line)


class Sparsifier:
    """Exchange the gradients of a wrapped model until closed; what :func:`sparsify` returns.

    As a context manager it closes itself. It checks the model and its optimizers; ``settings`` are of this model alone.

    Attributes:
        engine: what exchanges gradients; ``None`` on one process, and once closed.
        optimizers: that train the model.
        clipping: what the gradients are clipped to that the next updates are made of.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizers: Sequence[Optimizer],
        settings: Settings,
        scaler: Optional[GradScaler],
        total_steps: Optional[int],
        timeout: Optional[timedelta],
        say: Callable[[str], None],
    ) -> None:
        _check_model(ddp)
        _check_optimizers(ddp, optimizers)
        if can_correct(settings, optimizers):
            settings.correct_adam()
        self._ddp = ddp
        self.optimizers = optimizers
        self._settings = settings
        self._scaler = scaler
        self._tell_user = say
        self.clipping = Clipping()
        self._epoch: Optional[int] = None
        self._is_closed = False
        self._final_stats: dict[str, float] = {}
        self.engine: Optional[Engine] = None
        self._view: Optional[OptimizerView] = None
        self._handles: list[Any] = []
        parameters = dict(ddp.module.named_parameters())
        self._device = next(iter(parameters.values())).device
        OptimizerView(parameters, optimizers, settings.feedback).close()  # it checks them
        if dist.get_world_size(ddp.process_group) == 1:
            settings.compressor.begin(layout_of(ddp.module, 0, 1, self._device))
            self._say(f"one process, so there is nothing to exchange or compress; on several {summary(settings)}.")
            return
        self.engine = Engine(ddp, settings, timeout, self._say, begin=self._begin)
        target_of, memory = self.engine.target_density, self.engine.memory
        self._view = OptimizerView(parameters, optimizers, settings.feedback, target_of, memory)
        self._view.adam.total_steps = total_steps
        self._handles = [optimizer.register_step_post_hook(self._forget_arrived) for optimizer in optimizers]
        self._tell(total_steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close(has_failed=error is not None)

    @property
    def corrects_adam(self) -> bool:
        """Whether the updates of Adam or AdamW are made before selection."""
        return self.engine is not None and self.engine.memory.corrects_adam

    def set_epoch(self, epoch: int) -> None:
        """Tell the number of the epoch that begins, from 0: over the first ones the density may fall.

        Raises:
            ValueError: if it is negative.
        """
        if epoch < 0:
            raise ValueError(f"epoch={epoch} must be the number of an epoch, at least 0")
        self._epoch = epoch

    def stats(self) -> dict[str, float]:
        """Return what the last step's exchange, and all of them, did on this rank, as plain floats.

        Names are those of :meth:`~lightning_sparse.SparseDDPStrategy.compression_stats`, but for ``total_steps`` and
        ``exposed_share``. Empty before the first step and on one process; after :meth:`close` they stay what they were.
        """
        return dict(self._final_stats) if self.engine is None else self.engine.compression_stats()

    def clip(self, norm: Optional[float] = None, value: Optional[float] = None) -> None:
        """Clip gradients between backward and the optimizer's step, as ``torch.nn.utils.clip_grad_norm_`` would.

        Where Adam is corrected, what has arrived are updates, which are not to be clipped: the gradients that they are
        made of are clipped before that instead, from the next step on. With a gradient scaler call its ``unscale_``
        first, as ever.

        Args:
            norm: largest norm of the gradient of the whole model; ``None`` for no limit.
            value: largest magnitude of an element; ``None`` for no limit.
        """
        with self.clipped_before(Clipping(norm=norm, value=value)):
            _clip(self._ddp.parameters(), norm, value)

    @contextmanager
    def clipped_before(self, clipping: Clipping) -> Iterator[None]:
        """Have the gradients that updates are made of clipped, and keep those updates out of sight meanwhile."""
        if self.engine is None or self._view is None:
            yield
            return
        self.expect_clipping(clipping)
        with self._view.adam.hidden():
            yield

    def expect_clipping(self, clipping: Clipping) -> None:
        """Have the gradients that the next updates are made of clipped."""
        self.clipping = clipping
        if self.engine is not None:
            self.engine.memory.clip_to(clipping)

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank keeps and has learned; each rank has to save its own, between two optimizer steps.

        Tensors, numbers and words, for ``torch.save``; tensors are not copied. Empty on one process.
        """
        if self.engine is None:
            self._check_open()
            return {}
        self.engine.worker.settle()
        state = self.engine.state_dict()
        return {
            "ranks": self.engine.topology[0],
            "rank": dist.get_rank(self._ddp.process_group),
            "compressor": type(self._settings.compressor).__name__,
            "kinds": sorted(waiting_kinds(state["memory"])),
            "layouts": self._layouts(),
            "epoch": self._epoch,
            "clipping": list(self.clipping),
            "engine": state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what :meth:`state_dict` returned; load model and optimizers as ever, in any order with this.

        Raises:
            ValueError: if it is that of another rank, of another number of ranks, another compressor or another model.
        """
        self._check_open()
        # Earlier versions listed all kinds, and knew fewer.
        given, present = (
            {"ranks": 1, **each, "kinds": sorted(waiting_kinds(each.get("kinds", ())))}
            for each in (state, self.state_dict())
        )
        ours, theirs = (each.get("layouts", {}) for each in (present, given))
        changed = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        refuse(
            *(
                (
                    given.get(kind) != present.get(kind),
                    f"this state is of {kind} {given.get(kind)!r}, and here it is {present.get(kind)!r}: {cure}",
                )
                for kind, cure in _ALIKE.items()
            ),
            (
                changed,
                f"this state is of a model in which {', '.join(map(repr, changed[:_SHOWN]))} had another shape, type or"
                " order in memory, or was not there: build the same model",
            ),
        )
        if self.engine is None:
            return
        kept = dict(state["engine"])
        kept["memory"] = {
            kind: {name: tensor.to(self._device) for name, tensor in tensors.items()}
            for kind, tensors in kept["memory"].items()
        }
        self.engine.load_state_dict(kept)
        if "plan" in kept:
            self.engine.restore_plan(kept["plan"], self.engine.topology)
        self._epoch = state["epoch"]
        self.expect_clipping(Clipping(*state.get("clipping", ())))

    def close(self, has_failed: bool = False) -> None:
        """End the exchange, and leave the optimizers alone; safe to call twice.

        The wrapper is of no more use: DDP cannot take its hook back. Train on with a new one around the same model.
        ``has_failed`` says that training ends by an error of this rank, for which others may wait.
        """
        self._is_closed = True
        if self.engine is None or self._view is None:
            return
        # After an error a device may be in the midst of an exchange that never ends: it is not asked for anything.
        if not has_failed or self._device.type == "cpu":
            self._final_stats = self.engine.compression_stats()
        self.engine.close(has_failed)
        self._view.close()
        for handle in self._handles:
            handle.remove()
        self.engine = self._view = None

    def _begin(self) -> None:
        """Begin a step, in the midst of its backward, before the first of its gradients is taken."""
        self._check_open()
        assert self.engine is not None
        assert self._view is not None
        self.engine.worker.raise_error()
        if self._epoch is None and self._settings.warmup_epochs:
            raise RuntimeError(
                f"warmup_epochs={self._settings.warmup_epochs} counts epochs, of which a loop of one's own has to tell:"
                " call set_epoch(epoch), of what sparsify returned or of fabric.strategy, at the start of each, or give"
                " warmup_epochs=0"
            )
        warm_up = self._view.adam.look(self.engine.mean_over_ranks)
        if warm_up is not None:
            self._say(tells_warm_up(warm_up, self._settings.density))
        coming, scale = self._view.coming_step(continued=self.engine.arrived.state().keys()), None
        if self._scaler is not None:
            # Scaling a one gives the scale without asking the device for its value.
            scale = self._scaler.scale(torch.ones((), device=self._device))
        self.engine.begin_backward(scale, coming.hyperparameters, self._epoch or 0, coming.whole, coming.settled)
        # DDP waits for the exchange in a callback of its own, which comes after this one and before one of this one.
        _LATER(lambda: _LATER(self._end_backward))

    def _end_backward(self) -> None:
        if self.engine is not None:
            self.engine.worker.raise_error()

    def _forget_arrived(self, optimizer: Optimizer, *step: Any) -> None:
        if self.engine is not None:
            self.engine.arrived.forget(handled(optimizer))

    def _tell(self, total_steps: Optional[int]) -> None:
        """Say what is sent, and warn of what does not go well together."""
        settings = self._settings
        self._say(f"{summary(settings)}.")
        if settings.feedback.momentum == FROM_OPTIMIZER:
            self._say(TAKES_MOMENTUM)
        corrects = settings.adam is not None
        if corrects:
            self._say(takes_adam(settings, self.optimizers, total_steps))
        found = []
        if settings.overlaps_backward:
            found.append(warning_of_meeting(self._ddp, dist.get_backend(self._ddp.process_group), os.environ))
        if settings.is_sparse:
            learning = filter(is_adaptive, self.optimizers)
            found += [warning_for(each) for each in learning if not (corrects and is_correctable(each))]
        for warning in filter(None, found):
            if dist.get_rank() == 0:
                warnings.warn(warning, stacklevel=4)

    def _say(self, line: str) -> None:
        if dist.get_rank() == 0:
            self._tell_user(line)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(
                "closed: to train on, wrap the model in a new DistributedDataParallel, and sparsify that"
            )

    def _layouts(self) -> dict[str, list[Any]]:
        """Return shapes, strides and types: what is kept of a parameter lies as the parameter does."""
        return {
            name: [list(parameter.shape), list(parameter.stride()), str(parameter.dtype)]
            for name, parameter in self._ddp.module.named_parameters()
        }


# What a state has to have in common with where it is loaded.
_ALIKE = {
    "ranks": "start as many processes as had saved it, or leave it out to start with nothing kept",
    "rank": "each rank saves a state of its own, and is given that one again",
    "compressor": "choose that compressor, or leave the state out to start with nothing kept",
    "kinds": "build the same optimizers, with the same optimizer_correction and wire",
}


def _clip(parameters: Iterable[Parameter], norm: Optional[float], value: Optional[float]) -> None:
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    if value is not None and trained:
        torch.nn.utils.clip_grad_value_(trained, value)
    if norm is not None and trained:
        torch.nn.utils.clip_grad_norm_(trained, norm)


def _check_model(ddp: DistributedDataParallel) -> None:
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"ddp_model={type(ddp).__name__} must be a torch.nn.parallel.DistributedDataParallel: wrap the model first,"
            " DistributedDataParallel(model, bucket_cap_mb=lightning_sparse.bucket_cap_mb(model))"
        )
    check_parameters(ddp.module)
    check_reducer(ddp)
    if ddp._comm_hooks:
        raise RuntimeError(
            "ddp_model has a communication hook already, and DDP takes one: wrap the model in a new"
            " DistributedDataParallel, and call sparsify once"
        )
    ranks, world = dist.get_world_size(ddp.process_group), dist.get_world_size()
    refuse(
        (
            ddp.is_multi_device_module,
            "ddp_model has parameters on several devices: give each process a model on one device",
        ),
        (
            ranks != world,
            f"ddp_model is of a process group of {ranks} of {world} processes, and gradients are exchanged between all:"
            " leave process_group out",
        ),
    )


def _check_optimizers(ddp: DistributedDataParallel, optimizers: Sequence[Optimizer]) -> None:
    trained = set(ddp.parameters())
    refuse((not optimizers, "optimizer=[] names none: give the optimizer that trains the model, or all of them"))
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer={optimizer!r} must be a torch.optim.Optimizer, or several of them in a list")
        refuse(
            (
                trained.isdisjoint(handled(optimizer)),
                f"optimizer={type(optimizer).__name__} trains no parameter of ddp_model: build it from"
                " ddp_model.parameters()",
            )
        )


def check_facts(scaler: Optional[GradScaler], total_steps: Optional[int]) -> None:
    """Check what a loop of one's own tells of itself."""
    if not isinstance(scaler, (GradScaler, type(None))):
        raise TypeError(f"scaler={scaler!r} must be a torch.amp.GradScaler, or None where the loss is not scaled")
    is_number = total_steps is None or (isinstance(total_steps, int) and total_steps >= 1)
    message = f"total_steps={total_steps!r} must be a whole number of optimizer steps, or None where it is not known"
    refuse((not is_number, message))


def check_settings(settings: Settings) -> None:
    """Refuse what a loop of one's own has no place for."""
    refuse(
        (
            isinstance(settings.schedule, Auto),
            "schedule='auto' wraps the model anew in the midst of training, which a loop of one's own has no place for:"
            " use schedule='merged', or the Trainer's strategy='sparse_auto'",
        ),
        (
            settings.compressor.replicas_diverge,
            f"compressor={type(settings.compressor).__name__} lets replicas drift apart, which have to be averaged"
            " before validation and saving: use the Trainer's strategy for it, or another compressor, such as 'topk'",
        ),
    )
