"""The table of names that ``Trainer(strategy=...)`` understands: one row for a system, and how each can be launched."""

from collections.abc import Iterator
from typing import Any, NamedTuple


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


SYSTEMS = (
    System(
        "sparse_auto",
        "whole, in part, or plain DDP: measures, then decides",
        {"compressor": "lags", "schedule": "auto"},
    ),
    System("sparse_lags", "LAGS-SGD: the largest magnitudes of each layer at its own density", {"compressor": "lags"}),
    System("sparse_omgs", "OMGS-SGD: the largest magnitudes of layers that travel together", {"compressor": "omgs"}),
    System("sparse_a2sgd", "A2SGD: two numbers a step, parameters averaged now and then", {"compressor": "a2sgd"}),
    System("sparse_sdagc", "SDAGC (reconstruction): what exceeds a layer's deviation", {"compressor": "sdagc"}),
    System("sparse_exdyna", "ExDyna: exclusive partitions of balanced load, one threshold", {"compressor": "exdyna"}),
    System("sparse_topk", "the largest magnitudes of each parameter, with error feedback", {"compressor": "topk"}),
    System("sparse_dgc", "Deep Gradient Compression: momentum before selection, warm-up", {"compressor": "dgc"}),
    System("sparse_micro", "MiCRO: exclusive partitions of equal size, one threshold", {"compressor": "micro"}),
    System("sparse_qsgd", "QSGD: every element as a few random bits, right on average", {"compressor": "qsgd"}),
    System("sparse_dense", "everything is sent: DDP on this engine, for comparison", {"compressor": "dense"}),
)

_VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("", {"start_method": "popen"}),
    ("_spawn", {"start_method": "spawn"}),
    ("_fork", {"start_method": "fork"}),
    ("_find_unused_parameters_true", {"start_method": "popen", "find_unused_parameters": True}),
    ("_spawn_find_unused_parameters_true", {"start_method": "spawn", "find_unused_parameters": True}),
    ("_fork_find_unused_parameters_true", {"start_method": "fork", "find_unused_parameters": True}),
)


def strategy_entries() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield name, description and arguments of every strategy name.

    Example::

        >>> next(strategy_entries())[0]
        'sparse_auto'
    """
    for system in SYSTEMS:
        for suffix, launch in _VARIANTS:
            yield system.name + suffix, system.description, {**system.arguments, **launch}
