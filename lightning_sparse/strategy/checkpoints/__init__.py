"""Checkpoints that hold what each rank keeps: Lightning's file, and beside it a folder with one file for each rank.

Residuals differ between ranks, and together are as large as the model times the number of ranks. So nobody gathers
them: every rank writes its own. Both parts carry the random name of the save. Files of a new save are complete before
Lightning's file, replaced in one piece, names them; only then are those of the old one removed. A crash at any moment
therefore leaves the old checkpoint or the new one.
"""

from lightning_sparse.strategy.checkpoints.checkpointer import Checkpointer
from lightning_sparse.strategy.checkpoints.files import AtomicCheckpointIO, PathLike
from lightning_sparse.strategy.checkpoints.restoring import fitted_gradients, restore_engine, saved_layouts
from lightning_sparse.strategy.checkpoints.shards import CheckpointError, Save, on_host

__all__ = [
    "AtomicCheckpointIO",
    "CheckpointError",
    "Checkpointer",
    "PathLike",
    "Save",
    "fitted_gradients",
    "on_host",
    "restore_engine",
    "saved_layouts",
]
