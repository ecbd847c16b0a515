"""The names that ``Trainer(strategy=...)`` understands: one for each compressor, and how each can be launched."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from lightning_sparse.compressors import COMPRESSORS
from lightning_sparse.schedule import Auto

_VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("", {"start_method": "popen"}),
    ("_spawn", {"start_method": "spawn"}),
    ("_fork", {"start_method": "fork"}),
    ("_find_unused_parameters_true", {"start_method": "popen", "find_unused_parameters": True}),
    ("_spawn_find_unused_parameters_true", {"start_method": "spawn", "find_unused_parameters": True}),
    ("_fork_find_unused_parameters_true", {"start_method": "fork", "find_unused_parameters": True}),
)


class System(NamedTuple):
    """A named composition.

    Attributes:
        name: what the user writes.
        description: one line for people who list the names.
        arguments: arguments of :class:`~lightning_sparse.strategy.SparseDDPStrategy`.
    """

    name: str
    description: str
    arguments: dict[str, Any]

    def variants(self) -> dict[str, dict[str, Any]]:
        """Return every strategy name of the system with its arguments, one for each way to launch it.

        Example::

            >>> list(AUTO.variants())[:2]
            ['sparse_auto', 'sparse_auto_spawn']
        """
        return {self.name + suffix: {**self.arguments, **launch} for suffix, launch in _VARIANTS}


AUTO = System(
    "sparse_auto", inspect.cleandoc(Auto.__doc__ or "").partition("\n")[0], {"compressor": "lags", "schedule": "auto"}
)
# The names that are not a compressor's.
_OWN = (
    AUTO,
    System(
        "sparse_diloco",
        "Train alone for 50 steps, then average what has changed, with an outer Nesterov momentum (DiLoCo).",
        {"compressor": "dense", "local_steps": 50, "outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True},
    ),
    System(
        "sparse_loco",
        "Train alone for 30 steps, then exchange a 64th of what has changed, in 2 bits each (SparseLoCo).",
        {"compressor": "topk", "density": 1 / 64, "wire": "2bit", "local_steps": 30, "residual_decay": 0.95},
    ),
)


def systems() -> list[System]:
    """Return the systems that there are now.

    Example::

        >>> [system.name for system in systems()][:4]
        ['sparse_auto', 'sparse_diloco', 'sparse_loco', 'sparse_lags']
    """
    return [*_OWN, *(_system_of(*row) for row in COMPRESSORS.descriptions().items())]


def announce_systems(tell: Callable[[System], None]) -> None:
    """Tell of every system: of those there are now, and of each whose compressor is registered later.

    Args:
        tell: may refuse one with a ``ValueError``.
    """
    for system in _OWN:
        tell(system)
    COMPRESSORS.announce(lambda name, description: tell(_system_of(name, description)))


def _system_of(name: str, description: str) -> System:
    return System(f"sparse_{name}", description, {"compressor": name})
