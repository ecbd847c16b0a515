"""The doors of the Trainer and of Fabric: DDP strategies whose gradients are exchanged by the engine.

:mod:`~lightning_sparse.strategy.trainer` is the Trainer's, read from top to bottom. Its parts: the DDP wrapper
(:mod:`~lightning_sparse.strategy.ddp_wrapping`), the step in progress
(:mod:`~lightning_sparse.strategy.unfinished_step`), the choice between engine and plain DDP
(:mod:`~lightning_sparse.strategy.backend_choice`) and the checkpoints (:mod:`~lightning_sparse.strategy.checkpoints`);
the view of the optimizers is :mod:`lightning_sparse.loop.optimizers`. :mod:`~lightning_sparse.strategy.fabric`
is Fabric's, :mod:`~lightning_sparse.strategy.names` what both are called.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_sparse.strategy.fabric import SparseFabricStrategy
    from lightning_sparse.strategy.trainer import SparseDDPStrategy

_PLACES = {
    "SparseDDPStrategy": "lightning_sparse.strategy.trainer",
    "SparseFabricStrategy": "lightning_sparse.strategy.fabric",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


__all__ = ["SparseDDPStrategy", "SparseFabricStrategy"]
