"""Memories: what is KEPT because it has not been sent yet, a flat tensor for each parameter name."""

import math
from collections.abc import Callable
from typing import Optional

from torch import Tensor

from lightning_sparse.compressors.feedback import FROM_OPTIMIZER, Clipping, ErrorFeedback, Hyperparameters
from lightning_sparse.engine.memory.adam import AdamMemory
from lightning_sparse.engine.memory.base import Memory, MemoryState, widened
from lightning_sparse.engine.memory.momentum import MomentumMemory
from lightning_sparse.engine.memory.none import NoMemory
from lightning_sparse.engine.memory.residual import ResidualMemory


def build_memory(feedback: ErrorFeedback, ranks: int, share_of: Optional[Callable[[Tensor], Tensor]] = None) -> Memory:
    """Build the memory that a compressor asks for.

    Args:
        feedback: how what is not sent is kept.
        ranks: how many ranks the gradient is averaged over: the norm of a mean of that many independent gradients is
            smaller by its square root, and a local clip has to allow for it.
        share_of: returns this rank's share of a flat tensor, where it is given only that of each gradient.
    """
    if not feedback.keeps_residual:
        return NoMemory()
    if feedback.adam is not None:
        clip = Clipping(feedback.clip_norm, feedback.clip_value)
        return AdamMemory(ranks, feedback.adam.refresh_steps, clip, feedback.follows_learning_rate, share_of)
    local_clip_norm = None if feedback.clip_norm is None else feedback.clip_norm / math.sqrt(ranks)
    if feedback.momentum is None:
        return ResidualMemory(local_clip_norm, feedback.follows_learning_rate, feedback.decay)
    unknown = feedback.momentum == FROM_OPTIMIZER
    without_optimizer = Hyperparameters(0.0, 0.0 if unknown else float(feedback.momentum), feedback.nesterov)
    return MomentumMemory(without_optimizer, feedback.masks_momentum, local_clip_norm, feedback.follows_learning_rate)


__all__ = [
    "AdamMemory",
    "Memory",
    "MemoryState",
    "MomentumMemory",
    "NoMemory",
    "ResidualMemory",
    "build_memory",
    "widened",
]
