"""Settings: the user's choices, checked."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Optional, TypedDict, Union

import torch
from torch import Tensor
from typing_extensions import Self, Unpack

from lightning_sparse.compressors import COMPRESSORS, Compressor
from lightning_sparse.compressors.base import FROM_OPTIMIZER, ErrorFeedback, checked_density, is_whole
from lightning_sparse.compressors.registry import build_by_name
from lightning_sparse.engine.adam.correction import AdamCorrection
from lightning_sparse.engine.adam.memory import AdamMemory
from lightning_sparse.engine.memory.momentum import MomentumMemory
from lightning_sparse.engine.memory.residual import Hyperparameters, Memory, ResidualMemory
from lightning_sparse.engine.planner import Densities
from lightning_sparse.engine.requirements import missing_capabilities, refuse, unmet
from lightning_sparse.engine.wire import ExchangeChoice, Wires, build_wires, exchange_of, wire_values
from lightning_sparse.engine.wire.owners import Owners
from lightning_sparse.removed import refuse_removed, refusing
from lightning_sparse.schedule import SCHEDULES, Schedule

AUTO = "auto"


@refusing
@dataclass(frozen=True)
class LocalSteps:
    """Rounds of local steps: each rank trains by itself, then the changes of its parameters are exchanged.

    Their mean over ranks, multiplied by the outer learning rate and with an outer momentum, moves the shared model,
    which is what is validated, saved, and there at the end (DiLoCo, arXiv 2311.08105).

    Args:
        every: optimizer steps of a round.
        outer_lr: what the mean change is multiplied by.
        outer_momentum: momentum of the mean changes, as of SGD; 0 for none.
        nesterov: whether that momentum is Nesterov's.
        residual_decay: the residual is multiplied by this before a change is added to it; 1 keeps all of it.
        synchronous_steps: optimizer steps that are DDP's, before the first round. They are counted on across a resume.

    Raises:
        ValueError: for a number out of range.

    Example::

        >>> LocalSteps(5, outer_momentum=0.2).outer_lr
        1.0
    """

    every: int = 1
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    nesterov: bool = False
    residual_decay: float = 1.0
    synchronous_steps: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        """Check."""
        refuse_removed(f"local_steps={self.every!r}", f"local_steps={self.every!r}")
        for name, least in (("every", 1), ("synchronous_steps", 0)):
            given: Any = getattr(self, name)
            if not is_whole(given, least):
                named = f"local_steps={given!r} (every, of LocalSteps)" if name == "every" else f"{name}={given!r}"
                raise ValueError(f"{named} must be a whole number, at least {least}")
            object.__setattr__(self, name, int(given))  # of numpy's, too
        refuse(self._refusals())

    def _refusals(self) -> Iterator[str]:
        synchronous, momentum = self.synchronous_steps, self.outer_momentum
        for name, number in (("outer_momentum", momentum), ("residual_decay", self.residual_decay)):
            if not 0 <= number <= 1:
                yield f"{name}={number!r} must be a number with 0 <= {name} <= 1"
        if synchronous and replace(self, synchronous_steps=0) == LocalSteps():
            yield (
                f"synchronous_steps={synchronous} are those before rounds of local steps, and every step is synchronous"
                " with local_steps=1: leave it out (0), or give local_steps=... of 2 or more"
            )
        if not self.outer_lr > 0:
            yield f"outer_lr={self.outer_lr!r} must be positive; 1 applies the mean change as it is"
        if momentum == 1:
            yield "outer_momentum=1 never forgets: choose a number below 1, such as 0.9"
        if self.nesterov and not momentum:
            yield "nesterov=True needs an outer_momentum above 0, such as 0.9"


def rounds_of(local_steps: Union[int, LocalSteps]) -> Optional[LocalSteps]:
    """Return the rounds that a user asks for; ``None`` where gradients are exchanged in every step."""
    rounds = local_steps if isinstance(local_steps, LocalSteps) else LocalSteps(local_steps)
    return None if rounds == LocalSteps() else rounds


class Compression(TypedDict, total=False):
    """What is sent, how, when and with whom: the settings that all entry points share, given by name.

    ``compressor`` and ``density`` are each entry point's own, and may be given first, without their names.

    Attributes:
        schedule: when and with whom gradients travel: ``"layerwise"``, ``"merged"``, ``"single"``, or an object. None
            of them changes the numbers, except where OMGS selects from what travels together. ``"auto"`` may leave
            steps to DDP.
        wire: type of the values that travel: ``"float32"``, ``"bfloat16"``, ``"float16"``, or, of compressors that
            send a fixed number of elements, or all, ``"4bit"``, ``"2bit"``. Rounding errors stay in the residual, but
            those of Adam's first steps, which the last two and ``"bfloat16"`` send in bfloat16.
        warmup_epochs: epochs over which the density falls geometrically to its target; ``None`` for the compressor's,
            but at most a tenth of the steps of a training whose length is known, unless they are local steps.
        optimizer_correction: ``"auto"`` makes the updates of ``torch.optim.Adam`` and ``AdamW``, which would misjudge
            sparse gradients, before selection, with a warm-up, and warns of other adaptive optimizers; an
            :class:`~lightning_sparse.AdamCorrection` has your numbers, and refuses all others; ``None`` changes none.
        exchange: how selections travel: ``"gather"`` hands every rank's to every rank, so that bytes grow with ranks;
            with ``"owners"`` every element has a rank that sums it and chooses, so that they do not; an
            :class:`~lightning_sparse.Owners` says how much. ``"auto"`` gathers, except for tensors of which owners take
            half the bytes or less, from about 15 ranks on. See the page on scaling.
        overlaps_backward: whether gradients travel during backward. ``False`` lets them begin after it, as on NCCL with
            SyncBatchNorm: no other collective of backward then meets theirs. See the page on limits.
        local_steps: optimizer steps of each rank by itself between two exchanges, which are then of the changes of its
            parameters; 1 exchanges gradients in every step, and a :class:`~lightning_sparse.LocalSteps` says more. See
            the page on local steps.
        levels: with 2, the ranks of a node average their gradients first, and each exchanges a share of the means with
            the other nodes: one selection for each node travels, and residuals take as many times less memory as a node
            has ranks. ``"auto"`` takes 2 where several nodes have several ranks each, and the compressor can work on
            shares (``topk``, ``lags``, ``omgs``, ``dgc``, ``qsgd``, ``dense``).

    Example::

        >>> from lightning_sparse.engine.settings import DEFAULTS
        >>> DEFAULTS  # doctest: +NORMALIZE_WHITESPACE
        {'schedule': 'merged', 'wire': 'float32', 'warmup_epochs': None, 'optimizer_correction': 'auto',
         'exchange': 'auto', 'overlaps_backward': True, 'local_steps': 1, 'levels': 'auto'}
    """

    schedule: Union[str, Schedule]
    wire: str
    warmup_epochs: Optional[int]
    optimizer_correction: Union[str, AdamCorrection, None]
    exchange: Union[str, Owners]
    overlaps_backward: bool
    local_steps: Union[int, LocalSteps]
    levels: Union[int, str]


DEFAULTS = Compression(
    schedule="merged",
    wire="float32",
    warmup_epochs=None,
    optimizer_correction=AUTO,
    exchange=AUTO,
    overlaps_backward=True,
    local_steps=1,
    levels=AUTO,
)


@dataclass(frozen=True, eq=False)
class Settings:
    """A training's choices, checked and with names turned into objects.

    ``asked`` is what is asked of the memory, and ``feedback`` what it does: they differ where Adam's updates are made
    before selection, in place of momentum, as ``adam`` says.
    """

    compressor: Compressor
    density: float
    schedule: Schedule
    wire: torch.dtype
    wire_bits: Optional[int]
    warmup_epochs: int
    bounds_warm_up: bool
    optimizer_correction: Union[str, AdamCorrection, None]
    exchange: ExchangeChoice
    overlaps_backward: bool
    local_steps: Optional[LocalSteps]
    levels: Union[int, str]
    asked: ErrorFeedback
    adam: Optional[AdamCorrection] = None

    @classmethod
    def of(
        cls, compressor: Union[str, Compressor], density: Optional[float] = None, **given: Unpack[Compression]
    ) -> Self:
        """Check what a user chose."""
        chosen: Compression = {**DEFAULTS, **given}
        own = build_by_name("compressor", Compressor, COMPRESSORS, compressor)
        schedule = build_by_name("schedule", Schedule, SCHEDULES, chosen["schedule"])
        wire, bits = wire_values(chosen["wire"])
        if own.wire is not None and bits is None:
            wire, bits = wire_values(own.wire)
        exchange, rounds = exchange_of(chosen["exchange"]), rounds_of(chosen["local_steps"])
        refuse(_of_values(chosen, rounds))
        epochs = chosen["warmup_epochs"]
        warmup_epochs = own.default_warmup_epochs if epochs is None else int(epochs)
        settings = cls(
            compressor=own,
            density=own.default_density or 1.0 if density is None else checked_density("density", density),
            schedule=schedule,
            wire=wire,
            wire_bits=bits,
            warmup_epochs=warmup_epochs,
            bounds_warm_up=epochs is None and warmup_epochs > 0 and rounds is None,
            optimizer_correction=chosen["optimizer_correction"],
            exchange=exchange,
            overlaps_backward=chosen["overlaps_backward"],
            local_steps=rounds,
            levels=chosen["levels"],
            asked=own.feedback._replace(decay=1.0 if rounds is None else rounds.residual_decay),
        )
        by_objects = {"schedule": schedule, "local_steps": rounds, "adaptive_density": own.adaptive_density}
        decay = {} if rounds is None else {"residual_decay": rounds.residual_decay}
        refuse(unmet(settings, {"density": density, **chosen, **by_objects, **decay}, chosen))
        return settings

    @property
    def feedback(self) -> ErrorFeedback:
        """What the memory does."""
        if self.adam is None:
            return self.asked
        return ErrorFeedback(rescale_on_lr_change=self.asked.rescale_on_lr_change, clip_norm=self.asked.clip_norm)

    @cached_property  # asked in every step
    def replicas_diverge(self) -> bool:
        """Whether the replicas are different models between two steps."""
        return self.compressor.replicas_diverge or self.local_steps is not None

    @property
    def can_have_levels(self) -> bool:
        """Whether ranks of a node can average gradients first and share the rest of the work."""
        return not any(missing_capabilities("in shards", self))

    @property
    def is_sparse(self) -> bool:
        """Whether the optimizers are given part of each gradient late."""
        return self.compressor.feedback.keeps_residual and self.least_density < 1 and self.local_steps is None

    @property
    def least_density(self) -> float:
        """The least density that a parameter may have."""
        return self.compressor.least_density(self.density)

    def correcting_adam(self) -> Self:
        """Return those by which Adam's updates are made before selection."""
        own = self.optimizer_correction
        return replace(self, adam=own if isinstance(own, AdamCorrection) else AdamCorrection())

    @property
    def can_correct_adam(self) -> bool:
        """Whether there is something to correct for Adam, and a way to do it, and the user has not ruled it out."""
        is_wanted = self.optimizer_correction is not None and self.is_sparse
        leaves_room = self.asked.momentum in (None, FROM_OPTIMIZER)
        return is_wanted and leaves_room and not self.compressor.replicas_diverge

    def correcting_momentum(self, correction: Optional[ErrorFeedback]) -> Self:
        """Return those that accumulate momentum, mask and clip as ``correction`` says; ``None`` as the compressor."""
        own = self.compressor.feedback
        if correction is None:
            asked = own._replace(decay=self.asked.decay)
        else:
            refuse(missing_capabilities("MomentumCorrection", self))
            if correction.masks_momentum:
                refuse(missing_capabilities("masks_momentum=True", self))
            asked = correction._replace(rescale_on_lr_change=own.rescale_on_lr_change)
        return replace(self, asked=asked, adam=None)

    def densities(self) -> Densities:
        """Build how much is sent of each parameter, step by step."""
        return Densities(self.compressor, self.density, self.warmup_epochs, self.bounds_warm_up)

    def wires_for(self, rank: int, world_size: int) -> Wires:
        """Build the wire formats; while Adam's second moment is learned, everything is sent whole by one of them."""
        own = self.compressor
        dense_format = own.dense_wire_format or (None if self.adam is None else "reduce")
        return build_wires(own.wire_format, dense_format, self.wire, rank, world_size, self.exchange, self.wire_bits)

    def memory_for(
        self,
        gradient_dtypes: set[torch.dtype],
        world_size: int,
        local_share: Optional[Callable[[Tensor], Tensor]] = None,
        total_of: Callable[[Tensor], Tensor] = lambda own: own,
    ) -> Memory:
        """Build the memory: what the compressor asks for, or none where nothing can be left over.

        The mean of ``world_size`` independent gradients has a norm smaller by the root of their number: clips allow
        for it.
        """
        wire_is_exact = gradient_dtypes <= {self.wire} and self.wire == torch.float32
        feedback = self.feedback
        if not feedback.keeps_residual:
            return Memory()
        if self.adam is not None:
            return AdamMemory(world_size, self.adam, feedback.rescale_on_lr_change, local_share, total_of)
        if self.compressor.is_lossless and wire_is_exact and feedback == ErrorFeedback():
            return Memory()
        local_clip_norm = None if feedback.clip_norm is None else feedback.clip_norm / math.sqrt(world_size)
        if feedback.momentum is None:
            return ResidualMemory(local_clip_norm, feedback.rescale_on_lr_change, feedback.decay)
        is_unknown = feedback.momentum == FROM_OPTIMIZER
        without_optimizer = Hyperparameters(0.0, 0.0 if is_unknown else float(feedback.momentum), feedback.nesterov)
        return MomentumMemory(
            without_optimizer, feedback.masks_momentum, local_clip_norm, feedback.rescale_on_lr_change
        )


def _of_values(chosen: Compression, rounds: Optional[LocalSteps]) -> Iterator[str]:
    """Yield what is no value of an argument."""
    epochs: Any = chosen["warmup_epochs"]
    levels, correction = chosen["levels"], chosen["optimizer_correction"]
    if epochs is not None and not is_whole(epochs, 0):
        yield f"warmup_epochs={epochs!r} must be a whole number of epochs, at least 0 (0 = no warm-up)"
    if levels not in (AUTO, 1, 2):
        yield (
            f"levels={levels!r} must be 'auto' (two where several nodes have several ranks each), 1 (all ranks exchange"
            " with all) or 2 (ranks of a node average their gradients first)"
        )
    if levels == 2 and rounds is not None:
        refuse_removed("levels=2 with local_steps", "levels=2 with local_steps")
    if not (isinstance(correction, AdamCorrection) or correction is None or correction == AUTO):
        yield (
            f"optimizer_correction={correction!r} must be 'auto' (Adam and AdamW are corrected), None (nothing is), or"
            " an AdamCorrection(...)"
        )
