"""Checks of the user's arguments, and settings in which objects replace names such as ``"topk"``."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from typing import Any, Optional, TypedDict, Union

import torch
from typing_extensions import Self, Unpack

from lightning_sparse.compressors import COMPRESSORS, Compressor
from lightning_sparse.compressors.base import FROM_OPTIMIZER, ErrorFeedback, checked_count, checked_density, is_whole
from lightning_sparse.compressors.registry import build_by_name, checked_name
from lightning_sparse.engine.adam.correction import AdamCorrection
from lightning_sparse.engine.adam.memory import AdamMemory
from lightning_sparse.engine.memory import Hyperparameters, Memory, MomentumMemory, widened
from lightning_sparse.engine.requirements import missing_capabilities, refuse, unmet
from lightning_sparse.engine.step.topology import FlatTopology
from lightning_sparse.engine.wire import EXCHANGES, Wires, build_wires, wire_values
from lightning_sparse.removed import refuse_removed, refusing
from lightning_sparse.schedule import SCHEDULES, Schedule

AUTO = "auto"


@refusing
@dataclass(frozen=True)
class LocalSteps:
    """Rounds of local steps: each rank trains alone, then ranks exchange the changes of parameters (local SGD).

    The mean change over ranks is the gradient of an outer SGD step on the shared model (DiLoCo, arXiv 2311.08105).
    Validation, checkpoints and the result of the training use the shared model.

    Args:
        every: optimizer steps per round.
        outer_lr: learning rate of the outer step.
        outer_momentum: momentum of the outer step; 0 for none.
        nesterov: whether the outer momentum is Nesterov's.
        residual_decay: factor that multiplies the residual before the next change is added; 1 for no decay.

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

    def __post_init__(self) -> None:
        refuse_removed(f"local_steps={self.every!r}", f"local_steps={self.every!r}")
        every = checked_count("every", self.every, "optimizer steps (local_steps=... of the strategy)")
        object.__setattr__(self, "every", every)  # numpy integers become int
        if not 0 <= self.outer_momentum < 1:  # with 1, the momentum would never decay
            raise ValueError(f"outer_momentum={self.outer_momentum!r} must be a number with 0 <= outer_momentum < 1")
        if not 0 <= self.residual_decay <= 1:
            raise ValueError(f"residual_decay={self.residual_decay!r} must be a number with 0 <= residual_decay <= 1")
        if not self.outer_lr > 0:
            raise ValueError(f"outer_lr={self.outer_lr!r} must be positive. Use 1 to apply the mean change unscaled.")
        if self.nesterov and not self.outer_momentum:
            raise ValueError("nesterov=True needs a momentum. Add an outer_momentum above 0, such as 0.9.")


class Compression(TypedDict, total=False):
    """Keyword arguments of all entry points, after ``compressor`` and ``density``.

    Attributes:
        schedule: division of gradients into buckets: ``"layerwise"``, ``"merged"``, ``"single"`` or an object. The
            schedule does not change results, except with OMGS, which selects across a bucket. With ``"auto"``, steps
            average dense gradients as DDP does, if dense gradients are faster.
        wire: dtype of sent values: ``"float32"``, ``"bfloat16"`` or ``"float16"``. ``"4bit"`` and ``"2bit"`` require a
            compressor that sends all elements, or a fixed number of elements. Rounding errors stay in the residual.
            Adam's dense warm-up has no residual, and ``"bfloat16"``, ``"4bit"`` and ``"2bit"`` then send bfloat16.
        warmup_steps: number of optimizer steps, or fraction of the training's steps, in which the density falls
            geometrically to its target, in four stages. ``None`` for the compressor's default.
        optimizer_correction: ``"auto"`` computes the updates of ``torch.optim.Adam`` and ``AdamW`` before selection,
            because sparse gradients distort the second moment. A warm-up with dense gradients comes first. Other
            adaptive optimizers cause a warning. An :class:`~lightning_sparse.AdamCorrection` sets the numbers of the
            correction, and requires Adam or AdamW. ``None`` for no correction.
        exchange: collective for selections. ``"gather"`` sends every rank's selection to all ranks, so that bytes grow
            with the number of ranks. ``"owners"`` adds up each element on one rank, so that bytes do not grow.
            ``"auto"`` uses owners for a tensor if owners need at most half the bytes, from about 15 ranks on. See the
            page on scaling.
        overlaps_backward: whether gradients are sent during backward. With ``False`` the exchange begins after
            backward, and overlaps with no other collective, as SyncBatchNorm on NCCL requires. See the page on limits.
        local_steps: optimizer steps between two exchanges. With 1, ranks exchange gradients in every step. With more,
            ranks exchange changes of parameters. :class:`~lightning_sparse.LocalSteps` has more options. See the page
            on local steps.
        levels: with 1, all ranks exchange with each other. With 2, the ranks of a node first average gradients and
            divide the mean. Each rank then exchanges one part with other nodes, and stores the residual of this part.
            ``"auto"`` is 2 if several nodes have several ranks each, and if the compressor can work on parts. These
            compressors can: ``topk``, ``lags``, ``omgs``, ``dgc``, ``qsgd``, ``dense``.

    Example::

        >>> from lightning_sparse.engine.settings import DEFAULTS
        >>> DEFAULTS  # doctest: +NORMALIZE_WHITESPACE
        {'schedule': 'merged', 'wire': 'float32', 'warmup_steps': None, 'optimizer_correction': 'auto',
         'exchange': 'auto', 'overlaps_backward': True, 'local_steps': 1, 'levels': 'auto'}
    """

    schedule: Union[str, Schedule]
    wire: str
    warmup_steps: Union[int, float, None]
    optimizer_correction: Union[str, AdamCorrection, None]
    exchange: str
    overlaps_backward: bool
    local_steps: Union[int, LocalSteps]
    levels: Union[int, str]


DEFAULTS = Compression(
    schedule="merged",
    wire="float32",
    warmup_steps=None,
    optimizer_correction=AUTO,
    exchange=AUTO,
    overlaps_backward=True,
    local_steps=1,
    levels=AUTO,
)


# Check of a value, and description of the valid values, by argument.
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "warmup_steps": (
        lambda value: value is None or is_whole(value, 0) or (isinstance(value, Real) and 0 < float(value) < 1),
        "a number of optimizer steps, at least 0 (0 = no warm-up), or a fraction of the training's steps, such as 0.1",
    ),
    "levels": (
        lambda value: value in (AUTO, 1, 2),
        "'auto' (2 if several nodes have several ranks each), 1 (all ranks exchange with each other) or 2 (ranks of a"
        " node average their gradients first)",
    ),
    "optimizer_correction": (
        lambda value: isinstance(value, AdamCorrection) or value in (None, AUTO),
        "'auto' (for Adam and AdamW), None (no correction) or an AdamCorrection(...)",
    ),
}


@dataclass(frozen=True, eq=False)
class Settings:
    """Checked settings of a training, with names replaced by objects.

    Attributes:
        asked: error feedback that the compressor and callbacks request. ``feedback`` is the error feedback in use.
        adam: settings of Adam's correction, or ``None`` if Adam is not corrected.
    """

    compressor: Compressor
    density: float
    schedule: Schedule
    wire: torch.dtype
    wire_bits: Optional[int]
    warmup_steps: Union[int, float]
    optimizer_correction: Union[str, AdamCorrection, None]
    exchange: str
    overlaps_backward: bool
    local_steps: Optional[LocalSteps]
    levels: Union[int, str]
    asked: ErrorFeedback
    adam: Optional[AdamCorrection] = None

    @classmethod
    def of(
        cls, compressor: Union[str, Compressor], density: Optional[float] = None, **given: Unpack[Compression]
    ) -> Self:
        """Check the user's arguments, and return the settings."""
        chosen: Compression = {**DEFAULTS, **given}
        own = build_by_name("compressor", Compressor, COMPRESSORS, compressor)
        schedule = build_by_name("schedule", Schedule, SCHEDULES, chosen["schedule"])
        wire, bits = wire_values(chosen["wire"])
        if own.wire is not None and bits is None:
            wire, bits = wire_values(own.wire)
        local = chosen["local_steps"]
        local = local if isinstance(local, LocalSteps) else LocalSteps(local)
        rounds = None if local == LocalSteps() else local  # without rounds, ranks exchange gradients in every step
        for name, (is_valid, expected) in _VALUES.items():
            if not is_valid(value := chosen[name]):  # type: ignore[literal-required]
                raise ValueError(f"{name}={value!r} must be {expected}")
        if chosen["levels"] == 2 and rounds is not None:
            refuse_removed("levels=2 with local_steps", "levels=2 with local_steps")
        warmup = own.default_warmup_steps if chosen["warmup_steps"] is None else chosen["warmup_steps"]
        settings = cls(
            compressor=own,
            density=own.default_density or 1.0 if density is None else checked_density("density", density),
            schedule=schedule,
            wire=wire,
            wire_bits=bits,
            warmup_steps=int(warmup) if is_whole(warmup, 0) else float(warmup),
            optimizer_correction=chosen["optimizer_correction"],
            exchange=checked_name("exchange", chosen["exchange"], EXCHANGES),
            overlaps_backward=chosen["overlaps_backward"],
            local_steps=rounds,
            levels=chosen["levels"],
            asked=own.feedback._replace(decay=local.residual_decay),
        )
        if density is not None:
            refuse(missing_capabilities("density=...", settings, f"density={density!r}"))
        refuse(unmet(settings, {**chosen, "residual_decay": settings.asked.decay}))
        return settings

    @property
    def feedback(self) -> ErrorFeedback:
        """The user's error feedback. Adam's correction uses only the user's ``rescale_on_lr_change``."""
        if self.adam is None:
            return self.asked
        return ErrorFeedback(rescale_on_lr_change=self.asked.rescale_on_lr_change)

    @cached_property  # cached, because every step reads the property
    def replicas_diverge(self) -> bool:
        """Whether ranks hold different models between two steps."""
        return self.compressor.replicas_diverge or self.local_steps is not None

    @property
    def is_sparse(self) -> bool:
        """Whether each step sends only some elements of a gradient, and adds a residual to the next gradient."""
        is_partial = min([self.density, *self.compressor.densities.values()]) < 1
        return self.compressor.feedback.keeps_residual and is_partial and self.local_steps is None

    def correcting_adam(self, are_adam: Sequence[bool]) -> Self:
        """Return a copy in which Adam is corrected, if the settings and all optimizers together allow the correction.

        Args:
            are_adam: whether each optimizer can be corrected. The momentum of other optimizers needs another memory.
        """
        own, momentum = self.optimizer_correction, self.asked.momentum
        is_for_all = bool(are_adam) and all(are_adam) and momentum == FROM_OPTIMIZER
        is_possible = is_for_all or (any(are_adam) and momentum is None)
        # Only sparse gradients need the correction.
        if own is None or not is_possible or not self.is_sparse or self.compressor.replicas_diverge:
            return replace(self, adam=None)
        if self.asked.clip_norm is not None:
            raise ValueError(
                f"clip_norm={self.asked.clip_norm!r} is not supported if Adam is corrected, because the correction"
                " limits each element of an update: leave clip_norm out, or set optimizer_correction=None"
            )
        return replace(self, adam=own if isinstance(own, AdamCorrection) else AdamCorrection())

    def correcting_momentum(self, correction: Optional[ErrorFeedback]) -> Self:
        """Return settings with momentum, masking and clip norm of ``correction``, or of the compressor if ``None``."""
        own = self.compressor.feedback
        if correction is None:
            asked = own._replace(decay=self.asked.decay)
        else:
            refuse(missing_capabilities("MomentumCorrection", self))
            if correction.masks_momentum:
                refuse(missing_capabilities("masks_momentum=True", self))
            asked = correction._replace(rescale_on_lr_change=own.rescale_on_lr_change)
        return replace(self, asked=asked, adam=None)

    def wires_for(self, rank: int, world_size: int) -> Wires:
        """Build the wire formats, with a dense format if the compressor or Adam's warm-up needs one."""
        own = self.compressor
        dense_format = own.dense_wire_format or (None if self.adam is None else "reduce")
        return build_wires(own.wire_format, dense_format, self.wire, rank, world_size, self.exchange, self.wire_bits)

    def memory_for(self, gradient_dtypes: set[torch.dtype], levels: FlatTopology) -> Memory:
        """Build the memory of residuals, which stores nothing if gradients are sent exactly or without residuals."""
        feedback = self.feedback
        if self.adam is not None:
            return AdamMemory(levels, self.adam, feedback.rescale_on_lr_change)
        wire_is_exact = gradient_dtypes <= {self.wire} and self.wire == torch.float32
        is_exact = self.compressor.is_lossless and wire_is_exact and feedback == ErrorFeedback()
        if is_exact or not feedback.keeps_residual:
            return Memory(decay=0.0)
        if feedback.clip_norm is not None and len(set(map(widened, gradient_dtypes))) > 1:
            raise ValueError("clip_norm needs one message, but float64 gradients have their own: omit clip_norm")
        # The norm of the mean of n independent gradients is about one gradient's norm divided by the root of n.
        ratio = math.sqrt(levels.inter.world_size)
        local_clip_norm = None if feedback.clip_norm is None else feedback.clip_norm / ratio
        if feedback.momentum is None:
            return Memory(local_clip_norm, feedback.rescale_on_lr_change, feedback.decay)
        is_unknown = feedback.momentum == FROM_OPTIMIZER
        without_optimizer = Hyperparameters(0.0, 0.0 if is_unknown else float(feedback.momentum), feedback.nesterov)
        return MomentumMemory(
            without_optimizer, feedback.masks_momentum, local_clip_norm, feedback.rescale_on_lr_change
        )
