"""The Trainer's door: a DDP strategy whose gradients are exchanged by the engine.

:mod:`~lightning_sparse.strategy.strategy` is the strategy, read from top to bottom. Its parts: the DDP wrapper
(:mod:`~lightning_sparse.strategy.ddp_wrapping`), the step in progress
(:mod:`~lightning_sparse.strategy.unfinished_step`), the choice between engine and plain DDP
(:mod:`~lightning_sparse.strategy.backend_choice`) and the checkpoints (:mod:`~lightning_sparse.strategy.checkpoints`);
the view of the optimizers is :mod:`lightning_sparse.engine.loop.optimizers`.
"""

from pytorch_lightning.strategies import StrategyRegistry

from lightning_sparse.strategy.strategy import SparseDDPStrategy

SparseDDPStrategy.register_strategies(StrategyRegistry)

__all__ = ["SparseDDPStrategy"]
