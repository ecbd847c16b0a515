"""The contract of a compressor, which decides WHAT is sent; and HOW MUCH of each parameter is sent at present."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from numbers import Integral, Real
from typing import Any, ClassVar, NamedTuple, Optional, Union

import torch
from torch import Tensor
from torch.nn import Module

from lightning_sparse.compressors.selection import Selection, SelectionSize
from lightning_sparse.functional.elements import local_tensor
from lightning_sparse.removed import refuse_removed

FROM_OPTIMIZER = "optimizer"


class ErrorFeedback(NamedTuple):
    """Settings of error feedback: how what is not sent is kept.

    Attributes:
        keeps_residual: whether what was not sent is kept; only an unbiased or an exact method can afford to drop it.
        momentum: accumulated before selection, instead of in the optimizer after it (momentum correction of Deep
            Gradient Compression): a number, ``"optimizer"`` to take over the SGD optimizer's, ``None`` for none.
        nesterov: whether that momentum is Nesterov's; follows the optimizer where ``momentum`` does.
        masks_momentum: whether a sent element's momentum starts again from zero (momentum factor masking).
        clip_norm: largest norm of the mean gradient; every rank clips its own, before it is accumulated, to this over
            the square root of the number of ranks. ``None`` not to clip.
        rescale_on_lr_change: whether the residual is in units of the update, learning rate times gradient, so that
            another rate does not change what was gathered under the old one.
        decay: factor of the residual before a gradient is added. Only where a residual is all that is kept.
    """

    keeps_residual: bool = True
    momentum: Union[float, str, None] = None
    nesterov: bool = False
    masks_momentum: bool = True
    clip_norm: Optional[float] = None
    rescale_on_lr_change: bool = False
    decay: float = 1.0

    def checked(self) -> "ErrorFeedback":
        """Pass through; raise ``ValueError`` for a momentum outside ``[0, 1)`` or a ``clip_norm`` not above 0."""
        is_number = isinstance(self.momentum, (int, float)) and 0 <= self.momentum < 1
        if not is_number and self.momentum not in (None, FROM_OPTIMIZER):
            raise ValueError(
                f"momentum={self.momentum!r} must be 'optimizer' (taken over from the SGD optimizer), a number with"
                " 0 <= momentum < 1, or None (left to the optimizer)"
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm={self.clip_norm} must be a positive norm, or None not to clip")
        return self


class Clipping(NamedTuple):
    """Largest norm of the mean gradient and largest magnitude of an element; ``None`` where they are not clipped."""

    norm: Optional[float] = None
    value: Optional[float] = None


NOT_CLIPPED = Clipping()


def same_everywhere(power: float) -> float:
    """Round off a power's last digits, which differ by library: two ranks would send different numbers of elements."""
    return float(f"{power:.12g}")


class ModelLayout(NamedTuple):
    """Which parameters are exchanged, and between whom.

    Attributes:
        names: parameter names in the order of their definition, never in that of backward.
        numels: for each its number of elements; of the shards that a rank holds where a model is sharded.
        rank: this rank within the process group that exchanges.
        ranks: size of that process group.
        device: where the gradients are.
        frozen: names of the model's other parameters, which are not exchanged now: frozen, or without an element.
    """

    names: tuple[str, ...]
    numels: tuple[int, ...]
    rank: int
    world_size: int
    device: torch.device
    frozen: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements of the whole model."""
        return sum(self.numels)

    def positions(self) -> dict[str, int]:
        """Return for each name its place in the order of definition."""
        return {name: position for position, name in enumerate(self.names)}

    def starts(self) -> dict[str, int]:
        """Return for each name where its elements start when all are laid end to end."""
        return dict(zip(self.names, accumulate(self.numels, initial=0)))


def trained_in(module: Module) -> dict[str, Tensor]:
    """Return the parameters that require a gradient, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def layout_of(
    module: Module, rank: int, world_size: int, device: torch.device, trained: Optional[Mapping[str, Tensor]] = None
) -> ModelLayout:
    """Lay out a model of which those parameters are exchanged that are ``trained``, and have an element."""
    trained = trained_in(module) if trained is None else trained
    numels = {name: numel for name, tensor in trained.items() if (numel := local_tensor(tensor).numel())}
    frozen = tuple(name for name, _ in module.named_parameters() if name not in numels)
    return ModelLayout(tuple(numels), tuple(numels.values()), rank, world_size, device, frozen)


Gather = Callable[[Tensor], Tensor]


class Compressor(ABC):
    """Choose what is sent of every accumulated gradient.

    Only :meth:`select` has to be written. It is pure: it calls no collective, changes no tensor that it is given, and
    answers for a tensor whatever others come with it (unless it ``selects_across_bucket``: its numbers then depend on
    how parameters are grouped). Of an accumulated gradient with a NaN or an infinity it selects at least one, so that
    all ranks learn of it. State (a threshold, a partition) changes only in :meth:`finish_step`, all being known.

    Attributes:
        default_density: fraction of elements sent when the user names none; ``None`` for a method without a density.
        default_warmup_epochs: epochs over which the density falls to its target when the user does not say; at most a
            tenth of a training of known length.
        has_density_by_parameter: whether each parameter's density is just what is sent, so that rules may raise it.
        wire_format: how its selections travel, see :mod:`lightning_sparse.engine.wire`.
        dense_wire_format: how a parameter of density 1 travels, whole, without :meth:`select`, and any selection
            without indices, which all ranks or none must have; ``None`` to select at density 1, too.
        selects_across_bucket: whether :meth:`select` is given a bucket's parameters as one tensor: they compete.
        fills_selection: whether it sends all elements that its message has room for.
        wire: name of the ``wire=`` that it takes unless the user names one of few bits; ``None`` for the user's.
        is_lossless: whether everything is sent, so that only the rounding of the wire can leave a residual.
        replicas_diverge: whether ranks apply different updates.
        param_sync_every: steps after which such replicas' parameters are averaged over ranks; ``None`` for never.
        feedback: what is asked of the memory.
        adaptive_density: whether a plan may raise parameters' densities where that costs no time; only for a method
            with a ``dense_wire_format`` that takes each density as it comes.
    """

    default_density: ClassVar[Optional[float]]
    default_warmup_epochs: ClassVar[int] = 0
    has_density_by_parameter: ClassVar[bool] = False
    wire_format: ClassVar[str]
    dense_wire_format: ClassVar[Optional[str]] = None
    selects_across_bucket: ClassVar[bool] = False
    fills_selection: ClassVar[bool] = True
    wire: ClassVar[Optional[str]] = None
    is_lossless: ClassVar[bool] = False
    replicas_diverge: ClassVar[bool] = False
    param_sync_every: Optional[int] = None
    feedback: ErrorFeedback = ErrorFeedback()
    adaptive_density: bool = False

    def __init_subclass__(cls) -> None:
        for name in vars(cls):
            refuse_removed(f"{cls.__name__}.{name}", f"Compressor.{name}")

    def begin(self, layout: ModelLayout) -> None:
        """Start anew with a model: check settings that name parameters, forget all state.

        Raises:
            ValueError: if a setting does not fit the model.
        """
        return

    def density_of(self, name: str, density: float) -> float:
        """Return the density of one parameter, where ``density`` is that of the model."""
        return density

    def least_density(self, density: float) -> float:
        """Return the least density that any parameter may have, where ``density`` is that of the model."""
        return density

    def begin_step(self, density: float) -> None:
        """Know the model's density in the steps that come, warm-ups included; before :meth:`begin`, too."""
        return

    @abstractmethod
    def select(self, names: Sequence[str], accumulated: Sequence[Tensor], counts: Sequence[int]) -> Sequence[Selection]:
        """Choose what is sent of each tensor of a bucket, as one selection for each.

        Args:
            names: parameter names.
            accumulated: for each, gradient plus residual, flat; must not be changed. One tensor for all of them
                together where the method ``selects_across_bucket``.
            counts: for each tensor, the number of elements that the density asks for.
        """

    def selection_size(self, numel: int, count: int) -> SelectionSize:
        """Return the size of an ordinary selection; override it where the density's ``count`` is not what is sent."""
        return SelectionSize(numel, count)

    def finish_step(
        self, names: Sequence[str], means: Sequence[Selection], finite: Tensor, all_gather: Gather
    ) -> Sequence[Selection]:
        """Update the method's state on every rank, once all buckets of a step have arrived; return means to be written.

        Args:
            names: parameter names, in the order in which they were exchanged.
            means: what arrived for each, of :class:`~lightning_sparse.engine.wire.base.ExchangeResult`; returned
                unless changed.
            finite: bool ``[]``, on the host or on a device; where false, the step does not count, and the state has
                to stay as it is.
            all_gather: gathers a small tensor ``[n]``, of equal size on all ranks, as ``[world_size, n]``; to be called
                equally often on all ranks.
        """
        return means

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the method as plain tensors and numbers, by parameter name where each has its own."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the state of the method.

        It may be of other parameters of the same model, some of them frozen or unfrozen since: what is known by name
        should be kept for those that are frozen now.

        Raises:
            ValueError: if the state is another method's.
        """
        if state:
            raise ValueError(
                f"{type(self).__name__} keeps no state, but was given {', '.join(map(repr, list(state)[:3]))}; load it"
                " into the compressor that it was saved with"
            )


def checked_density(argument: str, density: Any) -> float:
    """Return the density given for an argument; raise ``ValueError`` if it is no number in ``(0, 1]``."""
    is_number = isinstance(density, Real) and not isinstance(density, bool)
    if not is_number or not 0 < density <= 1:
        raise ValueError(
            f"{argument}={density!r} must be a fraction of elements with 0 < density <= 1; 0.01 sends one in a hundred."
            " For a compression ratio such as 100, pass its inverse."
        )
    return float(density)


def is_whole(number: Any, least: int) -> bool:
    """Tell whether a value is a whole number, of numpy's too, and not below the least; ``True`` is none."""
    return not isinstance(number, bool) and isinstance(number, Integral) and int(number) >= least


def checked_count(argument: str, count: Any, unit: str) -> int:
    """Return the number of some unit given for an argument; ``ValueError`` if it is not whole and above 0."""
    if not is_whole(count, 1):
        raise ValueError(f"{argument}={count!r} must be a whole number of {unit}, at least 1")
    return int(count)


def element_count(numel: int, density: float) -> int:
    """Return how many of ``numel`` elements, of a share on two levels, a density asks for: at least one."""
    return max(1, round(density * numel))
