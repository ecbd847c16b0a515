"""A training session, without Lightning: optimizers, checks, changes of the model, and saved state.

:mod:`~lightning_sparse.loop.sparsify` is the entry point of a plain loop. The Trainer's strategies use the other files.
"""

from lightning_sparse.loop.sparsify import GradientSparsifier, sparsify_gradients

__all__ = ["GradientSparsifier", "sparsify_gradients"]
