"""The names that ``strategy=...`` understands, and how each can be launched."""

import difflib
import warnings
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple, Optional

from lightning_sparse.compressors import available_compressors
from lightning_sparse.removed import REMOVED, refuse_removed

# What may stand behind a name, as behind "ddp", and the arguments that it stands for.
_STARTED = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
_LOOKING: dict[str, dict[str, Any]] = {"": {}, "_find_unused_parameters_true": {"find_unused_parameters": True}}


class _Table(NamedTuple):
    """A Lightning's table of strategies, and our classes for it: of whole models, and of sharded ones."""

    registry: str
    whole: str
    sharded: str


_TRAINERS = _Table("StrategyRegistry", "SparseDDPStrategy", "SparseModelParallelStrategy")
_FABRICS = _Table("STRATEGY_REGISTRY", "SparseFabricStrategy", "SparseFabricModelParallelStrategy")
# For each package of a Lightning the table of its strategies.
TABLES = {
    "pytorch_lightning": _TRAINERS,
    "lightning.pytorch": _TRAINERS,
    "lightning_fabric": _FABRICS,
    "lightning.fabric": _FABRICS,
}


class System(NamedTuple):
    """A name that the user writes, a line for who lists the names, and arguments of the strategies."""

    name: str
    description: str
    arguments: dict[str, Any]
    is_sharded: bool = False

    def variants(self) -> dict[str, dict[str, Any]]:
        """Return every strategy name of the system with its arguments, one for each way to launch it."""
        if self.is_sharded:  # which Lightning launches as a script alone
            return {self.name: self.arguments}
        return {
            f"{self.name}{way}{looks}": {**self.arguments, "start_method": method, **more}
            for looks, more in _LOOKING.items()
            for way, method in _STARTED.items()
        }


AUTO = System(
    "sparse_auto",
    "Send each group whole or in part, as is faster, or leave everything to DDP, where that is faster still.",
    {"compressor": "lags", "schedule": "auto"},
)


SHARDED = System(
    "sparse_hsdp",
    "Shard the model in each node as configure_model says (FSDP2), and send the largest part of shards between nodes.",
    {"compressor": "lags"},
    is_sharded=True,
)


@cache
def _own() -> tuple[System, ...]:
    """Return the systems whose names are not a compressor's."""
    from lightning_sparse.engine.settings import LocalSteps  # not with the package: it takes the engine

    diloco = LocalSteps(50, outer_lr=0.7, outer_momentum=0.9, nesterov=True)
    loco = LocalSteps(30, residual_decay=0.95)
    return (
        AUTO,
        System(
            "sparse_diloco",
            "Train alone for 50 steps, then average what has changed, with an outer Nesterov momentum (DiLoCo).",
            {"compressor": "dense", "local_steps": diloco},
        ),
        System(
            "sparse_loco",
            "Train alone for 30 steps, then exchange a 64th of what has changed, in 2 bits each (SparseLoCo).",
            {"compressor": "topk", "density": 1 / 64, "wire": "2bit", "local_steps": loco},
        ),
    )


def systems() -> list[System]:
    """Return the systems that there are now, of models that every rank holds whole."""
    compressors = available_compressors().items()
    return [*_own(), *(System(f"sparse_{name}", line, {"compressor": name}) for name, line in compressors)]


def meant_by(name: str) -> Optional[str]:
    """Return which of our names a slip of the pen stands for; ``None`` if it is not like one of them."""
    written = name.lower().replace("-", "_")
    ours = [variant for system in (*systems(), SHARDED) for variant in system.variants()]
    if f"sparse_{written}" in ours:
        return f"sparse_{written}"
    near = difflib.get_close_matches(written, ours, n=1, cutoff=0.9) if written.startswith("sparse") else []
    return next(iter(near), None)


class _Names(list[str]):
    """The names that Lightning finds a strategy's among; of a slip they say what was probably meant."""

    def __contains__(self, name: object) -> bool:
        is_known = super().__contains__(name)
        near = meant_by(name) if isinstance(name, str) and not is_known else None
        if near is not None:
            # Lightning's error, which comes next, names none of ours.
            warnings.warn(f"strategy={name!r} is unknown; did you mean {near!r}?", stacklevel=2)
        return is_known


class _Strategies(dict[str, Any]):
    """A row of a Lightning's table, whose class is imported when somebody asks for it."""

    def __init__(self, lightning: str, name: str, system: System, arguments: dict[str, Any]) -> None:
        super().__init__(description=system.description, init_params=arguments, strategy_name=name)
        self._lightning = lightning
        self._class = TABLES[lightning].sharded if system.is_sharded else TABLES[lightning].whole

    def __missing__(self, key: str) -> Any:
        if key != "strategy":
            raise KeyError(key)
        ours = import_module("lightning_sparse.strategy.lightning")
        if self._lightning.startswith("lightning.") == ours.NAME.startswith("lightning."):
            refuse_removed(f"strategy={self['strategy_name']!r}", self._class)
            self[key] = getattr(import_module("lightning_sparse"), self._class)
            return self[key]
        raise TypeError(f"strategy={self['strategy_name']!r} is {ours.CURE}")


def register_names(lightning: str) -> None:
    """Register the systems, and those of compressors that are registered later, without importing a class."""
    table = TABLES[lightning]
    strategies = getattr(import_module(f"{lightning}.strategies"), table.registry)
    # A class path alone, without arguments, reaches Lightning as a word, which it asks for in small letters.
    path = f"lightning_sparse.{table.whole}".lower()
    if path in strategies:  # of a Lightning that is imported anew the table is the same
        return
    known = strategies.available_strategies

    def names() -> list[str]:
        for system in (*systems(), SHARDED):  # of compressors that have been registered since, too
            if system.name not in strategies:
                for name, arguments in system.variants().items():
                    strategies[name] = _Strategies(lightning, name, system, arguments)
        return _Names(known())

    strategies.available_strategies = names
    names()
    for name in REMOVED:  # of strategies; Lightning asks its table first, and no other name gets here
        if name not in strategies:
            strategies.register(name, partial(refuse_removed, f"strategy={name!r}", name))
    strategies[path] = _Strategies(lightning, path, System(path, "the class, with its defaults", {}), {})
