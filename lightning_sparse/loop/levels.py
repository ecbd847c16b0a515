"""Levels of the exchange: with two levels, ranks of a node average gradients before nodes exchange the means."""

import os
import socket
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Union

from lightning_sparse.engine.settings import Settings
from lightning_sparse.engine.store import all_gather_via_store
from lightning_sparse.loop.optimizers import listed

Node = Union[int, str]
_TOLD_APART = (
    "The nodes of the ranks are {}. Lightning's environment numbers nodes. In a plain loop, GROUP_RANK (of torchrun)"
    " or else the host name identifies a node. If containers share a host name, set another GROUP_RANK on each node."
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
    reason = None
    if len(set(nodes)) == 1:
        reason = "all ranks are on one node, and two levels need several nodes"
    elif len(sizes) != len(set(nodes)):
        reason = "the ranks of a node are not consecutive: with SLURM use srun --distribution=block"
    elif len(set(sizes)) > 1:
        reason = f"nodes have different numbers of ranks ({listed(sizes)}): start equally many on each"
    elif sizes[0] == 1:
        reason = "each node has one rank, so there is no average within a node"
    if reason is not None and settings.levels == 2:
        cure = "which uses two levels if possible"
        raise ValueError(f"levels=2 was given, but {reason}. {_TOLD_APART.format(listed(nodes))} Use 'auto', {cure}")
    is_wanted = settings.levels != 1 and settings.can_have_levels
    return sizes[0] if is_wanted and reason is None else 1
