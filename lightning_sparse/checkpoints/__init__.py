"""Checkpoints that hold what each rank keeps: Lightning's file, and beside it a folder with one file for each rank.

Residuals differ between ranks, and together are as large as the model times the number of ranks. So nobody gathers
them: every rank writes its own. Both parts carry the random name of the save. Files of a new save are complete before
Lightning's file, replaced in one piece, names them; only then are those of the old one removed. A crash at any moment
therefore leaves the old checkpoint or the new one.
"""

from lightning_sparse.checkpoints.files import AtomicCheckpointIO
from lightning_sparse.checkpoints.shards import CheckpointError
from lightning_sparse.checkpoints.strategy import ResumableDDPStrategy

__all__ = ["AtomicCheckpointIO", "CheckpointError", "ResumableDDPStrategy"]
