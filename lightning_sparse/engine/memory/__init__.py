"""Memories: what is KEPT because it has not been sent yet, a flat tensor for each parameter name."""

from lightning_sparse.engine.memory.base import Memory, MemoryState, widened
from lightning_sparse.engine.memory.momentum import MomentumMemory
from lightning_sparse.engine.memory.none import NoMemory
from lightning_sparse.engine.memory.residual import ResidualMemory

__all__ = ["Memory", "MemoryState", "MomentumMemory", "NoMemory", "ResidualMemory", "widened"]
