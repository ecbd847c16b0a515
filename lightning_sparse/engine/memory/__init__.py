"""Memories: what is KEPT because it has not been sent yet, a flat tensor for each parameter name."""

from lightning_sparse.engine.memory.momentum import MomentumMemory
from lightning_sparse.engine.memory.residual import (
    Averages,
    Hyperparameters,
    Memory,
    MemoryState,
    ResidualMemory,
    widened,
)

__all__ = ["Averages", "Hyperparameters", "Memory", "MemoryState", "MomentumMemory", "ResidualMemory", "widened"]
