"""The interface of compressors, which select the elements to send, and the checks of compressor arguments."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
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
    """Settings of error feedback, which stores unsent values and adds them to a later message.

    Attributes:
        keeps_residual: whether unsent values are stored; ``False`` suits only unbiased or exact methods.
        momentum: momentum to apply before selection instead of in the optimizer (momentum correction of Deep
            Gradient Compression): a number, ``"optimizer"`` to use the momentum of the SGD optimizer, or ``None``.
        nesterov: whether the momentum is Nesterov's. ``momentum="optimizer"`` uses the optimizer's setting.
        masks_momentum: whether the momentum of a sent element is reset to zero (momentum factor masking).
        clip_norm: largest norm of the mean gradient, or ``None``. Before accumulation, every rank clips the local
            gradient to ``clip_norm / sqrt(world_size)``.
        rescale_on_lr_change: whether to rescale the residual when the learning rate changes, so that each gradient in
            the residual is applied with the rate of its own step.
        decay: factor that multiplies the residual before a round's change is added. Always set from
            ``LocalSteps.residual_decay``. Requires ``momentum=None`` and no Adam correction.
    """

    keeps_residual: bool = True
    momentum: Union[float, str, None] = None
    nesterov: bool = False
    masks_momentum: bool = True
    clip_norm: Optional[float] = None
    rescale_on_lr_change: bool = False
    decay: float = 1.0

    def checked(self) -> "ErrorFeedback":
        """Return these settings, or raise ``ValueError`` unless ``0 <= momentum < 1`` and ``clip_norm > 0``."""
        is_number = isinstance(self.momentum, (int, float)) and 0 <= self.momentum < 1
        if not is_number and self.momentum not in (None, FROM_OPTIMIZER):
            raise ValueError(
                f"momentum={self.momentum!r} must be 'optimizer' (the momentum of the SGD optimizer), a number with"
                " 0 <= momentum < 1, or None (the optimizer applies momentum)"
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm={self.clip_norm} must be a positive norm, or None for no clipping")
        return self


def same_everywhere(power: float) -> float:
    """Round the result of a power to 12 digits, because the math libraries of ranks may differ in the last digits."""
    return float(f"{power:.12g}")


class ModelLayout(NamedTuple):
    """The exchanged parameters, and the process group of the exchange.

    Attributes:
        names: parameter names in order of definition, which differs from the order of backward.
        numels: number of elements per parameter; for a sharded model, of the local shard.
        rank: this rank within the process group.
        world_size: size of the process group.
        device: device of the gradients.
        frozen: names of all other parameters of the model: frozen, or without elements.
    """

    names: tuple[str, ...]
    numels: tuple[int, ...]
    rank: int
    world_size: int
    device: torch.device
    frozen: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements of all exchanged parameters."""
        return sum(self.numels)


def trained_in(module: Module) -> dict[str, Tensor]:
    """Return the parameters that require a gradient, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def layout_of(
    module: Module, rank: int, world_size: int, device: torch.device, trained: Optional[Mapping[str, Tensor]] = None
) -> ModelLayout:
    """Return the layout of the parameters in ``trained``. Default: all parameters that require a gradient."""
    trained = trained_in(module) if trained is None else trained
    numels = {name: numel for name, tensor in trained.items() if (numel := local_tensor(tensor).numel())}
    frozen = tuple(name for name, _ in module.named_parameters() if name not in numels)
    return ModelLayout(tuple(numels), tuple(numels.values()), rank, world_size, device, frozen)


Gather = Callable[[Tensor], Tensor]


class Compressor(ABC):
    """Select the elements to send from each accumulated gradient (gradient plus residual).

    A subclass must define :meth:`select`, ``default_density`` and ``wire_format``. :meth:`select` calls no collective
    and changes no argument. The selection of a tensor does not depend on other tensors (except with
    ``selects_across_bucket``). If a gradient has NaNs or infinities, select at least one NaN or infinity, so that all
    ranks receive the value. State, for example a threshold, changes only in :meth:`finish_step`.

    Attributes:
        default_density: fraction of elements to send by default; ``None`` for a method without a density.
        default_warmup_steps: default number of optimizer steps over which the density falls to the target, or a
            fraction of the training.
        has_density_by_parameter: whether :meth:`select` selects exactly ``counts`` elements, so that density rules can
            raise the counts.
        wire_format: wire format of the selections, see :mod:`lightning_sparse.engine.wire`.
        dense_wire_format: wire format of selections without indices. Parameters of density 1 use this format without
            a call of :meth:`select`. ``None`` to call :meth:`select` at density 1, too.
        selects_across_bucket: whether :meth:`select` gets the parameters of a bucket as a single tensor.
        fills_selection: whether a selection always has as many elements as the message can hold.
        wire: value that replaces a user's ``wire=`` of 16 or more bits; ``None`` if the user's value applies.
        is_lossless: whether all elements are sent, so that only the rounding of the wire creates a residual.
        replicas_diverge: whether ranks apply different updates.
        param_sync_every: steps between averages of diverged parameters over ranks; ``None`` for never.
        feedback: settings of error feedback.
        densities: density by parameter name; all other parameters have the strategy's density.
        adaptive_density: whether ``schedule="merged"`` may raise a density if backward hides the longer exchange.
            Requires a ``dense_wire_format``, and a method that accepts any density.
    """

    default_density: ClassVar[Optional[float]]
    default_warmup_steps: ClassVar[Union[int, float]] = 0
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
    densities: Mapping[str, float] = {}
    adaptive_density: bool = False

    def __init_subclass__(cls) -> None:
        for name in vars(cls):
            refuse_removed(f"{cls.__name__}.{name}", f"Compressor.{name}")

    def begin(self, layout: ModelLayout) -> None:
        """Reset all state for a model, and check settings that name parameters.

        Raises:
            ValueError: if a setting does not fit the model.
        """
        return

    def begin_step(self, density: float) -> None:
        """Set the density of the next step, which a warm-up may raise. May run before :meth:`begin`."""
        return

    @abstractmethod
    def select(self, names: Sequence[str], accumulated: Sequence[Tensor], counts: Sequence[int]) -> Sequence[Selection]:
        """Return a selection of elements to send for each tensor of a bucket.

        Args:
            names: names of the bucket's parameters.
            accumulated: gradient plus residual of each parameter, flat and read-only. With ``selects_across_bucket``, a
                single tensor for all parameters.
            counts: number of elements to select from each tensor, for the current density.
        """

    def selection_size(self, numel: int, count: int) -> SelectionSize:
        """Return the size of a selection from ``numel`` elements. Override this unless ``select`` selects ``count``."""
        return SelectionSize(numel, count)

    def finish_step(self, names: Sequence[str], means: Sequence[Selection], finite: Tensor, all_gather: Gather) -> None:
        """Update the state after the exchange of a step's last bucket.

        Args:
            names: parameter names in the order of the exchange.
            means: mean gradient of each parameter, from :class:`~lightning_sparse.engine.wire.base.ExchangeResult`.
                The values may be changed in place, before the engine writes the means to ``.grad``.
            finite: bool ``[]`` on the host or a device. If false, the step is skipped and the state must not change.
            all_gather: function that gathers a tensor ``[n]`` from every rank, and returns ``[world_size, n]``. All
                ranks must call the function with the same ``n``, and equally often.
        """
        return

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the method as plain tensors and numbers, by parameter name if applicable."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the state of the method.

        ``state`` may have been saved when other parameters of the model were trained. Store the entries of parameters
        that are now frozen, so that :meth:`state_dict` returns these entries, too.

        Raises:
            ValueError: if the state comes from another method.
        """
        if state:
            raise ValueError(
                f"{type(self).__name__} has no state, but got {', '.join(map(repr, list(state)[:3]))}; load the state"
                " into the compressor that saved the state"
            )


def checked_density(argument: str, density: Any) -> float:
    """Return ``density`` as a float. Outside ``(0, 1]``, raise ``ValueError`` with the name ``argument``."""
    is_number = isinstance(density, Real) and not isinstance(density, bool)
    if not is_number or not 0 < density <= 1:
        raise ValueError(
            f"{argument}={density!r} must be a fraction of elements with 0 < density <= 1; 0.01 sends 1 %."
            " For a compression ratio of 100, pass the inverse."
        )
    return float(density)


def is_whole(number: Any, least: int) -> bool:
    """Return whether a number is an integer (numpy included, bool excluded) and at least ``least``."""
    return not isinstance(number, bool) and isinstance(number, Integral) and int(number) >= least


def checked_count(argument: str, count: Any, unit: str, least: int = 1) -> int:
    """Return an integer of at least ``least`` as an int. Otherwise, raise ``ValueError`` with the name ``argument``."""
    if not is_whole(count, least):
        raise ValueError(f"{argument}={count!r} must be a whole number of {unit}, at least {least}")
    return int(count)


def element_count(numel: int, density: float) -> int:
    """Return the number of elements that a density selects from ``numel`` elements of a rank, at least 1."""
    return max(1, round(density * numel))
