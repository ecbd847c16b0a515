"""Shards of a checkpoint, one for each rank: checked when read, and averaged for another number of ranks."""

import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Optional, Union
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup

from lightning_sparse.engine.collectives import gather_together, sum_together
from lightning_sparse.engine.memory.residual import NUMBERS, WHOLE
from lightning_sparse.engine.step.levels import Topology
from lightning_sparse.jobs.lightning import CheckpointIO
from lightning_sparse.jobs.newest import CheckpointError
from lightning_sparse.strategy.checkpoints.files import PathLike, followed, saves_beside, shard_path

KEY = "lightning_sparse"
_VERSION = 4
_SUMMED_AT_ONCE = 1 << 20  # elements, 8 MiB of a device
CURE = "To go on without what the ranks had kept: give the strategy resume_compression=False."


class AbsentError(CheckpointError):
    """Nothing of what the ranks kept lies beside the checkpoint."""


class Save(NamedTuple):
    """One save, as noted in Lightning's file and in the part of every rank."""

    name: str  # random, 32 hexadecimal digits
    ranks: int  # that wrote a part
    compressor: str  # its class
    node_ranks: int = 1  # that, one after the other, had shares of the same parameters; 1 where each kept all
    is_sharded: bool = False  # those shares were FSDP's shards, and the ranks one replica
    are_islands: bool = False  # those ranks made their local steps together

    @property
    def topology(self) -> Topology:
        """Who kept what."""
        return Topology(self.ranks, self.node_ranks, self.are_islands)

    def as_header(self) -> dict[str, Any]:
        """Return it as plain values."""
        header = {"version": _VERSION, "save": self.name, "ranks": self.ranks, "compressor": self.compressor}
        header |= {name: True for name in ("is_sharded", "are_islands") if getattr(self, name)}
        return header if self.node_ranks == 1 else {**header, "node_ranks": self.node_ranks}


def read_header(content: Any, source: str) -> Optional[Save]:
    """Return the save that a file says it belongs to; ``None`` if it says nothing."""
    if not isinstance(content, dict) or content.get(KEY) is None:
        return None
    header = content[KEY] if isinstance(content[KEY], dict) else {}
    version, name, ranks, compressor = map(header.get, ("version", "save", "ranks", "compressor"))
    node_ranks = header.get("node_ranks", 1)
    is_whole = isinstance(version, int) and isinstance(ranks, int) and ranks > 0 and isinstance(compressor, str)
    is_whole = is_whole and isinstance(node_ranks, int) and node_ranks > 0 and ranks % node_ranks == 0
    # The name becomes part of a path.
    if not (is_whole and isinstance(name, str) and re.fullmatch("[0-9a-f]{32}", name)):
        raise CheckpointError(f"{source} holds {KEY!r}, but not as this package writes it. {CURE}")
    if version != _VERSION:
        raise CheckpointError(
            f"{source} was written by another version of lightning-sparse (format {version}, this one reads"
            f" {_VERSION}): use that version. {CURE}"
        )
    is_sharded, are_islands = (header.get(name) is True for name in ("is_sharded", "are_islands"))
    return Save(name, ranks, compressor, node_ranks, is_sharded, are_islands)


def read_shard(checkpoint_io: CheckpointIO, path: str, save: Save) -> dict[str, Any]:
    """Read one rank's part, without ever running what a pickle asks for."""
    parameters = inspect.signature(checkpoint_io.load_checkpoint).parameters
    if "weights_only" not in parameters and not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        raise CheckpointError(
            f"{type(checkpoint_io).__name__}.load_checkpoint takes no argument weights_only, so {path} cannot be read"
            f" safely: add it, as in Lightning's CheckpointIO. {CURE}"
        )
    try:
        with warnings.catch_warnings():
            # Torch says from 2.14 on that it looks at sparse tensors, as it should: users can do nothing about it.
            warnings.filterwarnings("ignore", "Validating sparse tensor invariants")
            shard = checkpoint_io.load_checkpoint(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing: the checkpoint was saved by {save.ranks} ranks, each of which wrote a file. Without a"
            " shared file system it is on the node that wrote it: resume with the same ranks on the same nodes, or copy"
            f" all of them beside the checkpoint on every node. {CURE}"
        ) from error
    except Exception as error:  # whatever a damaged file makes torch stumble over
        raise CheckpointError(
            f"{path} cannot be read: it is damaged, or was not written by this package. Copy it anew, or resume from"
            f" another checkpoint. {CURE} torch said: {error}"
        ) from error
    is_ours = (
        isinstance(shard, dict)
        and isinstance(shard.get("engine"), dict)
        and {"memory", "compressor"} <= shard["engine"].keys()
    )
    if read_header(shard, path) != save or not is_ours:
        raise CheckpointError(
            f"{path} does not belong to the save {save.name} that the checkpoint names: copy the checkpoint and its"
            f" folder together. {CURE}"
        )
    return shard


Place = tuple[Any, ...]  # the keys that lead there


class Share(NamedTuple):
    """What a rank has read of the parts of another number of ranks."""

    sums: dict[str, Any]  # as a part, with the sums of floating-point tensors; the rest is the first part's
    shapes: dict[Place, tuple[torch.Size, torch.dtype]]  # of those tensors, in a part


def read_share(read: Callable[[int], dict[str, Any]], rank: int, ranks: int, saved: int) -> Share:
    """Read this rank's share of all parts, one at a time, and add up what is kept of each parameter."""
    sums = read(rank % saved)
    shapes = {place: (tensor.shape, tensor.dtype) for place, tensor in _summed(sums)}
    if rank >= saved:  # somebody else has read this part for its sum, too
        for _, tensor in _summed(sums):
            tensor.zero_()
    for source in range(rank + ranks, saved, ranks):
        for place, tensor in _summed(read(source)):
            shapes.setdefault(place, (tensor.shape, tensor.dtype))
            _put(sums, place, _at(sums, place, tensor).double().add_(tensor))
    return Share(sums, shapes)


def mean_of_shares(
    share: Share, save: Save, device: torch.device, group: Optional[ProcessGroup] = None
) -> dict[str, Any]:
    """Return what a rank goes on with, of parts of which every rank of a group has read a share; all must call.

    What is kept of each parameter becomes the mean over ranks (over nodes, where their ranks had shares), so that the
    model is owed what it was. What a compressor has learned is passed on as it is, from rank to rank in turn.
    """
    # Of a parameter that only some ranks used between two batches of one step, only these have kept a gradient.
    forms = gather_together(crc32(repr(sorted(share.shapes.items(), key=str)).encode()), group)
    shapes = share.shapes
    if len(set(forms)) > 1:
        everywhere = gather_together(shapes, group)
        shapes = {place: shape for theirs in everywhere for place, shape in theirs.items()}
        if any(shapes[place] != shape for theirs in everywhere for place, shape in theirs.items()):
            raise CheckpointError(f"parts of the checkpoint keep tensors of different shapes of one parameter. {CURE}")
    for place, (shape, dtype) in sorted(shapes.items(), key=str):
        if not shape.numel():
            continue
        own, mean = _at(share.sums, place, torch.zeros(shape, dtype=dtype)), torch.empty(shape, dtype=dtype)
        parts = save.ranks // save.node_ranks if save.is_sharded or _is_shared(place, save) else save.ranks
        for sums, means in zip(own.reshape(-1).split(_SUMMED_AT_ONCE), mean.view(-1).split(_SUMMED_AT_ONCE)):
            means.copy_(sum_together(sums.to(device, torch.float64, copy=True), group).div_(parts))
        _put(share.sums, place, mean)
    return share.sums


def _summed(part: Any, *place: Any) -> Iterator[tuple[Place, Tensor]]:
    """Yield the floating-point tensors in nested containers, but those of a compressor, and where they are."""
    if isinstance(part, dict):
        for key, value in part.items():
            if (*place, key) != ("engine", "compressor"):
                yield from _summed(value, *place, key)
    elif isinstance(part, list):
        for index, value in enumerate(part):
            yield from _summed(value, *place, index)
    elif isinstance(part, Tensor) and part.is_floating_point():
        yield place, part


def _is_shared(place: Place, save: Save) -> bool:
    """Tell whether ranks of a node have shares of what is at a place, where there are two levels."""
    if save.are_islands and place[:3] == ("engine", "rounds", "momentum"):
        return True
    return len(place) == 4 and place[:2] == ("engine", "memory") and place[2] not in {*NUMBERS, *WHOLE}


def _laid_out(part: dict[str, Any], save: Save, rank: int) -> dict[str, Any]:
    """Put the shares that a rank kept where they belong in whole parameters, with zeros for those of other ranks."""
    if save.node_ranks == 1:
        return part
    for place, share in list(_summed(part)):
        if _is_shared(place, save):
            whole = share.new_zeros(save.node_ranks, share.numel())
            whole[rank % save.node_ranks] = share
            _put(part, place, whole.view(-1))
    return part


def cut_anew(parts: Sequence[dict[str, Any]], shard: int, shards: int) -> dict[str, Any]:
    """Return a shard of what the ranks of a replica kept, cut along dimension 0 into so many, as DTensor does.

    Each of ``parts`` holds some rows of every parameter, one part after the other.
    """
    if any("rounds" in part["engine"] for part in parts):
        raise CheckpointError(
            "a round of local steps keeps optimizers' states in shards, of which other numbers cannot be made: resume"
            f" with the same data_parallel_size. {CURE}"
        )
    memories = [part["engine"]["memory"] for part in parts]
    layouts, memory = {}, {kind: dict[str, Tensor]() for each in memories for kind in each}
    for name, (shape, _) in parts[0]["layouts"].items():
        rows, row = sum(part["layouts"][name][0][0] for part in parts), math.prod(shape[1:])
        size = -(-rows // shards)
        start, stop = (min(rows, size * place) for place in (shard, shard + 1))
        layouts[name] = [
            [stop - start, *shape[1:]],
            list(torch.empty(stop - start, *shape[1:], device="meta").stride()),
        ]
        for kind, kept in memory.items():
            held = [each[kind][name] for each in memories if name in each.get(kind, ())]
            if held and stop > start:
                # Norms of shards add up to those of the whole; other numbers are the same of all.
                factor = len(parts) / shards if kind == "squared_norms" else 1.0
                numbers = torch.stack(held).mean(dim=0).mul_(factor) if kind in NUMBERS else None
                kept[name] = torch.cat(held)[start * row : stop * row] if numbers is None else numbers
    return {**parts[0], "layouts": layouts, "engine": {**parts[0]["engine"], "memory": memory}}


def _at(part: Any, place: Sequence[Any], otherwise: Tensor) -> Tensor:
    """Return what is at a place of nested containers; zeros like ``otherwise`` where nothing is."""
    try:
        for key in place:
            part = part[key]
    except (KeyError, IndexError):
        return torch.zeros_like(otherwise)
    found: Tensor = part
    return found


def _put(part: Any, place: Sequence[Any], tensor: Tensor) -> None:
    *containers, last = place
    for key in containers:
        part = part.setdefault(key, {}) if isinstance(part, dict) else part[key]
    part[last] = tensor


def read_state(
    checkpoint_io: CheckpointIO, path: PathLike, save: Save, rank: int, topology: Topology
) -> Union[dict[str, Any], Share]:
    """Read what a rank goes on with: its own part, or a share of all where the :attr:`Save.topology` has changed."""
    places = [place for place in dict.fromkeys((followed(path), str(path))) if save.name in saves_beside(place)]
    place = (places or [str(path)])[0]

    def read(source: int) -> dict[str, Any]:
        return read_shard(checkpoint_io, shard_path(place, save.name, source), save)

    try:
        if save.topology == topology:
            return read(rank)
        if save.is_sharded:
            shards, saved = topology.node_ranks, save.ranks // save.node_ranks
            replica, shard = divmod(rank, shards)

            def read_shard_of(source: int) -> dict[str, Any]:
                if save.node_ranks == shards:
                    return read(source * shards + shard)
                parts = [read(source * save.node_ranks + each) for each in range(save.node_ranks)]
                return cut_anew(parts, shard, shards)

            return read_share(read_shard_of, replica, topology.ranks // shards, saved)
        return read_share(lambda source: _laid_out(read(source), save, source), rank, topology[0], save.ranks)
    except CheckpointError as error:
        if isinstance(error.__cause__, FileNotFoundError) and not saves_beside(place):
            raise AbsentError(str(error)) from error
        raise
