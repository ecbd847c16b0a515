"""Train PyTorch Lightning models over ordinary networks: send only the part of each gradient that matters most.

Importing this package registers its strategy names with Lightning: ``Trainer(strategy="sparse_topk")`` and
``Fabric(strategy="sparse_topk")`` then work. The package uses ``lightning.pytorch`` if your process imported
``lightning.pytorch`` first, and ``pytorch_lightning`` otherwise.
"""

from importlib.metadata import version
from typing import NoReturn

from lightning_sparse import callbacks
from lightning_sparse.compressors import Compressor, available_compressors
from lightning_sparse.compressors.base import ErrorFeedback, ModelLayout
from lightning_sparse.compressors.selection import Selection, SelectionSize
from lightning_sparse.engine.adam.correction import AdamCorrection
from lightning_sparse.engine.settings import Compression, LocalSteps
from lightning_sparse.loop import GradientSparsifier, sparsify_gradients
from lightning_sparse.removed import refuse_removed
from lightning_sparse.schedule import Schedule
from lightning_sparse.strategy.fabric import SparseFabricStrategy
from lightning_sparse.strategy.names import register_compressor, register_names
from lightning_sparse.strategy.sharded import SparseModelParallelStrategy
from lightning_sparse.strategy.trainer import SparseDDPStrategy

__version__ = version("lightning-sparse")


def __getattr__(name: str) -> NoReturn:
    refuse_removed(f"{__name__}.{name}", name, ImportError)  # a `from` import would hide the text of an AttributeError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register_names()

__all__ = [
    "AdamCorrection",
    "Compression",
    "Compressor",
    "ErrorFeedback",
    "GradientSparsifier",
    "LocalSteps",
    "ModelLayout",
    "Schedule",
    "Selection",
    "SelectionSize",
    "SparseDDPStrategy",
    "SparseFabricStrategy",
    "SparseModelParallelStrategy",
    "available_compressors",
    "callbacks",
    "register_compressor",
    "sparsify_gradients",
]
