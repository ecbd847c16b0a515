"""ADAM, read in the order of a step.

1. :mod:`~lightning_sparse.engine.adam.correction`: what the user chooses, and how long it warms up;
2. :mod:`~lightning_sparse.engine.adam.memory`: updates before selection, and what the second moment learns from;
3. :mod:`~lightning_sparse.engine.adam.steps`: the optimizer's own step.
"""
