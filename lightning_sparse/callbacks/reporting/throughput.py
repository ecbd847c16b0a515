"""Throughput: how long steps take, and how many samples they train on."""

import math
import time
from typing import Any, Optional

from torch import Tensor
from torch.utils._pytree import tree_leaves


class Throughput:
    """Count steps, samples and the time that they took, without looking at a device."""

    def __init__(self) -> None:
        self._last_step = -1
        self._samples: Optional[int] = 0
        self._began = time.perf_counter()
        self._paused: Optional[float] = None

    def restart(self, step: int) -> None:
        """Count from here on, after a step."""
        self._last_step, self._samples, self._began = step, 0, time.perf_counter()

    def add_batch(self, batch: Any) -> None:
        """Count a batch; one whose size cannot be known makes the number of samples unknown."""
        size = batch_size(batch)
        self._samples = None if self._samples is None or size is None else self._samples + size

    def pause(self) -> None:
        """Stop the time."""
        self._paused = time.perf_counter()

    def resume(self) -> None:
        """Let the time go on."""
        if self._paused is not None:
            self._began += time.perf_counter() - self._paused
            self._paused = None

    def statistics(self, step: int) -> dict[str, float]:
        """Return ``step_seconds`` and ``step_samples`` (NaN where unknown): means of the steps up to this one."""
        steps = max(1, step - self._last_step)
        samples = math.nan if self._samples is None else self._samples
        return {"step_seconds": (time.perf_counter() - self._began) / steps, "step_samples": samples / steps}


def batch_size(batch: Any) -> Optional[int]:
    """Return the length of the first dimension that all tensors of a batch share; ``None`` if they share none.

    Example::

        >>> import torch
        >>> batch_size((torch.zeros(8, 3), {"label": torch.zeros(8)}))
        8
    """
    sizes = {leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 0}
    return sizes.pop() if len(sizes) == 1 else None
