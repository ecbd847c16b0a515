"""Settings: the user's choices, checked."""

import math
from collections.abc import Callable
from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor

from lightning_sparse.compressors import COMPRESSORS, Compressor
from lightning_sparse.compressors.base import checked_density
from lightning_sparse.compressors.feedback import (
    FROM_OPTIMIZER,
    NOT_CLIPPED,
    AdamCorrection,
    Clipping,
    ErrorFeedback,
    Hyperparameters,
    falling_density,
    same_everywhere,
)
from lightning_sparse.engine.adam.memory import AdamMemory
from lightning_sparse.engine.memory import Memory, MomentumMemory, NoMemory, ResidualMemory
from lightning_sparse.engine.wire import Exchange, Owners, exchange_of, wire_values
from lightning_sparse.registry import resolve
from lightning_sparse.schedule import SCHEDULES, Auto, Merged, Schedule

AUTO = "auto"


class LocalSteps(NamedTuple):
    """Settings of rounds of local steps.

    Attributes:
        every: optimizer steps of a round; ``"auto"`` to choose by measured times.
        outer_lr: what the mean change is multiplied by, when it is applied to the shared model.
        outer_momentum: momentum of the outer step; 0 for none.
        nesterov: whether that momentum is Nesterov's.
        residual_decay: what waits is multiplied by this before a change is added; 1 keeps all of it.
        overlap_steps: steps that are made while an exchange travels; 0 waits for it.
        fragments: parts of the model that are exchanged in turn, so that bytes do not come in a burst.
        synchronous_steps: optimizer steps that are left to DDP, before the first round begins.
    """

    every: Union[int, str] = 1
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    nesterov: bool = False
    residual_decay: float = 1.0
    overlap_steps: int = 0
    fragments: int = 1
    synchronous_steps: int = 0

    def checked(self) -> "LocalSteps":
        """Pass through if in range.

        Raises:
            ValueError: for a number out of range.
        """
        if self.every == AUTO and (self.overlap_steps or self.fragments > 1):
            raise ValueError(
                f"local_steps='auto' measures exchanges that are waited for, and overlap_steps={self.overlap_steps},"
                f" fragments={self.fragments} were given: name a number of local steps, or leave the two out"
            )
        every = 1 if self.every == AUTO else self.every
        for name, given, least in (
            ("local_steps", every, 1),
            ("overlap_steps", self.overlap_steps, 0),
            ("fragments", self.fragments, 1),
            ("synchronous_steps", self.synchronous_steps, 0),
        ):
            if not isinstance(given, int) or given < least:
                raise ValueError(f"{name}={given!r} must be a whole number, at least {least}")
        assert isinstance(every, int)
        if self.synchronous_steps and self._replace(synchronous_steps=0) == LocalSteps():
            raise ValueError(
                f"synchronous_steps={self.synchronous_steps} are those before rounds of local steps, and every step is"
                " synchronous with local_steps=1: leave it out (0), or give local_steps=... of 2 or more, or 'auto'"
            )
        if not self.outer_lr > 0:
            raise ValueError(f"outer_lr={self.outer_lr!r} must be positive; 1 applies the mean change as it is")
        for name, number in (("outer_momentum", self.outer_momentum), ("residual_decay", self.residual_decay)):
            if not 0 <= number <= 1:
                raise ValueError(f"{name}={number!r} must be a number with 0 <= {name} <= 1")
        if self.outer_momentum == 1:
            raise ValueError("outer_momentum=1 never forgets: choose a number below 1, such as 0.9")
        if self.nesterov and not self.outer_momentum:
            raise ValueError("nesterov=True needs an outer_momentum above 0, such as 0.9")
        self._check_turns(every)
        return self

    def _check_turns(self, every: int) -> None:
        if self.fragments > every:
            raise ValueError(
                f"fragments={self.fragments} cannot take turns within local_steps={every}: at most one fragment is"
                " exchanged after each step"
            )
        if self.overlap_steps >= every:
            raise ValueError(
                f"overlap_steps={self.overlap_steps} must be less than local_steps={every}: an exchange has to be"
                " applied before the next one of the same parameters begins"
            )


class Settings:
    """The user's choices, checked and with names turned into objects.

    Args:
        compressor: name or object.
        density: fraction of elements sent, ``0 < density <= 1``; ``None`` for the compressor's own default.
        schedule: name or object.
        wire: name of the type of the values that travel.
        warmup_epochs: epochs over which the density falls to its target; ``None`` for the compressor's own default.
        optimizer_correction: see :class:`~lightning_sparse.strategy.SparseDDPStrategy`.
        exchange: likewise.
        overlaps_backward: whether groups are exchanged while backward goes on.
        local_steps: rounds of local steps; ``None`` to exchange gradients in every step.
        levels: see :class:`~lightning_sparse.strategy.SparseDDPStrategy`.

    Attributes:
        feedback: what is asked of the memory; the compressor's own unless :meth:`correct_momentum` or
            :meth:`correct_adam` changes it.

    Raises:
        ValueError: for an unknown name, a density out of range, a density for a compressor that has none, or a
            warm-up that is negative.
        TypeError: for an object of the wrong kind.
    """

    def __init__(
        self,
        compressor: Union[str, Compressor],
        density: Optional[float],
        schedule: Union[str, Schedule],
        wire: str,
        warmup_epochs: Optional[int] = None,
        optimizer_correction: Union[str, AdamCorrection, None] = AUTO,
        exchange: Union[str, Owners] = AUTO,
        overlaps_backward: bool = True,
        local_steps: Optional[LocalSteps] = None,
        levels: Union[str, int] = AUTO,
    ) -> None:
        self.compressor = resolve("compressor", Compressor, COMPRESSORS, compressor)
        self.density = _checked_density(density, self.compressor)
        self.warmup_epochs = _checked_warmup(warmup_epochs, self.compressor)
        self.schedule = resolve("schedule", Schedule, SCHEDULES, schedule)
        chosen = wire_values(wire)
        own = self.compressor.wire
        self.wire, self.wire_bits = chosen if own is None or chosen.bits is not None else wire_values(own)
        _check_wire(wire, self.wire_bits, self.compressor)
        self.overlaps_backward = overlaps_backward
        self.feedback = self._asked_feedback = self.compressor.feedback
        self.optimizer_correction = _checked_correction(optimizer_correction, self.compressor)
        self.exchange = _checked_exchange(exchange, self.compressor)
        self.levels = _checked_levels(levels, self.compressor)
        self._check_adaptation(schedule)
        self.local_steps = local_steps
        if local_steps is not None:
            self._check_rounds(local_steps)
            self.feedback = self._asked_feedback = self.feedback._replace(decay=local_steps.residual_decay)

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
        return _refusal_of_levels(self.compressor) is None

    @property
    def is_sparse(self) -> bool:
        """Whether the optimizers are given part of each gradient late."""
        return self.compressor.feedback.keeps_residual and self.density < 1 and self.local_steps is None

    def correct_adam(self, clip: Clipping = NOT_CLIPPED) -> None:
        """Have Adam's updates made before selection, in the next fit, of gradients that are clipped so.

        The compressor's own momentum is left out: Adam's first moment is in its place.
        """
        asked, own = self._asked_feedback, self.optimizer_correction
        correction = own if isinstance(own, AdamCorrection) else AdamCorrection()
        self.feedback = ErrorFeedback(
            adam=correction,
            follows_learning_rate=asked.follows_learning_rate,
            clip_norm=asked.clip_norm if clip.norm is None else clip.norm,
            clip_value=clip.value,
        )

    def leave_optimizers(self) -> None:
        """Have gradients accumulated, or the momentum that was asked for, in the next fit."""
        self.feedback = self._asked_feedback

    @property
    def can_correct_adam(self) -> bool:
        """Whether there is something to correct for Adam, and a way to do it, and the user has not ruled it out."""
        is_wanted = self.optimizer_correction is not None and self.is_sparse
        leaves_room = self._asked_feedback.momentum in (None, FROM_OPTIMIZER)
        return is_wanted and leaves_room and _refusal_of(self.compressor) is None

    @property
    def takes_momentum(self) -> bool:
        """Whether momentum was asked for that only the one kind of optimizer has."""
        return self._asked_feedback.momentum is not None

    def correct_momentum(self, correction: Optional[ErrorFeedback]) -> None:
        """Accumulate momentum and clip as ``correction`` says, whatever the compressor; ``None`` as it says itself.

        Only its momentum, masking and clipping are taken over.

        Raises:
            ValueError: if the compressor keeps no residual, corrects momentum itself, or selects across a group.
        """
        own = self.compressor.feedback
        if correction is None:
            self.feedback = self._asked_feedback = own._replace(decay=self.feedback.decay)
            return
        _check_correction(self.compressor, correction)
        if self.local_steps is not None:
            raise ValueError(
                "momentum correction accumulates gradients before they are exchanged, and rounds of local steps"
                " exchange changes of parameters: leave it out, or use local_steps=1"
            )
        if isinstance(self.schedule, Auto):
            raise ValueError(
                "momentum correction cannot be combined with schedule='auto', which leaves steps to DDP, where nothing"
                " accumulates momentum: use schedule='merged', such as strategy='sparse_lags'"
            )
        self.feedback = correction._replace(follows_learning_rate=own.follows_learning_rate)
        self._asked_feedback = self.feedback

    def check_rules(self) -> None:
        """Refuse rules for densities where they could raise none.

        Raises:
            ValueError: if the compressor has no density for each parameter, or the schedule decides itself.
        """
        name = type(self.compressor).__name__
        if not self.compressor.has_density_by_parameter:
            raise ValueError(
                f"{name} does not send a density of each parameter that rules could raise: use compressor='topk',"
                " 'lags' or 'dgc'"
            )
        if isinstance(self.schedule, Auto):
            raise ValueError(
                "schedule='auto' decides itself how much is sent, and leaves steps to DDP: use schedule='merged', such"
                " as strategy='sparse_lags'"
            )
        if self.local_steps is not None:
            raise ValueError(
                "rules raise densities by what they see of each step's gradients, and rounds of local steps exchange"
                " none: leave the callback out, or use local_steps=1"
            )

    def _check_rounds(self, local: LocalSteps) -> None:
        """Refuse what has no meaning where changes of parameters are exchanged."""
        name, own = type(self.compressor).__name__, self.compressor.feedback
        given = f"local_steps={local.every!r}"
        if self.compressor.replicas_diverge:
            raise ValueError(
                f"{given} was given to {name}, which averages replicas by a period of its own: choose another"
                " compressor, such as 'topk' or 'dense'"
            )
        if own.momentum is not None or own.clip_norm is not None:
            raise ValueError(
                f"{given} was given to {name}, whose momentum={own.momentum!r} and clip_norm={own.clip_norm} act on"
                " gradients, which are not exchanged: set both to None, or choose compressor='topk'"
            )
        if self.adapts_density:
            raise ValueError(
                f"{given} leaves nothing of an exchange to hide behind backward, and {name} or schedule='auto' was told"
                " to send more where it hides: use schedule='merged', and adapts_density=False"
            )
        if isinstance(self.optimizer_correction, AdamCorrection):
            raise ValueError(
                f"optimizer_correction={self.optimizer_correction!r} corrects updates that are exchanged in every step;"
                f" with {given} optimizers see whole gradients: leave it out"
            )
        if local.residual_decay != 1 and (self.compressor.is_lossless or not own.keeps_residual):
            raise ValueError(
                f"residual_decay={local.residual_decay} was given to {name}, which leaves nothing waiting: leave it"
                " out, or choose a sparsifier such as compressor='topk'"
            )

    def _check_adaptation(self, schedule: Union[str, Schedule]) -> None:
        name = type(self.compressor).__name__
        if self.compressor.adapts_density and not isinstance(self.schedule, Merged):
            raise ValueError(
                f"schedule={schedule!r} follows no plan, but {name} was asked to adapt its densities to one: use"
                " schedule='merged', or adapts_density=False"
            )
        is_simple = self.compressor.feedback == ErrorFeedback() and not self.compressor.replicas_diverge
        if isinstance(self.schedule, Auto) and not (is_simple and self.compressor.dense_wire_format is not None):
            raise ValueError(
                f"schedule={schedule!r} sends some gradients whole and leaves others to DDP, which {name} with its"
                " settings has no way for: use compressor='lags', 'topk' or 'omgs' without momentum, or"
                " schedule='merged'"
            )

    def density_at(self, epoch: int, settled: float = 1.0) -> float:
        """Return the density of an epoch: during warm-up it falls geometrically, from near a quarter at 0.001.

        With a density of 0.001 and four epochs it is 0.25, 0.063, 0.016, 0.004 and then 0.001, as in Deep Gradient
        Compression (arXiv 1712.01887, section 3.3; the exponent is that of its released code).

        Args:
            epoch: from 0.
            settled: how much of the warm-up of corrected optimizers lies behind, which may ask for more.
        """
        least = falling_density(self.density, settled)
        if epoch >= self.warmup_epochs:
            return max(least, self.density)
        return max(least, same_everywhere(self.density ** ((epoch + 1) / (self.warmup_epochs + 1))))

    def memory_for(
        self,
        gradient_dtypes: set[torch.dtype],
        ranks: int,
        share_of: Optional[Callable[[Tensor], Tensor]] = None,
    ) -> Memory:
        """Build the memory: what the compressor asks for, or none where nothing can be left over.

        Args:
            gradient_dtypes: of the gradients that are exchanged.
            ranks: how many ranks the gradient is averaged over: the norm of a mean of that many independent gradients
                is smaller by its square root, and a local clip has to allow for it.
            share_of: returns this rank's share of a flat tensor, where it is given only that of each gradient.
        """
        wire_is_exact = gradient_dtypes <= {self.wire} and self.wire == torch.float32
        feedback = self.feedback
        if not feedback.keeps_residual:
            return NoMemory()
        if self.compressor.is_lossless and wire_is_exact and feedback == ErrorFeedback():
            return NoMemory()
        if feedback.adam is not None:
            clip = Clipping(feedback.clip_norm, feedback.clip_value)
            return AdamMemory(ranks, feedback.adam.refresh_steps, clip, feedback.follows_learning_rate, share_of)
        local_clip_norm = None if feedback.clip_norm is None else feedback.clip_norm / math.sqrt(ranks)
        if feedback.momentum is None:
            return ResidualMemory(local_clip_norm, feedback.follows_learning_rate, feedback.decay)
        is_unknown = feedback.momentum == FROM_OPTIMIZER
        without_optimizer = Hyperparameters(0.0, 0.0 if is_unknown else float(feedback.momentum), feedback.nesterov)
        return MomentumMemory(
            without_optimizer, feedback.masks_momentum, local_clip_norm, feedback.follows_learning_rate
        )


def _check_correction(compressor: Compressor, correction: ErrorFeedback) -> None:
    name, own = type(compressor).__name__, compressor.feedback
    if own.momentum is not None or own.clip_norm is not None:
        raise ValueError(
            f"{name} corrects momentum or clips itself (momentum={own.momentum!r}, clip_norm={own.clip_norm}): choose"
            f" another compressor, such as 'topk', or tell {name} what you want and leave out the correction"
        )
    if not own.keeps_residual:
        raise ValueError(
            f"momentum correction has nothing to correct with {name}, which keeps nothing for later: choose a"
            " sparsifier such as compressor='topk', or leave out the correction"
        )
    if compressor.selects_across_group and correction.masks_momentum:
        raise ValueError(
            f"masks_momentum=True was given, but {name} selects across a group and cannot mask the momentum of what it"
            " sent: set masks_momentum=False, or choose compressor='lags'"
        )


def _refusal_of(compressor: Compressor) -> Optional[str]:
    """Return why the updates of Adam cannot be made before selection; ``None`` where they can."""
    if compressor.replicas_diverge:
        return "lets replicas drift apart, whose optimizers then differ in more than a first moment"
    if not compressor.feedback.keeps_residual:
        return "keeps nothing for later, so that Adam sees every gradient in the step that it is of"
    return None


def _checked_correction(
    correction: Union[str, AdamCorrection, None], compressor: Compressor
) -> Union[str, AdamCorrection, None]:
    if correction is None or correction == AUTO:
        return correction
    if not isinstance(correction, AdamCorrection):
        raise ValueError(
            f"optimizer_correction={correction!r} must be 'auto' (Adam and AdamW are corrected), None (nothing is), or"
            " an AdamCorrection(...)"
        )
    name, reason = type(compressor).__name__, _refusal_of(compressor)
    if reason is None and compressor.is_lossless:
        reason = "sends everything, so that there is nothing to correct"
    if reason is not None:
        raise ValueError(
            f"optimizer_correction={correction!r} was given, but {name} {reason}: leave it out, or choose a sparsifier"
            " such as compressor='topk'"
        )
    return correction


def _checked_exchange(exchange: Union[str, Owners], compressor: Compressor) -> Exchange:
    chosen = exchange_of(exchange)
    if exchange != AUTO and compressor.wire_format != "gather":
        raise ValueError(
            f"exchange={exchange!r} was given to {type(compressor).__name__}, whose selections travel in a way of their"
            " own: leave it out, or choose a compressor that sends a fixed number of elements, such as 'topk'"
        )
    return chosen


def _check_wire(wire: str, bits: Optional[int], compressor: Compressor) -> None:
    is_sized = compressor.wire_format == "gather" and compressor.fills_selection
    if bits is not None and not (is_sized or compressor.wire_format == "reduce"):
        raise ValueError(
            f"wire={wire!r} was given to {type(compressor).__name__}, but only a fixed number of elements, or all,"
            " are written in few bits: use wire='bfloat16', or a compressor such as 'topk'"
        )


def _refusal_of_levels(compressor: Compressor) -> Optional[str]:
    """Return why a compressor cannot work on shares of gradients; ``None`` if it can."""
    if compressor.replicas_diverge:
        return "lets replicas drift apart, also those of one node"
    if type(compressor).finish_step is not Compressor.finish_step:
        return "learns from whole gradients of all ranks"
    if compressor.wire_format not in ("gather", "reduce"):
        return "exchanges in a way of its own between all ranks"
    return None


def _checked_levels(levels: Union[str, int], compressor: Compressor) -> Union[str, int]:
    if levels not in (AUTO, 1, 2):
        raise ValueError(
            f"levels={levels!r} must be 'auto' (two where several nodes have several ranks each), 1 (all ranks exchange"
            " with all) or 2 (ranks of a node average their gradients first)"
        )
    reason = _refusal_of_levels(compressor)
    if levels == 2 and reason is not None:
        raise ValueError(
            f"levels=2 was given, but {type(compressor).__name__} {reason}: leave it out, or choose a compressor that"
            " looks at each element by itself: 'topk', 'lags', 'omgs', 'dgc' or 'dense'"
        )
    return levels


def _checked_density(density: Optional[float], compressor: Compressor) -> float:
    name = type(compressor).__name__
    if compressor.default_density is None:
        if density is not None:
            raise ValueError(
                f"density={density} was given to {name}, which has no density: leave it out, or choose a sparsifier"
                " such as compressor='topk'"
            )
        return 1.0
    if density is None:
        return compressor.default_density
    return checked_density("density", density)


def _checked_warmup(epochs: Optional[int], compressor: Compressor) -> int:
    if epochs is None:
        return compressor.default_warmup_epochs
    if compressor.default_density is None and epochs:
        raise ValueError(
            f"warmup_epochs={epochs} was given to {type(compressor).__name__}, which has no density to warm up: leave"
            " it out"
        )
    if not isinstance(epochs, int) or epochs < 0:
        raise ValueError(f"warmup_epochs={epochs!r} must be a whole number of epochs, at least 0 (0 = no warm-up)")
    return epochs
