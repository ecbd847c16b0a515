"""Checkpoints: Lightning's file, and beside it a folder with a file for what each rank keeps.

Residuals of all ranks are as large as the model times their number, so nobody gathers them. Files of a new save are
complete before Lightning's file, replaced in one piece, holds its random name; only then are the old ones removed. A
crash therefore leaves the old checkpoint or the new one.
"""

from lightning_sparse.strategy.checkpoints.checkpointer import Checkpointer
from lightning_sparse.strategy.checkpoints.files import AtomicCheckpointIO, CheckpointError, PathLike

__all__ = ["AtomicCheckpointIO", "CheckpointError", "Checkpointer", "PathLike"]
