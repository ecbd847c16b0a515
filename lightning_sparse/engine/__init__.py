"""The exchange of gradients in a training step, without Lightning."""

from lightning_sparse.engine.engine import Engine

__all__ = ["Engine"]
