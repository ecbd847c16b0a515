"""What the user chose, checked."""

from typing import Optional, Union

import torch

from lightning_sparse.compressors import COMPRESSORS, Compressor
from lightning_sparse.feedback import ErrorFeedback
from lightning_sparse.memory import Memory, NoMemory, build_memory
from lightning_sparse.schedule import SCHEDULES, Auto, Merged, Schedule
from lightning_sparse.wire import wire_dtype


class Settings:
    """What the user chose, checked and with names turned into objects.

    Args:
        compressor: name or object.
        density: fraction of elements sent, ``0 < density <= 1``; ``None`` for the compressor's own default.
        schedule: name or object.
        wire: name of the type of the values that travel.
        warmup_epochs: epochs over which the density falls to its target; ``None`` for the compressor's own default.

    Attributes:
        feedback: what is asked of the memory; the compressor's own unless :meth:`correct_momentum` changes it.
        hides_communication: whether a rule wants the plan to send more where that costs no time.

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
    ) -> None:
        self.compressor = COMPRESSORS.resolve(compressor)
        self.density = _checked_density(density, self.compressor)
        self.warmup_epochs = _checked_warmup(warmup_epochs, self.compressor)
        self.schedule = SCHEDULES.resolve(schedule)
        self.wire = wire_dtype(wire)
        self.feedback = self.compressor.feedback
        self.hides_communication = False
        self._check_adaptation(schedule)

    @property
    def adapts_density(self) -> bool:
        """Whether a plan may send more than the density asks for."""
        by_schedule = isinstance(self.schedule, Merged) and self.schedule.adapts_density
        return self.compressor.adapts_density or by_schedule or self.hides_communication

    @property
    def is_sparse(self) -> bool:
        """Whether the optimizers are given part of each gradient late."""
        return self.compressor.feedback.keeps_residual and self.density < 1

    def correct_momentum(self, correction: Optional[ErrorFeedback]) -> None:
        """Accumulate momentum and clip as ``correction`` says, whatever the compressor; ``None`` as it says itself.

        Only its momentum, masking and clipping are taken over.

        Raises:
            ValueError: if the compressor keeps no residual, corrects momentum itself, or selects across a group.
        """
        own = self.compressor.feedback
        if correction is None:
            self.feedback = own
            return
        _check_correction(self.compressor, correction)
        if isinstance(self.schedule, Auto):
            raise ValueError(
                "momentum correction cannot be combined with schedule='auto', which leaves steps to DDP, where nothing"
                " accumulates momentum: use schedule='merged', such as strategy='sparse_lags'"
            )
        self.feedback = correction._replace(follows_learning_rate=own.follows_learning_rate)

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

    def density_at(self, epoch: int) -> float:
        """Return the density of an epoch: during warm-up it falls geometrically, from near a quarter at 0.001.

        With a density of 0.001 and four epochs it is 0.25, 0.063, 0.016, 0.004 and then 0.001, as in Deep Gradient
        Compression (arXiv 1712.01887, section 3.3; the exponent is that of its released code).
        """
        if epoch >= self.warmup_epochs:
            return self.density
        return float(self.density ** ((epoch + 1) / (self.warmup_epochs + 1)))

    def memory_for(self, gradient_dtypes: set[torch.dtype], ranks: int) -> Memory:
        """Choose the memory: what the compressor asks for, or none where nothing can be left over."""
        wire_is_exact = gradient_dtypes <= {self.wire} and self.wire == torch.float32
        if self.compressor.is_lossless and wire_is_exact and self.feedback == ErrorFeedback():
            return NoMemory()
        return build_memory(self.feedback, ranks)


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
            " sent: set masks_momentum=False, or choose OMGS(per_tensor=True) or compressor='lags'"
        )


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
    if not isinstance(density, (int, float)) or not 0 < density <= 1:
        raise ValueError(
            f"density={density} must be a fraction of elements with 0 < density <= 1; 0.01 sends one in a hundred."
            " For a compression ratio such as 100, pass its inverse."
        )
    return float(density)


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
