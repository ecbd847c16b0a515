"""A step, without Lightning. CONTRIBUTING.md gives the reading order."""

from lightning_sparse.engine.engine import Engine

__all__ = ["Engine"]
