"""Compression state between two steps: a folder with one file per rank, in the same format for every entry point.

If the numbers of ranks, nodes and replicas are unchanged, each rank resumes bitwise identically from the rank's file.
Otherwise each floating-point tensor is the mean over saved ranks, nodes or replicas. All other entries are from one
file. With two levels, or with shards, each file holds only a part of every residual.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten_with_path, tree_map_only, tree_map_with_path

from lightning_sparse.engine import Engine
from lightning_sparse.engine.collectives import all_gather_object, timeout_of_job, translate_backend_errors
from lightning_sparse.engine.memory import NUMBERS, RATES, waiting_kinds, widened
from lightning_sparse.engine.step.topology import ShardedModel
from lightning_sparse.functional.elements import as_dtensor, local_tensor, local_tensors

VERSION = 9  # format version of states and checkpoints
HINT = (
    "To continue without the state, set resume_compression=False (Trainer, Fabric, Hugging Face), or do not call"
    " load_state. Weights and optimizers load as usual."
)
Place = tuple[Any, ...]  # keys of pytree that lead to a tensor
Result = TypeVar("Result")


class CheckpointError(RuntimeError):
    """A checkpoint file, or the file with a rank's compression state, cannot be written, read or used."""


def collect_state(engine: Engine, together: bool = False) -> dict[str, Any]:
    """Return the engine's state, without copies. With ``together`` ranks communicate, so all ranks must call this."""
    return {"header": _header_of(engine), "layouts": _layouts_of(engine.module), **engine.state_dict(together)}


def _header_of(engine: Engine) -> dict[str, Any]:
    levels, name = engine.pipeline.levels, type(engine.pipeline.compressor).__name__
    sizes = {"world_size": levels.world.world_size, "local_world_size": levels.local_world_size}
    return {"version": VERSION, "compressor": name, **sizes, "is_sharded": isinstance(engine.wrapper, ShardedModel)}


def save_state(state: Mapping[str, Any], folder: str) -> None:
    """Write this rank's state into a folder. All ranks must call. If one rank fails, all ranks raise an error."""
    save = all_gather_object(uuid4().hex)[0]
    content = {**state, "header": {**state["header"], "save": save}}
    act_together(partial(_write, content, _path_of(folder, dist.get_rank())), f"{folder} was not written")


def load_state(folder: str, engine: Engine) -> dict[str, Any]:
    """Read the state from which this rank continues. All ranks must call. If one rank fails, all ranks raise an error.

    Raises:
        CheckpointError: if a file is missing, damaged, of another format, or from another save than other files, or if
            the model was saved in another number of shards.
    """
    state = act_together(partial(_read_own, folder, dist.get_rank()), f"{folder} was not read")
    before, now = state["header"], _header_of(engine)
    if len(set(all_gather_object(before["save"]))) > 1:
        raise CheckpointError(f"the files in {folder} are of several saves: copy all files of one save. {HINT}")
    saved, present = (each["local_world_size"] if each["is_sharded"] else 1 for each in (before, now))
    if saved != present:
        raise CheckpointError(
            f"{folder} was saved with a model in {saved} shards, and this training has {present}: resume with"
            f" the same strategy and data_parallel_size. {HINT}"
        )
    if all(before[key] == now[key] for key in ("world_size", "local_world_size")):
        return state
    return _mean_state(folder, before, engine)


def act_together(action: Callable[[], Result], outcome: str) -> Result:
    """Run an action on every rank. If any rank fails, all ranks raise ``CheckpointError``. All ranks must call."""
    error: Any = None
    try:
        result = action()
    except Exception as raised:
        error = raised
    with translate_backend_errors(f"errors ({outcome})", "all_gather", timeout_of_job(torch.device("cpu"))):
        failures = all_gather_object(error and f"{type(error).__name__}: {error}")
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise CheckpointError(f"{outcome}: rank {rank} has failed with {failure}") from error
    return result


def exists(path: str) -> bool:
    """Return whether a file or folder exists."""
    files, place = url_to_fs(path)
    return bool(files.exists(place))


def _path_of(folder: str, rank: int) -> str:
    return f"{folder}/rank_{rank:05d}.pt"


def _write(content: Any, path: str) -> None:
    files, place = url_to_fs(path)
    files.makedirs(os.path.dirname(place), exist_ok=True)
    with files.open(place, "wb") as file:
        torch.save(content, file)
        file.flush()
        if isinstance(files, LocalFileSystem):  # writes to the disk now, so that a crash loses no checkpoint
            os.fsync(file.fileno())


def _read(path: str) -> dict[str, Any]:
    files, place = url_to_fs(path)
    try:
        with files.open(place, "rb") as file:
            state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        version = state["header"]["version"]
        names = {"save", "compressor", "world_size", "local_world_size", "is_sharded"}
        is_ours = version != VERSION or (names <= state["header"].keys() and isinstance(state["memory"], dict))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing: each rank writes one file, perhaps on the disk of the rank's node. Resume with the"
            f" same ranks on the same nodes, or copy all files to every node. {HINT}"
        ) from error
    except Exception as error:  # torch raises many kinds of errors for a damaged file
        raise CheckpointError(
            f"{path} cannot be read: the file is damaged, or from another program. Copy the file again, or resume from"
            f" another checkpoint. {HINT} The error of torch: {error}"
        ) from error
    check_version(version if is_ours else None, path)
    return state


def check_version(version: Any, source: str) -> None:
    """Raise an error if a state has another format version."""
    if version != VERSION:
        raise CheckpointError(
            f"{source} was written by another version of lightning-sparse (format {version}, this version reads"
            f" {VERSION}): resume with the other version. {HINT}"
        )


def _read_own(folder: str, rank: int) -> dict[str, Any]:
    if exists(own := _path_of(folder, rank)):
        return _read(own)
    # More ranks may resume than have saved. A rank without a file reads rank 0's file.
    first = _read(_path_of(folder, 0))
    return _read(own) if rank < first["header"]["world_size"] else first


def _mean_state(folder: str, header: Mapping[str, Any], engine: Engine) -> dict[str, Any]:
    """Return the mean of saved states. Ranks with the same part of the model sum different files, and add up the sums.

    A sum has a row for each slice of a residual: with two levels, each rank of a node has saved a slice.
    """
    levels, numbers, slices = engine.pipeline.levels, range(header["world_size"]), header["local_world_size"]
    if header["is_sharded"]:
        numbers, slices = numbers[dist.get_rank() % slices :: slices], 1
    own = numbers[levels.same_shard.rank :: levels.same_shard.world_size]
    state, sums = act_together(partial(_read_sums, folder, numbers[0], own, slices), f"{folder} was not read")

    def mean_of(place: Place, tensor: Any) -> Any:
        if place not in sums:
            return tensor
        total = levels.same_shard.all_reduce(sums.pop(place).to(levels.same_shard.device)).cpu()
        mean = total.div_(len(numbers) / len(total)).flatten().to(tensor.dtype)
        if not _is_residual(place):
            return mean.view(tensor.shape)
        shape, _ = state["layouts"][place[2].key]
        return levels.local_share(mean[: math.prod(shape)])

    return {**engine.worker.run(lambda: tree_map_with_path(mean_of, state)), "is_mean": True}


def _read_sums(folder: str, first: int, own: Sequence[int], slices: int) -> tuple[dict[str, Any], dict[Place, Tensor]]:
    """Return the content of the file ``first``, and the sums of the floating-point tensors of the files ``own``."""
    state = _read(_path_of(folder, first))
    sums = {
        place: torch.zeros(slices if _is_residual(place) else 1, each.numel(), dtype=torch.float64)
        for place, each in _floats(state)
    }
    for number in own:
        for place, each in _floats(state if number == first else _read(_path_of(folder, number))):
            if place in sums:
                sums[place][number % len(sums[place])] += each.flatten()
    return state, sums


def _floats(state: Mapping[str, Any]) -> Iterator[tuple[Place, Tensor]]:
    for place, each in tree_flatten_with_path(state)[0]:
        if isinstance(each, Tensor) and each.is_floating_point():
            yield place, each


def _is_residual(place: Place) -> bool:
    return place[0].key == "memory" and place[1].key not in NUMBERS


def match_state(state: Mapping[str, Any], engine: Engine) -> tuple[dict[str, Any], list[str]]:
    """Return the entries of a state that an engine can use, and descriptions of the unused entries.

    Raises:
        ValueError: if the shape of a parameter has changed.
    """
    name, before = type(engine.pipeline.compressor).__name__, state["header"]["compressor"]
    usable = {part: state[part] for part in ("averager", "warm_up") if part in state}
    unused: list[str] = []
    kinds, present = waiting_kinds(state["memory"]), waiting_kinds(engine.memory.state_dict())
    has_rounds, makes_rounds = "rounds" in state, engine.rounds is not None
    if has_rounds and not makes_rounds:
        unused.append("the changes of the last round, because gradients are exchanged now")
    elif kinds and (kinds != present or has_rounds != makes_rounds):
        unused.append(f"{' and '.join(sorted(kinds))}, because this training stores other tensors")
    elif kinds:
        usable["memory"], gone = _matched_memory(state, engine)
        unused += [f"the state of {', '.join(gone)}, which the model does not have"] * bool(gone)
    if name == before:
        usable["compressor"] = state["compressor"]
    elif state["compressor"]:
        unused.append(f"the state of {before}, because {name} continues")
    if has_rounds and makes_rounds:
        parameters = local_tensors(engine.module)
        momentum = {name: each for name, each in state["rounds"]["momentum"].items() if name in parameters}
        usable["rounds"] = {**state["rounds"], "momentum": momentum}
    return usable, unused


def _matched_memory(state: Mapping[str, Any], engine: Engine) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """Convert saved residuals to the parameters' dtype and device. Also return names that the model lacks."""
    parameters, layouts = local_tensors(engine.module), _layouts_of(engine.module)
    names = set().union(*state["memory"].values())
    for name in names & parameters.keys():
        if (before := state["layouts"][name]) != (now := layouts[name]):
            raise ValueError(
                f"the parameter {name!r} was saved with the shape and strides {before}, and now has {now}: resume"
                " with a model of the same shapes and the same memory_format"
            )
    matched = {
        kind: {
            name: each.to(parameters[name].device, widened(parameters[name].dtype))
            for name, each in tensors.items()
            if name in parameters
        }
        for kind, tensors in state["memory"].items()
    }
    if not engine.pipeline.compressor.feedback.rescale_on_lr_change:
        matched.pop(RATES, None)
    return matched, sorted(names - parameters.keys())


def _layouts_of(module: nn.Module) -> dict[str, list[list[int]]]:
    """Return shape and strides of the residual for this rank's part of each parameter, by name.

    A residual has the layout of DDP's gradient: the parameter's layout if dense and non-overlapping, else row-major.
    """
    layouts = {}
    for name, held in local_tensors(module).items():
        fills = torch.ops.aten.is_non_overlapping_and_dense(held)
        strides = held.stride() if fills else torch.empty(held.shape, device="meta").stride()
        alike = [stride if size > 1 else 1 for size, stride in zip(held.shape, strides)]
        layouts[name] = [list(held.shape), alike]
    return layouts


def states_of(optimizers: Sequence[Optimizer]) -> list[Any]:
    """Return this rank's optimizer states, with parameter groups, because optimizers such as Prodigy change groups."""
    return [tree_map_only(Tensor, local_tensor, each.state_dict()) for each in optimizers]


def load_states(optimizers: Sequence[Optimizer], states: Sequence[Any]) -> None:
    """Load the optimizer states that :func:`states_of` returned."""
    for optimizer, state in zip(optimizers, states):
        present = optimizer.state_dict()["state"]
        own = {
            key: {name: as_dtensor(each, present.get(key, {}).get(name)) for name, each in one.items()}
            for key, one in state["state"].items()
        }
        optimizer.load_state_dict({**state, "state": own})
