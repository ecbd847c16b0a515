"""Train PyTorch Lightning models over ordinary networks: send only the part of each gradient that matters most.

Importing this package registers its strategy names with Lightning, so ``Trainer(strategy="sparse_topk")`` works.
For a Trainer from ``lightning.pytorch`` see :mod:`lightning_sparse.lightning`.
"""

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.metadata import version
from typing import Any

from pytorch_lightning.strategies import StrategyRegistry

from lightning_sparse.compressors import Compressor, available_compressors, register_compressor
from lightning_sparse.compressors.feedback import AdamCorrection, ErrorFeedback
from lightning_sparse.compressors.layout import ModelLayout
from lightning_sparse.compressors.selection import Quantization, Selection, SelectionSize
from lightning_sparse.engine.wire import Owners
from lightning_sparse.schedule import Schedule
from lightning_sparse.strategy import SparseDDPStrategy

__version__ = version("lightning-sparse")

_MOVED = {
    "checkpoints": "lightning_sparse.strategy.checkpoints",
    "metrics": "lightning_sparse.callbacks",
    "observe": "lightning_sparse.engine.observe",
    "prediction": "lightning_sparse.cli.plan",
    "rules": "lightning_sparse.callbacks",
}


class _Moved(MetaPathFinder):
    """Answer whoever imports a module under its name before with where it is now."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Raise for a module that has moved; leave all others to whoever comes next."""
        package, _, name = fullname.partition(".")
        if package == __name__ and name in _MOVED:
            raise ModuleNotFoundError(f"{fullname} has moved: import from {_MOVED[name]}", name=fullname)


sys.meta_path.append(_Moved())

SparseDDPStrategy.register_strategies(StrategyRegistry)
if "lightning.pytorch" in sys.modules:  # whose user means that Trainer
    import_module("lightning_sparse.lightning")

__all__ = [
    "AdamCorrection",
    "Compressor",
    "ErrorFeedback",
    "ModelLayout",
    "Owners",
    "Quantization",
    "Schedule",
    "Selection",
    "SelectionSize",
    "SparseDDPStrategy",
    "available_compressors",
    "register_compressor",
]
