"""ONE STEP, without Lightning; CONTRIBUTING.md says in which order to read it."""

from lightning_sparse.engine.engine import Engine

__all__ = ["Engine"]
