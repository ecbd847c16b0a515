"""Train PyTorch Lightning models over ordinary networks: send only the part of each gradient that matters most.

Importing this package registers its strategy names with Lightning, imported before or after:
``Trainer(strategy="sparse_topk")`` works, and ``Fabric(strategy="sparse_topk")``. It imports no Lightning by itself.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from types import ModuleType
from typing import TYPE_CHECKING, Any, Optional

from typing_extensions import override

from lightning_sparse.compressors import Compressor, available_compressors, register_compressor
from lightning_sparse.compressors.base import ErrorFeedback, ModelLayout
from lightning_sparse.compressors.selection import Selection, SelectionSize
from lightning_sparse.engine.adam.correction import AdamCorrection
from lightning_sparse.removed import refuse_removed
from lightning_sparse.strategy.names import TABLES, register_names

if TYPE_CHECKING:
    from lightning_sparse.engine.settings import Compression, LocalSteps
    from lightning_sparse.engine.wire.owners import Owners
    from lightning_sparse.loop import Sparsifier, sparsify
    from lightning_sparse.schedule import Schedule
    from lightning_sparse.strategy.fabric import SparseFabricStrategy
    from lightning_sparse.strategy.sharded import SparseModelParallelStrategy
    from lightning_sparse.strategy.trainer import SparseDDPStrategy

__version__ = version("lightning-sparse")

# What takes long to import, and not every script needs.
_LATER = {
    "Compression": "lightning_sparse.engine.settings",
    "LocalSteps": "lightning_sparse.engine.settings",
    "Owners": "lightning_sparse.engine.wire.owners",
    "Schedule": "lightning_sparse.schedule",
    "SparseDDPStrategy": "lightning_sparse.strategy.trainer",
    "SparseFabricStrategy": "lightning_sparse.strategy.fabric",
    "SparseModelParallelStrategy": "lightning_sparse.strategy.sharded",
    "Sparsifier": "lightning_sparse.loop",
    "sparsify": "lightning_sparse.loop",
}


class _Serving(MetaPathFinder):
    """Register our names with a Lightning that is imported after this package, as soon as that is done."""

    @override
    def find_spec(
        self, fullname: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        if fullname not in TABLES:
            return None
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                load(module)
                register_names(fullname)

            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        refuse_removed(f"{__name__}.{name}", name, ImportError)  # also of a `from` statement, with the sentence
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.meta_path.insert(0, _Serving())
for _lightning in TABLES.keys() & sys.modules.keys():
    register_names(_lightning)

__all__ = [
    "AdamCorrection",
    "Compression",
    "Compressor",
    "ErrorFeedback",
    "LocalSteps",
    "ModelLayout",
    "Owners",
    "Schedule",
    "Selection",
    "SelectionSize",
    "SparseDDPStrategy",
    "SparseFabricStrategy",
    "SparseModelParallelStrategy",
    "Sparsifier",
    "available_compressors",
    "register_compressor",
    "sparsify",
]
