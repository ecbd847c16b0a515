"""The doors of the Trainer and of Fabric: DDP strategies whose gradients are exchanged by the engine.

:mod:`~lightning_sparse.strategy.trainer` is the Trainer's, read from top to bottom; its parts lie beside it.
:mod:`~lightning_sparse.strategy.fabric` is Fabric's, :mod:`~lightning_sparse.strategy.names` what both are called.
"""
