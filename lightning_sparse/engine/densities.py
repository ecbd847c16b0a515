"""HOW MUCH is sent of each parameter, alike on all ranks: everybody who has a say in a density says it here."""

import math
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, Optional

from lightning_sparse.compressors.base import Compressor, element_count, same_everywhere

WARM_UP_PART = 10  # a warm-up that nobody has asked for takes one in so many of a training's steps at most
_FEW = 64  # densities asked for of single parameters
_STAIR = 1.25  # times less in each stair of Adam's falling density: a plan would not follow one that fell in every step


class Densities:
    """The density of each parameter in the step that comes.

    1. The user asks for one: ``density=`` of the model, or its compressor's of a parameter (``LAGS(densities=...)``).
    2. Warm-ups raise it: over ``warmup_epochs``, and after the dense steps of a corrected Adam.
    3. Rules (:class:`~lightning_sparse.callbacks.AdaptiveDensity`) raise a parameter's to ``ruled``, up to ``ceiling``.
    4. A plan raises it to ``planned``, where that costs no time.
    5. While ``sends_all``, before ``sparse_auto`` sends dense gradients, all are 1, and nothing is left over.
    """

    def __init__(self, compressor: Compressor, density: float, epochs: int = 0, is_bounded: bool = False) -> None:
        self._compressor, self._target = compressor, density
        self._epochs, self._is_bounded = epochs, is_bounded  # of the warm-up; by a tenth of a training of known length
        self.ruled: Mapping[str, float] = {}
        self.ceiling = 1.0
        self.planned: Mapping[str, float] = {}
        self.sends_all = False
        self._total_steps: Optional[int] = None  # of the training, where a warm-up goes by it
        self._is_told = False  # of them, by a checkpoint
        self._steps: Counter[int] = Counter()  # by optimizer
        self.epoch = 0  # that the last step was of
        self._in_warm_up = lru_cache(_FEW)(partial(_raised, epochs))  # in most steps as in the one before
        self.begin_step(0)

    def begin_step(self, epoch: int, progress: float = 1.0) -> None:
        """Have warm-ups go on: to an epoch, and to how much of Adam's lies behind, from 0 to 1."""
        stage = epoch
        if self._total_steps:
            made = max(self._steps.values(), default=0)
            stage = max(epoch, WARM_UP_PART * self._epochs * made // self._total_steps)
        self._stage, self._progress = stage, progress
        self._compressor.begin_step(self._in_warm_up(self._target, stage, progress))

    def of(self, name: str) -> float:
        """Return the fraction of elements to send of a parameter."""
        return 1.0 if self.sends_all else max(self.wanted(name), self.planned.get(name, 0.0))

    def wanted(self, name: str) -> float:
        """Return the least density that a plan may send: the user's, a warm-up's, or a rule's."""
        asked = self._in_warm_up(self.target(name), self._stage, self._progress)
        return max(asked, min(self.ruled.get(name, 0.0), self.ceiling))

    def count(self, name: str, numel: int) -> int:
        """Return the least number of a parameter's elements that a plan may send."""
        return element_count(numel, self.wanted(name))

    def target(self, name: str) -> float:
        """Return the density that the user asked for, that of a parameter when no warm-up, rule or plan raises it."""
        return self._compressor.density_of(name, self._target)

    def expect_steps(self, total_steps: Optional[int]) -> None:
        """Have a default warm-up go by a training's length, if that is known and a checkpoint has not told of it.

        A search for a learning rate has told of its own length before.
        """
        if self._is_bounded and not self._is_told:
            self._total_steps = total_steps

    def count_step(self, optimizer: int, epoch: int) -> None:
        """Count a step of an optimizer, in an epoch."""
        self._steps[optimizer] += 1
        self.epoch = epoch

    @property
    def warm_up_steps(self) -> Optional[int]:
        """Optimizer steps after which a default warm-up is over; ``None`` where it goes by epochs alone."""
        return None if self._total_steps is None else -(-self._total_steps // WARM_UP_PART)

    def state_dict(self) -> dict[str, Any]:
        """Return how far a default warm-up has come; empty for a warm-up that goes by epochs."""
        return {"steps": dict(self._steps), "total_steps": self._total_steps} if self._is_bounded else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a default warm-up."""
        if self._is_bounded:
            self._steps = Counter(state["steps"])
            self._is_told = bool(state["total_steps"])
            self._total_steps = state["total_steps"] or self._total_steps


def _raised(epochs: int, target: float, stage: int, progress: float) -> float:
    """Return a density in warm-ups: it falls geometrically by stages, as in Deep Gradient Compression's code."""
    least = falling_density(target, progress)
    return least if stage >= epochs else max(least, same_everywhere(target ** ((stage + 1) / (epochs + 1))))


def falling_density(target: float, progress: float) -> float:
    """Return the density, from 1 in geometric stairs to its target, where so much of the fall lies behind.

    >>> [round(falling_density(0.01, progress), 3) for progress in (0.0, 0.5, 0.99, 1.0)]
    [1.0, 0.112, 0.012, 0.01]
    """
    if progress >= 1 or target >= 1:
        return target
    stairs = max(1, math.ceil(math.log(1 / target) / math.log(_STAIR)))
    return same_everywhere(target ** (int(progress * stairs) / stairs))
