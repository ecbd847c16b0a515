"""Shards of a checkpoint, one for each rank: checked when read, and averaged for another number of ranks."""

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

from pytorch_lightning.plugins import CheckpointIO
from torch import Tensor

from lightning_sparse.strategy.checkpoints.files import PathLike, followed, saves_beside, shard_path

KEY = "lightning_sparse"
_VERSION = 1
CURE = "To go on without what the ranks had kept: SparseDDPStrategy(resume_compression=False)."


class CheckpointError(RuntimeError):
    """A checkpoint's shards cannot be written, read, or used."""


class AbsentError(CheckpointError):
    """Nothing of what the ranks kept lies beside the checkpoint."""


class Save(NamedTuple):
    """One save, as noted in Lightning's file and in the part of every rank.

    Attributes:
        name: random, 32 hexadecimal digits.
        ranks: how many ranks wrote a part.
        compressor: class name of what their state belongs to.
    """

    name: str
    ranks: int
    compressor: str

    def as_header(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {"version": _VERSION, "save": self.name, "ranks": self.ranks, "compressor": self.compressor}


def read_header(content: Any, source: str) -> Optional[Save]:
    """Return the save that a file says it belongs to; ``None`` if it says nothing.

    Raises:
        CheckpointError: if what it says makes no sense, or is of a later version.
    """
    if not isinstance(content, dict) or content.get(KEY) is None:
        return None
    header = content[KEY] if isinstance(content[KEY], dict) else {}
    version, name, ranks, compressor = map(header.get, ("version", "save", "ranks", "compressor"))
    is_whole = isinstance(version, int) and isinstance(ranks, int) and ranks > 0 and isinstance(compressor, str)
    # The name becomes part of a path.
    if not (is_whole and isinstance(name, str) and re.fullmatch("[0-9a-f]{32}", name)):
        raise CheckpointError(f"{source} holds {KEY!r}, but not as this package writes it. {CURE}")
    if version > _VERSION:
        raise CheckpointError(
            f"{source} was written by a later version of lightning-sparse (format {version}, this one reads up to"
            f" {_VERSION}): upgrade the package. {CURE}"
        )
    return Save(name, ranks, compressor)


def read_shard(checkpoint_io: CheckpointIO, path: str, save: Save) -> dict[str, Any]:
    """Read one rank's part, without ever running what a pickle asks for.

    Raises:
        CheckpointError: if it is missing, damaged, not ours, or of another save.
    """
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


def mean_of_shards(read: Callable[[int], dict[str, Any]], rank: int, ranks: int) -> dict[str, Any]:
    """Read all ranks' parts, one at a time, and return what a rank of another number of ranks goes on with.

    What is kept of each parameter becomes the mean over ranks: what the model is still owed stays as it was. What a
    compressor has learned is passed on as it is, from rank to rank in turn.

    Args:
        read: returns the part of a rank.
        rank: that goes on.
        ranks: how many parts there are.
    """
    total: Any = None
    compressor_state = None
    for source in range(ranks):
        part = read(source)
        state = part["engine"].pop("compressor", None)
        compressor_state = state if source == rank % ranks else compressor_state
        total = _added(total, part)
    mean: dict[str, Any] = _mapped(total, lambda tensor: tensor.div_(ranks) if tensor.is_floating_point() else tensor)
    mean["engine"]["compressor"] = compressor_state
    return mean


def _added(total: Any, part: Any) -> Any:
    """Add floating-point tensors, in float64, wherever they are in nested containers; the rest is the first one's."""
    if isinstance(part, dict):
        total = {} if total is None else total
        return {**total, **{key: _added(total.get(key), value) for key, value in part.items()}}
    if isinstance(part, list):
        return [_added(None if total is None else total[place], value) for place, value in enumerate(part)]
    if isinstance(part, Tensor) and part.is_floating_point():
        return part.double() if total is None else total.add_(part)
    return part if total is None else total


def _mapped(state: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to the tensors of nested containers."""
    if isinstance(state, dict):
        return {key: _mapped(value, function) for key, value in state.items()}
    if isinstance(state, list):
        return [_mapped(value, function) for value in state]
    return function(state) if isinstance(state, Tensor) else state


def read_state(checkpoint_io: CheckpointIO, path: PathLike, save: Save, rank: int, ranks: int) -> dict[str, Any]:
    """Read what a rank goes on with: its own part, or the mean of all where the number of ranks has changed.

    Raises:
        AbsentError: if nothing lies beside the checkpoint.
        CheckpointError: if a part is missing, damaged, not ours, or of another save.
    """
    places = [place for place in dict.fromkeys((followed(path), str(path))) if save.name in saves_beside(place)]
    place = (places or [str(path)])[0]

    def read(source: int) -> dict[str, Any]:
        return read_shard(checkpoint_io, shard_path(place, save.name, source), save)

    try:
        return read(rank) if save.ranks == ranks else mean_of_shards(read, rank, save.ranks)
    except CheckpointError as error:
        if isinstance(error.__cause__, FileNotFoundError) and not saves_beside(place):
            raise AbsentError(str(error)) from error
        raise


def on_host(state: dict[str, Any]) -> dict[str, Any]:
    """Return nested containers with their tensors on the CPU; those that are there already are not copied."""
    moved: dict[str, Any] = _mapped(state, lambda tensor: tensor.detach().cpu())
    return moved
