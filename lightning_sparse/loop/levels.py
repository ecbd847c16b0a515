"""Levels of the exchange: with two levels, ranks of a node average gradients before nodes exchange the means."""

import os
import socket
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Union

from lightning_sparse.engine.requirements import missing_capabilities
from lightning_sparse.engine.settings import Settings
from lightning_sparse.engine.store import all_gather_via_store
from lightning_sparse.loop.optimizers import listed

Node = Union[int, str]
_NO_LEVELS = (
    "levels=2 needs several nodes, each with equally many consecutive ranks, at least two (with SLURM use srun"
    " --distribution=block). The nodes of the ranks are {}. Lightning's environment numbers nodes. In a plain loop,"
    " GROUP_RANK (of torchrun) or else the host name identifies a node. If containers share a host name, set another"
    " GROUP_RANK on each node. Use 'auto', which uses two levels if possible"
)


def own_node() -> Node:
    """Return the identity of this process's node: torchrun's ``GROUP_RANK``, else the host name."""
    return os.environ.get("GROUP_RANK") or socket.gethostname()


def agreed_ranks_of_node(settings: Settings, node: Node, log: Callable[[str], None]) -> int:
    """Return the number of ranks per node that average gradients before the exchange between nodes (1: one level)."""
    # Ranks gather through the store, because NCCL may not have a device for each rank yet.
    nodes = [] if settings.levels == 1 else all_gather_via_store(str(node))
    count = ranks_of_node(settings, nodes) if len(nodes) > 1 else 1
    if count > 1:
        together = "average their gradients before they exchange with other nodes."
        log(f"two levels: the {count} ranks of each of {len(nodes) // count} nodes {together}")
    return count


def ranks_of_node(settings: Settings, nodes: Sequence[Node]) -> int:
    """Return the number of ranks per node for two levels, or 1 for one level. ``nodes`` has the node of each rank."""
    sizes = [len(list(ranks)) for _, ranks in groupby(nodes)]
    is_possible = len(sizes) == len(set(nodes)) > 1 and len(set(sizes)) == 1 and sizes[0] > 1
    if settings.levels == 2 and not is_possible:
        raise ValueError(_NO_LEVELS.format(listed(nodes)))
    works_on_shares = not any(missing_capabilities("levels=2", settings))
    return sizes[0] if is_possible and settings.levels != 1 and works_on_shares else 1
