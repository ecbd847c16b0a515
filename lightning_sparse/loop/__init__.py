"""A LOOP OF ONE'S OWN: what a training does before and after an exchange, without Lightning.

:mod:`~lightning_sparse.loop.sparsify` is the plain loop's entry point; the other modules serve the Trainer's, too.
"""

from lightning_sparse.loop.sparsify import GradientSparsifier, sparsify_gradients

__all__ = ["GradientSparsifier", "sparsify_gradients"]
