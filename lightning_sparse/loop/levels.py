"""One level or two: whether the ranks of a node average their gradients before they exchange with other nodes."""

import os
import socket
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Union

from lightning_sparse.engine.collectives import all_gather_via_store
from lightning_sparse.engine.settings import Settings
from lightning_sparse.loop.optimizers import listed

Node = Union[int, str]
_TOLD_APART = (
    "By rank, nodes were found to be {}: they are told apart by their numbers in Lightning's cluster environment, or in"
    " a plain loop by GROUP_RANK, as torchrun sets it, else by the host's name, which containers may share: give each"
    " node a GROUP_RANK of its own there."
)


def own_node() -> Node:
    """Return what tells the node of this process from others: torchrun's number of it, else the host's name."""
    return os.environ.get("GROUP_RANK") or socket.gethostname()


def agreed_ranks_of_node(settings: Settings, node: Node, log: Callable[[str], None]) -> int:
    """Return how many ranks of a node, of which each tells its own, average their gradients first, and say so."""
    # In the store: which device is whose nobody may have told NCCL so far.
    nodes = [] if settings.levels == 1 else all_gather_via_store(str(node))
    count = ranks_of_node(settings, nodes) if len(nodes) > 1 else 1
    if count > 1:
        together = "average their gradients before they exchange with other nodes."
        log(f"two levels, the {count} ranks of each of {len(nodes) // count} nodes {together}")
    return count


def ranks_of_node(settings: Settings, nodes: Sequence[Node]) -> int:
    """Return how many ranks of a node average their gradients first, by each rank's node; 1 for one level."""
    sizes = [len(list(ranks)) for _, ranks in groupby(nodes)]
    reason = None
    if len(set(nodes)) == 1:
        reason = "all ranks are on one node: their network is as fast as a second level's would be"
    elif len(sizes) != len(set(nodes)):
        reason = "the ranks of a node do not follow one another; with SLURM, srun --distribution=block has them do so"
    elif len(set(sizes)) > 1:
        reason = f"nodes have different numbers of ranks ({listed(sizes)}): start equally many on each"
    elif sizes[0] == 1:
        reason = "each node has one rank: there is nobody to average with first"
    if reason is not None and settings.levels == 2:
        cure = "which takes two levels where there are"
        raise ValueError(f"levels=2 was given, but {reason}. {_TOLD_APART.format(listed(nodes))} Leave it out, {cure}")
    is_wanted = settings.levels != 1 and settings.can_have_levels
    return sizes[0] if is_wanted and reason is None else 1
