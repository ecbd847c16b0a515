"""Shards of a checkpoint, one for each rank: checked when read, and averaged for another number of ranks."""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Optional, Union
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup

from lightning_sparse.engine.collectives import gather_together, sum_together
from lightning_sparse.engine.memory.residual import NUMBERS
from lightning_sparse.engine.step.levels import Topology
from lightning_sparse.loop.kept import EVERYWHERE, RANK, SCOPES, SHARE, VERSION
from lightning_sparse.loop.optimizers import listed
from lightning_sparse.strategy.checkpoints.files import CheckpointError, PathLike, followed, saves_beside, shard_path
from lightning_sparse.strategy.lightning import CheckpointIO

KEY = "lightning_sparse"
Models = dict[str, dict[str, Any]]  # what a rank kept of each model, by a name
_SUMMED_AT_ONCE = 1 << 20  # elements, 8 MiB of a device
CURE = "To go on without what the ranks had kept: give the strategy resume_compression=False."


class AbsentError(CheckpointError):
    """Nothing of what the ranks kept lies beside the checkpoint."""


class SaveHeader(NamedTuple):
    """One save, as noted in Lightning's file and in the part of every rank."""

    name: str  # random, 32 hexadecimal digits
    ranks: int  # that wrote a part
    compressor: str  # its class
    node_ranks: int = 1  # that, one after the other, had shares of the same parameters; 1 where each kept all
    is_sharded: bool = False  # those shares were FSDP's shards, and the ranks one replica

    @property
    def topology(self) -> Topology:
        """Who kept what."""
        return Topology(self.ranks, self.node_ranks)

    def as_header(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {"version": VERSION, **self._asdict()}


def read_header(content: Any, source: str) -> Optional[SaveHeader]:
    """Return the save that a file says it belongs to; ``None`` if it says nothing."""
    if not isinstance(content, dict) or content.get(KEY) is None:
        return None
    header = content[KEY] if isinstance(content[KEY], dict) else {}
    version = header.get("version")
    if isinstance(version, int) and version != VERSION:
        raise CheckpointError(
            f"{source} was written by another version of lightning-sparse (format {version}, this one reads"
            f" {VERSION}): use that version. {CURE} Weights and optimizers are loaded as ever."
        )
    values: list[Any] = [header.get(field) for field in SaveHeader._fields]
    is_whole = version == VERSION and [*map(type, values)] == [str, int, str, int, bool]
    # The name becomes part of a path.
    if is_whole and re.fullmatch("[0-9a-f]{32}", values[0]) and min(values[1], values[3]) > 0 == values[1] % values[3]:
        return SaveHeader(*values)
    raise CheckpointError(f"{source} holds {KEY!r}, but not as this package writes it. {CURE}")


def read_shard(checkpoint_io: CheckpointIO, path: str, save: SaveHeader) -> Models:
    """Read what one rank kept, without ever running what a pickle asks for."""
    parameters = inspect.signature(checkpoint_io.load_checkpoint).parameters
    if "weights_only" not in parameters and not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        raise CheckpointError(
            f"{type(checkpoint_io).__name__}.load_checkpoint takes no argument weights_only, so {path} cannot be read"
            f" safely: add it, as in Lightning's CheckpointIO. {CURE}"
        )
    try:
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
    models = shard.get("models") if isinstance(shard, dict) else None
    states = models.values() if isinstance(models, dict) else [None]
    is_ours = all(isinstance(each, dict) and {*SCOPES} <= each.keys() for each in states)
    if read_header(shard, path) != save or not isinstance(models, dict) or not is_ours:
        raise CheckpointError(
            f"{path} does not belong to the save {save.name} that the checkpoint names: copy the checkpoint and its"
            f" folder together. {CURE}"
        )
    return models


Place = tuple[Any, ...]  # the keys that lead there: a model's name, a scope, and others


class PartialSum(NamedTuple):
    """What a rank has read of the parts of another number of ranks."""

    first: Models  # of these parts, or one of somebody else's
    sums: dict[Place, Tensor]  # over these parts, of floating-point tensors, but those kept everywhere
    shapes: dict[Place, tuple[torch.Size, torch.dtype]]  # of those tensors, in a part


def read_sum(read: Callable[[int], Models], rank: int, ranks: int, saved: int) -> PartialSum:
    """Read this rank's share of all parts, one at a time, and add up what is kept of each parameter."""
    first = read(rank % saved)
    shapes = {place: (tensor.shape, tensor.dtype) for place, tensor in _summed(first)}
    sums = dict(_summed(first)) if rank < saved else {}  # else somebody else has read this part for its sum, too
    for source in range(rank + ranks, saved, ranks):
        for place, tensor in _summed(read(source)):
            shapes.setdefault(place, (tensor.shape, tensor.dtype))
            sums[place] = sums[place].double().add_(tensor) if place in sums else tensor
    return PartialSum(first, sums, shapes)


def mean_of_sums(
    mine: PartialSum, save: SaveHeader, device: torch.device, group: Optional[ProcessGroup] = None
) -> Models:
    """Return what a rank goes on with, of parts of which every rank of a group has read a share; all must call.

    What is a rank's own becomes the mean over ranks, and what ranks of a node had parts of the mean over nodes, whole,
    so that the model is owed what it was. The rest is passed on as it is, from rank to rank in turn.
    """
    # Of a parameter that only some ranks have used, only their optimizers have a state.
    forms = gather_together(crc32(repr(sorted(mine.shapes.items(), key=str)).encode()), group)
    shapes = mine.shapes
    if len(set(forms)) > 1:
        everywhere = gather_together(shapes, group)
        shapes = {place: shape for theirs in everywhere for place, shape in theirs.items()}
        if any(shapes[place] != shape for theirs in everywhere for place, shape in theirs.items()):
            raise CheckpointError(f"parts of the checkpoint keep tensors of different shapes of one parameter. {CURE}")
    for place, (shape, dtype) in sorted(shapes.items(), key=str):
        if not shape.numel():
            continue
        own = mine.sums[place] if place in mine.sums else torch.zeros(shape, dtype=dtype)
        mean = torch.empty(shape, dtype=dtype)
        parts = save.ranks // save.node_ranks if save.is_sharded or place[1] == SHARE else save.ranks
        for sums, means in zip(own.reshape(-1).split(_SUMMED_AT_ONCE), mean.view(-1).split(_SUMMED_AT_ONCE)):
            means.copy_(sum_together(sums.to(device, torch.float64, copy=True), group).div_(parts))
        _put(mine.first, place, mean)
    for state in mine.first.values():
        state[RANK]["memory"] |= state[SHARE]["memory"]
        state[SHARE] = {"memory": {}}
    return mine.first


def _summed(models: Models) -> Iterator[tuple[Place, Tensor]]:
    """Yield the floating-point tensors of which ranks have kept their own, or a part, and where they are."""
    for name, state in models.items():
        for scope in (RANK, SHARE):
            yield from _floats(state[scope], name, scope)


def _floats(part: Any, *place: Any) -> Iterator[tuple[Place, Tensor]]:
    if isinstance(part, (dict, list)):
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            yield from _floats(value, *place, key)
    elif isinstance(part, Tensor) and part.is_floating_point():
        yield place, part


def _laid_out(models: Models, save: SaveHeader, rank: int) -> Models:
    """Put the parts that a rank kept where they belong in whole parameters, with zeros for those of other ranks."""
    for state in models.values():
        for place, part in list(_floats(state[SHARE])):
            shape, *_ = state["layouts"][place[-1]]
            whole = part.new_zeros(save.node_ranks, part.numel())
            whole[rank % save.node_ranks] = part
            _put(state[SHARE], place, whole.view(-1)[: math.prod(shape)])
    return models


def cut_anew(parts: Sequence[dict[str, Any]], shard: int, shards: int) -> dict[str, Any]:
    """Return a shard of what the ranks of a replica kept, cut along dimension 0 into so many, as DTensor does.

    Each of ``parts`` holds some rows of every parameter, one part after the other.
    """
    first = parts[0]
    if others := [name for name, (*_, cut) in first["layouts"].items() if cut]:
        raise CheckpointError(
            f"along another dimension than 0, as {listed(others)}, shards are not cut anew: resume with"
            f" data_parallel_size={len(parts)}. {CURE}"
        )
    if "rounds" in first[RANK]:
        raise CheckpointError(
            "a round of local steps keeps optimizers' states in shards, of which other numbers cannot be made: resume"
            f" with the same data_parallel_size. {CURE}"
        )
    layouts, spans = {}, {}
    for name, (shape, _, cut) in first["layouts"].items():
        rows, row = sum(part["layouts"][name][0][0] for part in parts), math.prod(shape[1:])
        size = -(-rows // shards)
        start, stop = (min(rows, size * place) for place in (shard, shard + 1))
        strides = torch.empty(stop - start, *shape[1:], device="meta").stride()
        layouts[name] = [[stop - start, *shape[1:]], list(strides), cut]
        spans[name] = slice(start * row, stop * row)
    state = {**first, "layouts": layouts}
    for scope in (RANK, EVERYWHERE):
        memories = [part[scope]["memory"] for part in parts]
        memory = {kind: _cut_memory(kind, memories, spans, shards) for each in memories for kind in each}
        state[scope] = {**first[scope], "memory": memory}
    return state


def _cut_memory(kind: str, memories: Sequence[Any], spans: dict[str, slice], shards: int) -> dict[str, Tensor]:
    """Return one kind of what is kept of some spans of all elements, that shards have one after the other."""
    cut = {}
    for name, span in spans.items():
        held = [each[kind][name] for each in memories if name in each.get(kind, ())]
        if not held or span.start == span.stop:
            continue
        if kind in NUMBERS:
            # Norms of shards add up to those of the whole; other numbers are the same of all.
            cut[name] = torch.stack(held).mean(dim=0).mul_(len(memories) / shards if kind == "squared_norms" else 1.0)
        else:
            cut[name] = torch.cat(held)[span]
    return cut


def _put(part: Any, place: Sequence[Any], tensor: Tensor) -> None:
    *containers, last = place
    for key in containers:
        part = part.setdefault(key, {}) if isinstance(part, dict) else part[key]
    part[last] = tensor


def read_state(
    checkpoint_io: CheckpointIO, path: PathLike, save: SaveHeader, rank: int, topology: Topology
) -> Union[Models, PartialSum]:
    """Read what a rank goes on with: its own part, or a share of all where their topology has changed."""
    places = [place for place in dict.fromkeys((followed(path), str(path))) if save.name in saves_beside(place)]
    place = (places or [str(path)])[0]

    def read(source: int) -> Models:
        return read_shard(checkpoint_io, shard_path(place, save.name, source), save)

    try:
        if save.topology == topology:
            return read(rank)
        if save.is_sharded:
            shards, saved = topology.node_ranks, save.ranks // save.node_ranks
            replica, shard = divmod(rank, shards)

            def read_shard_of(source: int) -> Models:
                if save.node_ranks == shards:
                    return read(source * shards + shard)
                parts = [read(source * save.node_ranks + each) for each in range(save.node_ranks)]
                return {name: cut_anew([part[name] for part in parts], shard, shards) for name in parts[0]}

            return read_sum(read_shard_of, replica, topology.ranks // shards, saved)
        return read_sum(lambda source: _laid_out(read(source), save, source), rank, topology[0], save.ranks)
    except CheckpointError as error:
        if isinstance(error.__cause__, FileNotFoundError) and not saves_beside(place):
            raise AbsentError(str(error)) from error
        raise
