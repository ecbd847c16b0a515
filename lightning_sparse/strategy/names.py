"""The names that ``strategy=...`` understands, and how each can be launched: rows of Lightning's registries."""

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

from lightning_sparse.compressors import COMPRESSORS, Compressor, available_compressors
from lightning_sparse.engine.settings import LocalSteps
from lightning_sparse.removed import REMOVED, refuse_removed
from lightning_sparse.strategy.fabric import SparseFabricStrategy
from lightning_sparse.strategy.lightning import STRATEGY_REGISTRY, StrategyRegistry
from lightning_sparse.strategy.sharded import SparseModelParallelStrategy
from lightning_sparse.strategy.trainer import SparseDDPStrategy

# What may stand behind a name, as behind "ddp", and the arguments that it stands for.
VARIANTS: dict[str, dict[str, Any]] = {
    f"{way}{looks}": {"start_method": method, **more}
    for looks, more in {"": {}, "_find_unused_parameters_true": {"find_unused_parameters": True}}.items()
    for way, method in {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}.items()
}
_REGISTRIES = ((StrategyRegistry, SparseDDPStrategy), (STRATEGY_REGISTRY, SparseFabricStrategy))


class System(NamedTuple):
    """A name that the user writes, a line for who lists the names, and arguments of the strategies."""

    name: str
    description: str
    arguments: dict[str, Any]


_OWN = (
    System(
        "sparse_auto",
        "Send each group whole or in part, as is faster, or leave everything to DDP, where that is faster still.",
        {"compressor": "lags", "schedule": "auto"},
    ),
    System(
        "sparse_diloco",
        "Train alone for 50 steps, then average what has changed, with an outer Nesterov momentum (DiLoCo).",
        {"compressor": "dense", "local_steps": LocalSteps(50, outer_lr=0.7, outer_momentum=0.9, nesterov=True)},
    ),
    System(
        "sparse_loco",
        "Train alone for 30 steps, then exchange a 64th of what has changed, in 2 bits each (SparseLoCo).",
        {
            "compressor": "topk",
            "density": 1 / 64,
            "wire": "2bit",
            "local_steps": LocalSteps(30, residual_decay=0.95),
        },
    ),
)
SHARDED = System(
    "sparse_hsdp",
    "Shard the model in each node as configure_model says (FSDP2), and send the largest part of shards between nodes.",
    {"compressor": "lags"},
)


def systems() -> list[System]:
    """Return the systems that there are now, of models that every rank holds whole."""
    return [*_OWN, *map(_system_of, available_compressors())]


def register_names() -> None:
    """Register all systems with Lightning, for the Trainer and for Fabric."""
    _register(systems())
    # Lightning launches shards as a script alone.
    name, description, arguments = SHARDED
    StrategyRegistry.register(name, SparseModelParallelStrategy, description, override=True, **arguments)
    gone = partial(refuse_removed, f"strategy={name!r} of Fabric", "SparseFabricModelParallelStrategy")
    STRATEGY_REGISTRY.register(name, gone, override=True)
    for registry, whole in _REGISTRIES:
        # A class path alone, without arguments, reaches Lightning as a word, which it asks for in small letters.
        registry.register(f"lightning_sparse.{whole.__name__}".lower(), whole, "with its defaults", override=True)
        for name in REMOVED:
            if name.startswith("sparse_"):
                registry.register(name, partial(refuse_removed, f"strategy={name!r}", name), override=True)


def register_compressor(name: str, compressor: type[Compressor]) -> None:
    """Give a compressor of your own a name that ``compressor=`` understands, and its strategies theirs.

    Args:
        name: new name; ``"mine"`` makes ``Trainer(strategy="sparse_mine")`` work, too, also with suffixes.
        compressor: class that is built without arguments.

    Raises:
        ValueError: if the name, or its strategy's, is taken.
        TypeError: if the class is not a :class:`Compressor`.
    """
    if not (isinstance(compressor, type) and issubclass(compressor, Compressor)):
        raise TypeError(f"compressor {name!r} must be a subclass of Compressor, got {compressor!r}")
    taken = [system.name.removeprefix("sparse_") for system in systems()]
    if name in taken:
        raise ValueError(f"compressor {name!r} is taken: choose another name than {', '.join(taken)}")
    COMPRESSORS[name] = compressor
    _register([_system_of(name)])


def _system_of(compressor: str) -> System:
    return System(f"sparse_{compressor}", available_compressors()[compressor], {"compressor": compressor})


def _register(systems: Iterable[System]) -> None:
    for registry, whole in _REGISTRIES:
        for name, description, arguments in systems:
            for suffix, more in VARIANTS.items():
                registry.register(name + suffix, whole, description, override=True, **arguments, **more)
