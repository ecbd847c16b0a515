"""Settings: the user's choices, checked."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Optional, TypedDict, Union

import torch
from torch import Tensor
from typing_extensions import Self, Unpack

from lightning_sparse.compressors import COMPRESSORS, Compressor
from lightning_sparse.compressors.base import FROM_OPTIMIZER, ErrorFeedback, checked_density, same_everywhere
from lightning_sparse.compressors.registry import resolve
from lightning_sparse.engine.adam.correction import AdamCorrection, falling_density
from lightning_sparse.engine.adam.memory import AdamMemory
from lightning_sparse.engine.memory.momentum import MomentumMemory
from lightning_sparse.engine.memory.residual import Hyperparameters, Memory, ResidualMemory
from lightning_sparse.engine.wire import Exchange, Wires, build_wires, exchange_of, wire_values
from lightning_sparse.engine.wire.owners import Owners
from lightning_sparse.schedule import SCHEDULES, Auto, Merged, Schedule

AUTO = "auto"
WARM_UP_PART = 10  # a warm-up that nobody has asked for takes one in so many of a training's steps at most
Row = tuple[Any, str]  # whether something is refused, and what is said then


def refuse(*rows: Row) -> None:
    """Raise ``ValueError`` with what the first row says that refuses something."""
    for is_refused, message in rows:
        if is_refused:
            raise ValueError(message)


@dataclass(frozen=True)
class LocalSteps:
    """Rounds of local steps: each rank trains by itself, then the changes of its parameters are exchanged.

    Their mean over ranks, multiplied by the outer learning rate and with an outer momentum, moves the shared model,
    which is what is validated, saved, and there at the end (DiLoCo, arXiv 2311.08105).

    Args:
        every: optimizer steps of a round; ``"auto"`` times a few short rounds, and then takes as many steps as keep
            exchanges at 5 % of the time.
        outer_lr: what the mean change is multiplied by.
        outer_momentum: momentum of the mean changes, as of SGD; 0 for none.
        nesterov: whether that momentum is Nesterov's.
        residual_decay: the residual is multiplied by this before a change is added to it; 1 keeps all of it.
        overlap_steps: local steps that are made while an exchange travels, whose result is then added; 0 waits for it,
            as on NCCL, where nothing may meet an exchange, whatever is given.
        synchronous_steps: optimizer steps that are DDP's, before the first round. They are counted on across a resume.

    Raises:
        ValueError: for a number out of range.

    Example::

        >>> LocalSteps(5, outer_momentum=0.2).outer_lr
        1.0
    """

    every: Union[int, str] = 1
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    nesterov: bool = False
    residual_decay: float = 1.0
    overlap_steps: int = 0
    synchronous_steps: int = 0

    def __post_init__(self) -> None:
        """Check."""
        for name, least in (("every", 1), ("overlap_steps", 0), ("synchronous_steps", 0)):
            given: Any = getattr(self, name)
            if name == "every" and given == AUTO:
                continue
            # Users give every as local_steps, too.
            called = f"local_steps={given!r} (every, of LocalSteps)" if name == "every" else f"{name}={given!r}"
            is_refused = not isinstance(given, Integral) or given < least
            refuse((is_refused, f"{called} must be a whole number, at least {least}"))
            object.__setattr__(self, name, int(given))  # of numpy's, too
        every: Any = 1 if self.every == AUTO else self.every
        overlap, synchronous, momentum = self.overlap_steps, self.synchronous_steps, self.outer_momentum
        for name, number in (("outer_momentum", momentum), ("residual_decay", self.residual_decay)):
            refuse((not 0 <= number <= 1, f"{name}={number!r} must be a number with 0 <= {name} <= 1"))
        refuse(
            (
                self.every == AUTO and overlap,
                f"local_steps='auto' measures exchanges that are waited for, and overlap_steps={overlap} was given:"
                " name a number of local steps, or leave it out",
            ),
            (
                overlap >= every,
                f"overlap_steps={overlap} must be less than local_steps={every}: an exchange has to be applied before"
                " the next one begins",
            ),
            (
                synchronous and replace(self, synchronous_steps=0) == LocalSteps(),
                f"synchronous_steps={synchronous} are those before rounds of local steps, and every step is synchronous"
                " with local_steps=1: leave it out (0), or give local_steps=... of 2 or more, or 'auto'",
            ),
            (not self.outer_lr > 0, f"outer_lr={self.outer_lr!r} must be positive; 1 applies the mean change as it is"),
            (momentum == 1, "outer_momentum=1 never forgets: choose a number below 1, such as 0.9"),
            (self.nesterov and not momentum, "nesterov=True needs an outer_momentum above 0, such as 0.9"),
        )


def rounds_of(local_steps: Union[int, str, LocalSteps]) -> Optional[LocalSteps]:
    """Return the rounds that a user asks for; ``None`` where gradients are exchanged in every step."""
    rounds = local_steps if isinstance(local_steps, LocalSteps) else LocalSteps(local_steps)
    return None if rounds == LocalSteps() else rounds


class Compression(TypedDict, total=False):
    """What is sent, how, when and with whom: the settings that all entry points share, given by name.

    ``compressor`` and ``density`` are each entry point's own, and may be given first, without their names.

    Args:
        compressor: what is sent: a name from :func:`~lightning_sparse.available_compressors`, or an object.
        density: fraction of elements sent, ``0 < density <= 1`` (0.001 = 0.1 %); ``None`` for the compressor's own.
        schedule: when and with whom gradients travel: ``"layerwise"``, ``"merged"``, ``"single"``, or an object. None
            of them changes the numbers, except where OMGS selects from what travels together. ``"auto"`` may send more
            than the density asks for, or leave steps to DDP.
        wire: type of the values that travel: ``"float32"``, ``"bfloat16"``, ``"float16"``, or, of compressors that
            send a fixed number of elements, or all, ``"4bit"``, ``"2bit"``. Rounding errors stay in the residual.
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
            parameters; 1 exchanges gradients in every step, ``"auto"`` chooses by measured times, and a
            :class:`~lightning_sparse.LocalSteps` says more. See the page on local steps.
        levels: with 2, the ranks of a node average their gradients first, and each exchanges a share of the means with
            the other nodes: one selection for each node travels, and residuals take as many times less memory as a node
            has ranks. ``"auto"`` takes 2 where several nodes have several ranks each, and the compressor can work on
            shares (``topk``, ``lags``, ``omgs``, ``dgc``, ``dense``). With ``local_steps``, 2 has the ranks of a node
            train in step, and rounds go between nodes. See the page on local steps.

    Example::

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
    local_steps: Union[int, str, LocalSteps]
    levels: Union[str, int]


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
    before selection, as ``adam`` says.
    """

    compressor: Compressor
    density: float
    schedule: Schedule
    wire: torch.dtype
    wire_bits: Optional[int]
    warmup_epochs: int
    bounds_warm_up: bool
    optimizer_correction: Union[str, AdamCorrection, None]
    exchange: Exchange
    overlaps_backward: bool
    local_steps: Optional[LocalSteps]
    levels: Union[str, int]
    asked: ErrorFeedback
    feedback: ErrorFeedback
    adam: Optional[AdamCorrection] = None

    @classmethod
    def of(
        cls, compressor: Union[str, Compressor], density: Optional[float] = None, **given: Unpack[Compression]
    ) -> Self:
        """Check what a user chose."""
        chosen: Compression = {**DEFAULTS, **given}
        own = resolve("compressor", Compressor, COMPRESSORS, compressor)
        schedule = resolve("schedule", Schedule, SCHEDULES, chosen["schedule"])
        wire, bits = wire_values(chosen["wire"])
        if own.wire is not None and bits is None:
            wire, bits = wire_values(own.wire)
        exchange, rounds = exchange_of(chosen["exchange"]), rounds_of(chosen["local_steps"])
        refuse(
            *_of_the_compressor(own, density, chosen),
            *_of_the_correction(own, chosen["optimizer_correction"]),
            *_of_the_schedule(own, schedule, chosen["schedule"]),
        )
        epochs = chosen["warmup_epochs"]
        warmup_epochs = own.default_warmup_epochs if epochs is None else int(epochs)
        feedback = own.feedback._replace(decay=1.0 if rounds is None else rounds.residual_decay)
        settings = cls(
            compressor=own,
            density=own.default_density or 1.0 if density is None else checked_density("density", density),
            schedule=schedule,
            wire=wire,
            wire_bits=bits,
            warmup_epochs=warmup_epochs,
            # Ranks make different numbers of local steps, and their epochs end together.
            bounds_warm_up=epochs is None and warmup_epochs > 0 and rounds is None,
            optimizer_correction=chosen["optimizer_correction"],
            exchange=exchange,
            overlaps_backward=chosen["overlaps_backward"],
            local_steps=rounds,
            levels=chosen["levels"],
            asked=feedback,
            feedback=feedback,
        )
        if rounds is not None:
            is_exact = own.is_lossless and wire is torch.float32
            correction = settings.optimizer_correction
            refuse(*_of_local_steps(own, rounds, settings.adapts_density, correction, is_exact))
        return settings

    @property
    def replicas_diverge(self) -> bool:
        """Whether the replicas are different models between two steps."""
        return self.compressor.replicas_diverge or self.local_steps is not None

    @property
    def adapts_density(self) -> bool:
        """Whether a plan may send more than the density asks for."""
        by_schedule = isinstance(self.schedule, Merged) and self.schedule.adapts_density
        return self.compressor.adapts_density or by_schedule

    @property
    def can_have_levels(self) -> bool:
        """Whether ranks of a node can average gradients first and share the rest of the work."""
        return refusal_of_shares(self.compressor) is None

    @property
    def asks_for_islands(self) -> bool:
        """Whether ranks of a node are to train in step, and rounds of local steps to go between nodes."""
        return self.levels == 2 and self.local_steps is not None

    @property
    def is_sparse(self) -> bool:
        """Whether the optimizers are given part of each gradient late."""
        return self.compressor.feedback.keeps_residual and self.density < 1 and self.local_steps is None

    def correcting_adam(self) -> Self:
        """Return those by which Adam's updates are made before selection, in place of momentum."""
        asked, own = self.asked, self.optimizer_correction
        feedback = ErrorFeedback(follows_learning_rate=asked.follows_learning_rate, clip_norm=asked.clip_norm)
        return replace(self, feedback=feedback, adam=own if isinstance(own, AdamCorrection) else AdamCorrection())

    def leaving_optimizers(self) -> Self:
        """Return those by which gradients are accumulated, or the momentum that was asked for."""
        return replace(self, feedback=self.asked, adam=None)

    @property
    def can_correct_adam(self) -> bool:
        """Whether there is something to correct for Adam, and a way to do it, and the user has not ruled it out."""
        is_wanted = self.optimizer_correction is not None and self.is_sparse
        leaves_room = self.asked.momentum in (None, FROM_OPTIMIZER)
        return is_wanted and leaves_room and _refusal_of_correction(self.compressor) is None

    @property
    def takes_momentum(self) -> bool:
        """Whether momentum was asked for that only the one kind of optimizer has."""
        return self.asked.momentum is not None

    def correcting_momentum(self, correction: Optional[ErrorFeedback]) -> Self:
        """Return those that accumulate momentum, mask and clip as ``correction`` says; ``None`` as the compressor."""
        own = self.compressor.feedback
        if correction is None:
            asked = own._replace(decay=self.asked.decay)
        else:
            refuse(*_of_momentum(self, correction))
            asked = correction._replace(follows_learning_rate=own.follows_learning_rate)
        return replace(self, asked=asked, feedback=asked, adam=None)

    def check_rules(self) -> None:
        """Refuse rules for densities where they could raise none."""
        name = type(self.compressor).__name__
        refuse(
            (
                not self.compressor.has_density_by_parameter,
                f"{name} does not send a density of each parameter that rules could raise: use compressor='topk',"
                " 'lags' or 'dgc'",
            ),
            (
                isinstance(self.schedule, Auto),
                "schedule='auto' decides itself how much is sent, and leaves steps to DDP: use schedule='merged', such"
                " as strategy='sparse_lags'",
            ),
            (
                self.local_steps is not None,
                "rules raise densities by what they see of each step's gradients, and rounds of local steps exchange"
                " none: leave the callback out, or use local_steps=1",
            ),
        )

    def warm_up_stage(self, epoch: int, steps: int, total_steps: Optional[int]) -> int:
        """Return the warm-up's stage, from 0, of an epoch, or of so many of a training's steps where that is further.

        >>> [Settings.of("dgc").warm_up_stage(0, steps, 150) for steps in (0, 8, 15)]
        [0, 2, 4]
        """
        if not total_steps or not self.bounds_warm_up:
            return epoch
        return max(epoch, WARM_UP_PART * self.warmup_epochs * steps // total_steps)

    def density_at(self, stage: int, settled: float = 1.0) -> float:
        """Return the density of a warm-up's stage: it falls geometrically, as in Deep Gradient Compression's code."""
        least = falling_density(self.density, settled)
        if stage >= self.warmup_epochs:
            return max(least, self.density)
        return max(least, same_everywhere(self.density ** ((stage + 1) / (self.warmup_epochs + 1))))

    def wires_for(self, rank: int, ranks: int) -> Wires:
        """Build the wire formats; while Adam's second moment is learned, everything is sent whole by one of them."""
        own = self.compressor
        dense_format = own.dense_wire_format or (None if self.adam is None else "reduce")
        return build_wires(own.wire_format, dense_format, self.wire, rank, ranks, self.exchange, self.wire_bits)

    def memory_for(
        self,
        gradient_dtypes: set[torch.dtype],
        ranks: int,
        share_of: Optional[Callable[[Tensor], Tensor]] = None,
        total_of: Callable[[Tensor], Tensor] = lambda own: own,
    ) -> Memory:
        """Build the memory: what the compressor asks for, or none where nothing can be left over.

        The mean of ``ranks`` independent gradients has a norm smaller by the root of their number: clips allow for it.
        """
        wire_is_exact = gradient_dtypes <= {self.wire} and self.wire == torch.float32
        feedback = self.feedback
        if not feedback.keeps_residual:
            return Memory()
        if self.adam is not None:
            return AdamMemory(ranks, self.adam, feedback.follows_learning_rate, share_of, total_of)
        if self.compressor.is_lossless and wire_is_exact and feedback == ErrorFeedback():
            return Memory()
        local_clip_norm = None if feedback.clip_norm is None else feedback.clip_norm / math.sqrt(ranks)
        if feedback.momentum is None:
            return ResidualMemory(local_clip_norm, feedback.follows_learning_rate, feedback.decay)
        is_unknown = feedback.momentum == FROM_OPTIMIZER
        without_optimizer = Hyperparameters(0.0, 0.0 if is_unknown else float(feedback.momentum), feedback.nesterov)
        return MomentumMemory(
            without_optimizer, feedback.masks_momentum, local_clip_norm, feedback.follows_learning_rate
        )


def takes_wire(compressor: Compressor, wire: str) -> bool:
    """Tell whether a compressor's selections can be written so: few bits need to know how many elements there are."""
    is_sized = compressor.wire_format == "reduce" or (compressor.wire_format == "gather" and compressor.fills_selection)
    return is_sized or wire_values(wire).bits is None


def _of_the_compressor(own: Compressor, density: Optional[float], chosen: Compression) -> Iterator[Row]:
    """Yield what a compressor has no place for."""
    warmup_epochs: Any = chosen["warmup_epochs"]
    wire, exchange, levels = chosen["wire"], chosen["exchange"], chosen["levels"]
    name, reason = type(own).__name__, refusal_of_shares(own)
    has_density = own.default_density is not None
    yield (
        density is not None and not has_density,
        f"density={density} was given to {name}, which has no density: leave it out, or choose a sparsifier such as"
        " compressor='topk'",
    )
    yield (
        warmup_epochs and not has_density,
        f"warmup_epochs={warmup_epochs} was given to {name}, which has no density to warm up: leave it out",
    )
    yield (
        warmup_epochs is not None and (not isinstance(warmup_epochs, Integral) or warmup_epochs < 0),
        f"warmup_epochs={warmup_epochs!r} must be a whole number of epochs, at least 0 (0 = no warm-up)",
    )
    yield (
        not takes_wire(own, wire),
        f"wire={wire!r} was given to {name}, but only a fixed number of elements, or all, are written in few bits: use"
        " wire='bfloat16', or a compressor such as 'topk'",
    )
    yield (
        exchange != AUTO and own.wire_format != "gather",
        f"exchange={exchange!r} was given to {name}, whose selections travel in a way of their own: leave it out, or"
        " choose a compressor that sends a fixed number of elements, such as 'topk'",
    )
    yield (
        levels not in (AUTO, 1, 2),
        f"levels={levels!r} must be 'auto' (two where several nodes have several ranks each), 1 (all ranks exchange"
        " with all) or 2 (ranks of a node average their gradients first)",
    )
    yield (
        levels == 2 and reason is not None,
        f"levels=2 was given, but {name} {reason}: leave it out, or choose a compressor that looks at each element by"
        " itself: 'topk', 'lags', 'omgs', 'dgc' or 'dense'",
    )


def _of_the_correction(own: Compressor, correction: Any) -> Iterator[Row]:
    """Yield why an ``optimizer_correction`` cannot be."""
    is_asked = isinstance(correction, AdamCorrection)
    yield (
        not (is_asked or correction is None or correction == AUTO),
        f"optimizer_correction={correction!r} must be 'auto' (Adam and AdamW are corrected), None (nothing is), or an"
        " AdamCorrection(...)",
    )
    reason = _refusal_of_correction(own)
    if reason is None and own.is_lossless:
        reason = "sends everything, so that there is nothing to correct"
    yield (
        is_asked and reason is not None,
        f"optimizer_correction={correction!r} was given, but {type(own).__name__} {reason}: leave it out, or choose a"
        " sparsifier such as compressor='topk'",
    )


def _of_the_schedule(own: Compressor, schedule: Schedule, given: Union[str, Schedule]) -> Iterator[Row]:
    """Yield why a schedule does not suit a compressor."""
    name = type(own).__name__
    is_simple = own.feedback == ErrorFeedback() and not own.replicas_diverge and own.dense_wire_format is not None
    yield (
        own.adapts_density and not isinstance(schedule, Merged),
        f"schedule={given!r} follows no plan, but {name} was asked to adapt its densities to one: use"
        " schedule='merged', or adapts_density=False",
    )
    yield (
        isinstance(schedule, Auto) and not is_simple,
        f"schedule={given!r} sends some gradients whole and leaves others to DDP, which {name} with its settings has no"
        " way for: use compressor='lags', 'topk' or 'omgs' without momentum, or schedule='merged'",
    )


def _of_local_steps(
    own: Compressor, local: LocalSteps, adapts_density: bool, correction: Any, is_exact: bool
) -> Iterator[Row]:
    """Yield what has no meaning where changes of parameters are exchanged."""
    name, feedback, given = type(own).__name__, own.feedback, f"local_steps={local.every!r}"
    yield (
        own.replicas_diverge,
        f"{given} was given to {name}, which averages replicas by a period of its own: choose another compressor, such"
        " as 'topk' or 'dense'",
    )
    yield (
        feedback.momentum is not None or feedback.clip_norm is not None,
        f"{given} was given to {name}, whose momentum={feedback.momentum!r} and clip_norm={feedback.clip_norm} act on"
        " gradients, which are not exchanged: set both to None, or choose compressor='topk'",
    )
    yield (
        adapts_density,
        f"{given} leaves nothing of an exchange to hide behind backward, and {name} or schedule='auto' was told to send"
        " more where it hides: use schedule='merged', and adapts_density=False",
    )
    yield (
        isinstance(correction, AdamCorrection),
        f"optimizer_correction={correction!r} corrects updates that are exchanged in every step; with {given}"
        " optimizers see whole gradients: leave it out",
    )
    yield (
        local.residual_decay != 1 and (is_exact or not feedback.keeps_residual),
        f"residual_decay={local.residual_decay} was given to {name}, which keeps no residual: leave it out, or choose a"
        " sparsifier such as compressor='topk', or a wire that rounds, such as wire='4bit'",
    )


def _of_momentum(settings: Settings, correction: ErrorFeedback) -> Iterator[Row]:
    """Yield why momentum cannot be accumulated before selection."""
    compressor, own = settings.compressor, settings.compressor.feedback
    name = type(compressor).__name__
    yield (
        own.momentum is not None or own.clip_norm is not None,
        f"{name} corrects momentum or clips itself (momentum={own.momentum!r}, clip_norm={own.clip_norm}): choose"
        f" another compressor, such as 'topk', or tell {name} what you want and leave out the correction",
    )
    yield (
        not own.keeps_residual,
        f"momentum correction has nothing to correct with {name}, which keeps nothing for later: choose a sparsifier"
        " such as compressor='topk', or leave out the correction",
    )
    yield (
        compressor.selects_across_group and correction.masks_momentum,
        f"masks_momentum=True was given, but {name} selects across a group and cannot mask the momentum of what it"
        " sent: set masks_momentum=False, or choose compressor='lags'",
    )
    yield (
        settings.local_steps is not None,
        "momentum correction accumulates gradients before they are exchanged, and rounds of local steps exchange"
        " changes of parameters: leave it out, or use local_steps=1",
    )
    yield (
        isinstance(settings.schedule, Auto),
        "momentum correction cannot be combined with schedule='auto', which leaves steps to DDP, where nothing"
        " accumulates momentum: use schedule='merged', such as strategy='sparse_lags'",
    )


def _refusal_of_correction(compressor: Compressor) -> Optional[str]:
    """Return why the updates of Adam cannot be made before selection; ``None`` where they can."""
    if compressor.replicas_diverge:
        return "lets replicas drift apart, whose optimizers then differ in more than a first moment"
    if not compressor.feedback.keeps_residual:
        return "keeps nothing for later, so that Adam sees every gradient in the step that it is of"
    return None


def refusal_of_shares(compressor: Compressor) -> Optional[str]:
    """Return why a compressor cannot work on shares of gradients; ``None`` if it can."""
    if compressor.replicas_diverge:
        return "lets replicas drift apart, also those of one node"
    if type(compressor).finish_step is not Compressor.finish_step:
        return "learns from whole gradients of all ranks"
    if compressor.wire_format not in ("gather", "reduce"):
        return "exchanges in a way of its own between all ranks"
    return None
