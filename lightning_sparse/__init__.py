"""Train PyTorch Lightning models over ordinary networks: send only the part of each gradient that matters most.

Importing this package registers its strategy names with Lightning, so ``Trainer(strategy="sparse_topk")`` works.
For a Trainer from ``lightning.pytorch`` see :mod:`lightning_sparse.lightning`.
"""

import sys
from importlib import import_module
from importlib.metadata import version

from pytorch_lightning.strategies import StrategyRegistry

from lightning_sparse.compressors import Compressor, available_compressors, register_compressor
from lightning_sparse.feedback import AdamCorrection, ErrorFeedback
from lightning_sparse.layout import ModelLayout
from lightning_sparse.schedule import Schedule
from lightning_sparse.selection import Quantization, Selection, SelectionSize
from lightning_sparse.strategy import SparseDDPStrategy

__version__ = version("lightning-sparse")

SparseDDPStrategy.register_strategies(StrategyRegistry)
if "lightning.pytorch" in sys.modules:  # whose user means that Trainer
    import_module("lightning_sparse.lightning")

__all__ = [
    "AdamCorrection",
    "Compressor",
    "ErrorFeedback",
    "ModelLayout",
    "Quantization",
    "Schedule",
    "Selection",
    "SelectionSize",
    "SparseDDPStrategy",
    "available_compressors",
    "register_compressor",
]
