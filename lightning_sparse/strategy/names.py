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


# The only name that is not a compressor's.
AUTO = System(
    "sparse_auto", inspect.cleandoc(Auto.__doc__ or "").partition("\n")[0], {"compressor": "lags", "schedule": "auto"}
)


def systems() -> list[System]:
    """Return the systems that there are now.

    Example::

        >>> [system.name for system in systems()][:3]
        ['sparse_auto', 'sparse_lags', 'sparse_omgs']
    """
    return [AUTO, *(_system_of(*row) for row in COMPRESSORS.descriptions().items())]


def announce_systems(tell: Callable[[System], None]) -> None:
    """Tell of every system: of those there are now, and of each whose compressor is registered later.

    Args:
        tell: may refuse one with a ``ValueError``.
    """
    tell(AUTO)
    COMPRESSORS.announce(lambda name, description: tell(_system_of(name, description)))


def _system_of(name: str, description: str) -> System:
    return System(f"sparse_{name}", description, {"compressor": name})
