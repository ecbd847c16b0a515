"""A LOOP OF ONE'S OWN: what a training does before and after an exchange, without Lightning.

:mod:`~lightning_sparse.loop.sparsify` is the plain loop's door. The optimizers
(:mod:`~lightning_sparse.loop.optimizers`, :mod:`~lightning_sparse.engine.adam.steps`), the checks of a
model (:mod:`~lightning_sparse.loop.checks`) and the line that says what is sent
(:mod:`~lightning_sparse.loop.summary`) serve the Trainer's door, too.
"""

from lightning_sparse.loop.sparsify import Sparsifier, sparsify

__all__ = ["Sparsifier", "sparsify"]
