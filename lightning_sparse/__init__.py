"""Train PyTorch Lightning models over ordinary networks: send only the part of each gradient that matters most.

Importing this package registers its strategy names with Lightning, under whichever of its two names it is imported,
before or after: ``Trainer(strategy="sparse_topk")`` works, and ``Fabric(strategy="sparse_topk")``.
``SparseDDPStrategy`` and ``SparseFabricStrategy`` are for the Lightning that was imported first;
:mod:`lightning_sparse.lightning` holds those for ``lightning`` whatever else was imported.
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
from lightning_sparse.compressors.feedback import AdamCorrection, ErrorFeedback
from lightning_sparse.compressors.layout import ModelLayout
from lightning_sparse.compressors.selection import Quantization, Selection, SelectionSize
from lightning_sparse.registry.lightning_names import DOORS, FABRICS, present_door
from lightning_sparse.strategy.names import register_names

if TYPE_CHECKING:
    from lightning_sparse.engine.step.hook import bucket_cap_mb
    from lightning_sparse.engine.wire import Owners
    from lightning_sparse.loop import Sparsifier, sparsify
    from lightning_sparse.schedule import Schedule
    from lightning_sparse.strategy import SparseDDPStrategy, SparseFabricStrategy

__version__ = version("lightning-sparse")

# What takes long to import, and not every script needs.
_LATER = {
    "Owners": "lightning_sparse.engine.wire",
    "Schedule": "lightning_sparse.schedule",
    "Sparsifier": "lightning_sparse.loop",
    "bucket_cap_mb": "lightning_sparse.engine.step.hook",
    "sparsify": "lightning_sparse.loop",
}

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


class _Serving(MetaPathFinder):
    """Register our names with a Lightning that is imported after this package, as soon as that is done."""

    @override
    def find_spec(
        self, fullname: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        if fullname not in (*DOORS, *FABRICS):
            return None
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_serve(module: ModuleType) -> None:
                load(module)
                _serve(fullname)

            spec.loader.exec_module = load_and_serve  # type: ignore[method-assign]
        return spec


def _serve(lightning: str) -> None:
    """Register our names with a Lightning, or a Fabric, that has been imported."""
    strategies = import_module(f"{lightning}.strategies")
    if lightning in FABRICS:
        register_names(strategies.STRATEGY_REGISTRY, f"{FABRICS[lightning]}.strategy", "SparseFabricStrategy")
    else:
        register_names(strategies.StrategyRegistry, f"{DOORS[lightning]}.strategy", "SparseDDPStrategy")


def __getattr__(name: str) -> Any:
    place = _LATER.get(name)
    if name in ("SparseDDPStrategy", "SparseFabricStrategy"):
        place = f"{present_door(FABRICS if name == 'SparseFabricStrategy' else DOORS)}.strategy"
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(place), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.meta_path.append(_Moved())
sys.meta_path.insert(0, _Serving())
for _lightning in {**DOORS, **FABRICS}.keys() & sys.modules.keys():
    _serve(_lightning)

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
    "SparseFabricStrategy",
    "Sparsifier",
    "available_compressors",
    "bucket_cap_mb",
    "register_compressor",
    "sparsify",
]
