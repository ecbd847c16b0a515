"""The contract of a compressor, which decides WHAT is sent."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Optional

from torch import Tensor

from lightning_sparse.compressors.feedback import ErrorFeedback
from lightning_sparse.compressors.layout import ModelLayout
from lightning_sparse.compressors.selection import Selection, SelectionSize

Gather = Callable[[Tensor], Tensor]


class Compressor(ABC):
    """Choose what is sent of every accumulated gradient.

    Only :meth:`select` has to be written. It is pure: it calls no collective, changes no tensor that it is given, and
    its answer for a tensor does not depend on which others come with it; only one that ``selects_across_group`` is
    exempt, and its numbers then depend on how parameters are grouped. If an accumulated gradient holds a NaN or an
    infinity, at least one of them must be selected: that is how all ranks learn of it. State (a threshold, a partition)
    changes in :meth:`finish_step` only, when the whole step is known.

    Attributes:
        default_density: fraction of elements sent when the user names none; ``None`` for a method without a density.
        default_warmup_epochs: epochs over which the density falls to its target when the user does not say.
        has_density_by_parameter: whether it sends of every parameter just what that parameter's density asks for, so
            that rules may raise it.
        wire_format: how its selections travel, see :mod:`lightning_sparse.engine.wire`.
        dense_wire_format: how a parameter travels while its density is 1: whole, without a call of :meth:`select`. A
            selection without indices travels the same way, so whether there are any must be the same on all ranks.
            ``None`` for a method that also selects at a density of 1.
        selects_across_group: whether :meth:`select` is given the parameters of a group laid end to end, as one tensor,
            so that they compete for the elements that the group sends.
        fills_selection: whether it sends all elements that its message has room for.
        wire: name of the ``wire=`` that it takes unless the user names one of few bits; ``None`` for the user's.
        is_lossless: whether everything is sent, so that only the rounding of the wire can leave a residual.
        param_sync_every: steps after which parameters are averaged over ranks, for a method that lets replicas drift
            apart; ``None`` for never.
        replicas_diverge: whether ranks apply different updates.
        feedback: what is asked of the memory.
        adapts_density: whether a plan may raise the densities of parameters where that costs no time; only for a
            method that has a ``dense_wire_format`` and takes each density as it comes.
        agreement_nbytes: bytes that :meth:`finish_step` gathers from each rank in an ordinary step.
    """

    default_density: ClassVar[Optional[float]]
    default_warmup_epochs: ClassVar[int] = 0
    has_density_by_parameter: ClassVar[bool] = False
    wire_format: ClassVar[str]
    dense_wire_format: ClassVar[Optional[str]] = None
    selects_across_group: ClassVar[bool] = False
    fills_selection: ClassVar[bool] = True
    wire: ClassVar[Optional[str]] = None
    is_lossless: ClassVar[bool] = False
    replicas_diverge: ClassVar[bool] = False
    param_sync_every: Optional[int] = None
    feedback: ErrorFeedback = ErrorFeedback()
    adapts_density: bool = False
    agreement_nbytes: ClassVar[int] = 0

    def begin(self, layout: ModelLayout) -> None:
        """Start anew with a model: check settings that name parameters, forget all state.

        Raises:
            ValueError: if a setting does not fit the model.
        """
        return

    def density_of(self, name: str, density: float) -> float:
        """Return the density of one parameter, where ``density`` is that of the model."""
        return density

    @abstractmethod
    def select(self, names: Sequence[str], accumulated: Sequence[Tensor], counts: Sequence[int]) -> Sequence[Selection]:
        """Choose what is sent of each tensor of a group.

        Args:
            names: parameter names.
            accumulated: for each, the flat tensor of gradient plus residual; must not be changed. One tensor for all of
                them together where the method ``selects_across_group``.
            counts: for each tensor, the number of elements that the density asks for.

        Returns:
            one selection for each tensor.
        """

    def selection_size(self, numel: int, count: int) -> SelectionSize:
        """Return the size of an ordinary selection from a tensor, of which the density asks for ``count`` elements.

        Override it where that is another number than the density asks for.
        """
        return SelectionSize(numel, count)

    def finish_step(
        self, names: Sequence[str], means: Sequence[Selection], finite: Tensor, all_gather: Gather
    ) -> Sequence[Selection]:
        """Update the method's state once all groups of a step have arrived; runs on every rank.

        Args:
            names: parameter names, in the order in which they were exchanged.
            means: for each what arrived, see :class:`~lightning_sparse.engine.wire.Arrival`.
            finite: bool ``[]``; where false, the step does not count, and the state has to stay as it is.
            all_gather: gathers a small tensor ``[n]``, of equal size on all ranks, and returns ``[ranks, n]``; to be
                called equally often on all ranks.

        Returns:
            what is to be written as the mean gradients; ``means`` unless the method changes them.
        """
        return means

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the method as plain tensors and numbers, by parameter name where each has its own."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the state of the method.

        It may be of other parameters of the same model, because some have been frozen or unfrozen since. What is known
        by name should then be kept for those that are frozen now.

        Raises:
            ValueError: if the state is another method's.
        """
        if state:
            raise ValueError(
                f"{type(self).__name__} keeps no state, but was given {', '.join(map(repr, list(state)[:3]))}; load it"
                " into the compressor that it was saved with"
            )


def checked_density(argument: str, density: Any) -> float:
    """Pass a density, given for an argument, through.

    Raises:
        ValueError: if it is no number in ``(0, 1]``.
    """
    is_number = isinstance(density, (int, float)) and not isinstance(density, bool)
    if not is_number or not 0 < density <= 1:
        raise ValueError(
            f"{argument}={density!r} must be a fraction of elements with 0 < density <= 1; 0.01 sends one in a hundred."
            " For a compression ratio such as 100, pass its inverse."
        )
    return float(density)


def element_count(numel: int, density: float) -> int:
    """Return how many of ``numel`` elements a density sends: at least one."""
    return max(1, round(density * numel))
