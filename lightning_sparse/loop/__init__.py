"""Training with compressed gradients, without Lightning: checks, optimizers, changes of the model, and saved state.

:mod:`~lightning_sparse.loop.handle` is the entry point of plain loops. The strategies are built on these modules.
"""

from lightning_sparse.loop.handle import GradientSparsifier, sparsify_gradients

__all__ = ["GradientSparsifier", "sparsify_gradients"]
