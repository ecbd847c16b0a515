"""The other front door: the same strategies and callbacks for ``lightning.pytorch``.

Lightning is published under two names, ``pytorch_lightning`` and ``lightning.pytorch``: the same code, but each has
classes and a table of strategies of its own, and a Trainer takes only those of its own name::

    import lightning as L
    from lightning_sparse.lightning.callbacks import CompressionMonitor

    L.Trainer(strategy="sparse_topk", callbacks=[CompressionMonitor()])

``SparseFabricStrategy`` is here, too, for ``lightning.fabric``.
``lightning_sparse.lightning.callbacks``, ``.strategy`` and ``.cli`` are the modules of the same names in
``lightning_sparse``; compressors, schedules and rules know no Lightning and serve both.

Raises:
    ImportError: if the package ``lightning`` is not installed.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_sparse.lightning.mirror import Mirror

if not any(isinstance(finder, Mirror) for finder in sys.meta_path):
    sys.meta_path.append(Mirror())

try:
    import_module("lightning.pytorch")
except ModuleNotFoundError as error:
    raise ImportError(
        "lightning_sparse.lightning is for the package 'lightning' (import lightning.pytorch), which is not installed:"
        " pip install lightning, or import lightning_sparse and use pytorch_lightning"
    ) from error

if TYPE_CHECKING:
    from lightning_sparse.strategy import SparseDDPStrategy, SparseFabricStrategy


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("lightning_sparse.lightning.strategy"), name)


__all__ = ["SparseDDPStrategy", "SparseFabricStrategy"]
