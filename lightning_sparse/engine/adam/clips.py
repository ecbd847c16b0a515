"""Clipping of each rank's gradient before Adam's update, so that the mean gradient is clipped approximately."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_sparse.compressors.base import NOT_CLIPPED, Clipping
from lightning_sparse.engine.memory.residual import Clip, factors_to


class _Asked(NamedTuple):
    """Clipping limits, and the indices of the optimizers that share one norm of all their gradients."""

    clipping: Clipping = NOT_CLIPPED
    together: tuple[int, ...] = ()


class AskedClips:
    """Clip the next gradients to the limits from each optimizer's last step. ``norm`` is the default maximum norm."""

    def __init__(self, optimizers: Sequence[Optimizer], norm: Optional[float]) -> None:
        self._optimizers = optimizers
        self._norm = norm
        self._coming = [_Asked()] * len(optimizers)
        self._asking: set[int] = set()  # indices of optimizers with a call of :meth:`ask` in this step

    def ask(self, clipping: Clipping, parameters: Iterable[Tensor]) -> None:
        """Clip the next gradients of all optimizers that have any of the parameters, by one common norm.

        Args:
            clipping: the largest norm and value.
            parameters: the parameters in the user's call that clips gradients.
        """
        if clipping == NOT_CLIPPED:
            return
        given = set(parameters)
        together = tuple(
            number
            for number, optimizer in enumerate(self._optimizers)
            if any(not given.isdisjoint(group["params"]) for group in optimizer.param_groups)
        )
        for number in together:
            self._coming[number] = _Asked(clipping, together)
        self._asking.update(together)

    def end_step(self, optimizer: Optimizer) -> None:
        """End an optimizer's step. Without a call of :meth:`ask` in the step, the optimizer's clipping ends."""
        for number, each in enumerate(self._optimizers):
            if each is optimizer and number not in self._asking:
                self._coming[number] = _Asked()
            elif each is optimizer:
                self._asking.remove(number)

    def next_step(self, names: Mapping[Parameter, str]) -> list[Clip]:
        """Return the clips for the next gradients of the parameters in ``names``, one clip per common norm."""
        clipped: dict[_Asked, set[str]] = {}
        for optimizer, ((norm, value), together) in zip(self._optimizers, self._coming):
            clipping = Clipping(self._norm if norm is None else norm, value)
            if clipping != NOT_CLIPPED:
                parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
                known = clipped.setdefault(_Asked(clipping, together), set())
                known.update(names[parameter] for parameter in parameters if parameter in names)
        return [Clip(asked.clipping, frozenset(of)) for asked, of in clipped.items()]

    def state(self) -> list[list[Any]]:
        """Return the clipping limits of each optimizer for a checkpoint."""
        return [[*clipping, list(together)] for clipping, together in self._coming]

    def load(self, saved: Sequence[Sequence[Any]]) -> None:
        """Load a result of :meth:`state` for the same optimizers. Optimizers that ``saved`` lacks do not change."""
        loaded = [_Asked(Clipping(norm, value), tuple(together)) for norm, value, together in saved]
        self._coming[: len(loaded)] = loaded
        self._asking.difference_update(range(len(loaded)))


@dataclass
class OwnClips:
    """Clip each rank's gradient to the user's limit times a ratio, so that the mean is clipped approximately.

    The ratio is the norm of a rank's gradient divided by the norm of the mean gradient. Updates of second moments
    measure both norms.
    """

    world_size: int
    total_of: Callable[[Tensor], Tensor]
    clips: Sequence[Clip] = ()
    factors: Optional[Tensor] = None  # clip factors of this step's gradients, one per maximum norm
    squared_norms: dict[str, Tensor] = field(default_factory=dict)  # ``[2]`` each: of a rank's gradient, of the mean
    _together: list[list[str]] = field(default_factory=list)  # for each limit, names of the gradients that share a norm

    @property
    def limits(self) -> list[tuple[float, frozenset[str]]]:
        """Maximum norms for clipping, each with the names of the parameters that are clipped together."""
        return [(clipping.norm, names) for clipping, names in self.clips if clipping.norm is not None]

    def clipped_together(self, names: Sequence[str]) -> list[list[str]]:
        """Return and store groups of gradient names. Each group is clipped together, by one maximum norm."""
        self._together = [[name for name in names if name in together] for _, together in self.limits]
        return self._together

    def set_norms(self, each: Sequence[Tensor], total: Tensor) -> None:
        """Compute the clip factor for each limit. The arguments are as in :meth:`Memory.set_norms`."""
        limits = [limit * self._ratio(*of) for (limit, _), of in zip(self.limits, zip(self._together, each))]
        self.factors = factors_to(torch.stack(limits), total)

    def _ratio(self, names: Sequence[str], norms: Tensor) -> Tensor:
        """Return the norm of a rank's gradient divided by the norm of the mean gradient."""
        none = norms.new_zeros(2)
        squares = [self.squared_norms.get(name, none) for name in names]
        # Parameters without a gradient in this backward do not count.
        total = (torch.stack(squares) * (norms > 0).unsqueeze(1)).sum(dim=0) if squares else none
        own, mean = self.total_of(total).unbind()
        # Before the first measurement, the gradients of ranks are assumed to be independent.
        return torch.where(mean > 0, (own / mean).sqrt(), math.sqrt(self.world_size))

    def clip(self, gradients: Mapping[str, Tensor]) -> None:
        """Clip gradients, in place."""
        factors = iter(() if self.factors is None else self.factors.unbind())
        for (norm, value), names in self.clips:
            factor = None if norm is None else next(factors)
            clipped = [gradient for name, gradient in gradients.items() if name in names]
            if clipped and value is not None:
                torch._foreach_clamp_min_(clipped, -value)
                torch._foreach_clamp_max_(clipped, value)
            if clipped and factor is not None:
                torch._foreach_mul_(clipped, factor)

    def measure(self, names: Sequence[str], of_means: Tensor, of_own: Tensor, is_finite: Tensor) -> None:
        """Halve the sums of squared norms of ranks' gradients and of means. If finite, add the new squares."""
        squares = torch.where(is_finite, torch.stack((of_own, of_means), dim=1), 0)
        none = squares.new_zeros(2)
        halves = torch._foreach_mul([self.squared_norms.get(name, none) for name in names], 0.5)
        self.squared_norms.update(zip(names, torch._foreach_add(list(squares.unbind()), halves)))
