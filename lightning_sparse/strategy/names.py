"""Registration of the strategy names with Lightning, for the Trainer and for Fabric."""

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

from lightning_sparse.compressors import COMPRESSORS, Compressor, available_compressors
from lightning_sparse.engine.settings import LocalSteps
from lightning_sparse.removed import refuse_removed
from lightning_sparse.strategy.fabric import SparseFabricStrategy
from lightning_sparse.strategy.lightning import STRATEGY_REGISTRY, StrategyRegistry
from lightning_sparse.strategy.sharded import SparseModelParallelStrategy
from lightning_sparse.strategy.trainer import SparseDDPStrategy

# Suffixes of a strategy name, the same as for "ddp", with the arguments that a suffix stands for.
VARIANTS: dict[str, dict[str, Any]] = {
    f"{way}{looks}": {"start_method": method, **more}
    for looks, more in {"": {}, "_find_unused_parameters_true": {"find_unused_parameters": True}}.items()
    for way, method in {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}.items()
}
_REGISTRIES = ((StrategyRegistry, SparseDDPStrategy), (STRATEGY_REGISTRY, SparseFabricStrategy))


class System(NamedTuple):
    """A strategy name, a one-line description for lists of strategies, and arguments of the strategy class."""

    name: str
    description: str
    arguments: dict[str, Any]


_OWN = (
    System(
        "sparse_auto",
        "Send each bucket dense or sparse, whichever is faster, or use plain DDP if that is faster still.",
        {"compressor": "lags", "schedule": "auto"},
    ),
    System(
        "sparse_diloco",
        "Train each rank alone for 50 steps, then average the model changes with an outer Nesterov momentum (DiLoCo).",
        {"compressor": "dense", "local_steps": LocalSteps(50, outer_lr=0.7, outer_momentum=0.9, nesterov=True)},
    ),
    System(
        "sparse_loco",
        "Train each rank alone for 30 steps, then exchange 1/64 of the model changes, in 2 bits each (SparseLoCo).",
        {"compressor": "topk", "density": 1 / 64, "wire": "2bit", "local_steps": LocalSteps(30, residual_decay=0.95)},
    ),
)
_SHARDED = "Shard the model inside each node with FSDP2, and send the largest gradient elements between nodes."


def systems() -> list[System]:
    """Return all registered strategies except the sharded one."""
    return [*_OWN, *map(_system_of, available_compressors())]


def register_names() -> None:
    """Register all strategy names with Lightning, for the Trainer and for Fabric."""
    _register(systems())
    # Lightning does not start sharded strategies by spawn or fork, so the name has no suffixes.
    StrategyRegistry.register("sparse_hsdp", SparseModelParallelStrategy, _SHARDED, override=True)
    gone = partial(refuse_removed, "strategy='sparse_hsdp' of Fabric", "SparseFabricModelParallelStrategy")
    STRATEGY_REGISTRY.register("sparse_hsdp", gone, override=True)
    muloco = partial(refuse_removed, "strategy='sparse_muloco'", "sparse_muloco")
    for registry, whole in _REGISTRIES:
        # If a configuration gives only a class path, Lightning looks up the lower-case path as a strategy name.
        registry.register(f"lightning_sparse.{whole.__name__}".lower(), whole, "with default arguments", override=True)
        registry.register("sparse_muloco", muloco, override=True)


def register_compressor(name: str, compressor: type[Compressor]) -> None:
    """Register a custom compressor for ``compressor=`` and as a strategy name.

    Args:
        name: new name. For ``"mine"`` the strategy name is ``"sparse_mine"``, also with suffixes such as ``_spawn``.
        compressor: class that is built without arguments.

    Raises:
        ValueError: if the compressor name or the strategy name is taken.
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
