"""Compression state between two steps: a folder with one file per rank, in the same format for every entry point.

If the numbers of ranks, nodes and replicas are unchanged, each rank resumes bitwise identically from the rank's file.
Otherwise each floating-point tensor is the mean over saved ranks, nodes or replicas. A rank reads all other entries
from one file. With two levels, or with shards, each file holds only a part of every residual.
"""

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
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_sparse.engine import Engine
from lightning_sparse.engine.collectives import all_gather_object, timeout_of_job, translate_backend_errors
from lightning_sparse.engine.memory.residual import NUMBERS, RATES, waiting_kinds, widened
from lightning_sparse.engine.step.topology import ShardedModel
from lightning_sparse.functional.elements import as_dtensor, local_tensor, local_tensors

VERSION = 8  # format version of states and checkpoints
HINT = (
    "To continue without the state, set resume_compression=False (Trainer, Fabric, Hugging Face), or do not call"
    " load_state. Weights and optimizers load as usual."
)
_AT_ONCE = 1 << 20  # elements per all-reduce (8 MiB in float64)
Place = tuple[Any, ...]  # keys and indices that lead to a tensor in nested dictionaries and lists
Result = TypeVar("Result")


class CheckpointError(RuntimeError):
    """A checkpoint file, or the file with a rank's compression state, cannot be written, read or used."""


def collect_state(engine: Engine, together: bool = False) -> dict[str, Any]:
    """Return the engine's state as tensors and numbers, without copies. If ``together``, all ranks must call this."""
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
    number, state = act_together(partial(_read_own, folder, dist.get_rank()), f"{folder} was not read")
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
    table = _Table(folder, number, state, engine)
    act_together(table.read, f"{folder} was not read")
    return engine.worker.run(table.mean)


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


def _read_own(folder: str, rank: int) -> tuple[int, dict[str, Any]]:
    # More ranks may resume than have saved. A rank without a file reads rank 0's file.
    if exists(_path_of(folder, rank)):
        return rank, _read(_path_of(folder, rank))
    state = _read(_path_of(folder, 0))
    return (rank, _read(_path_of(folder, rank))) if rank < state["header"]["world_size"] else (0, state)


class _Table:
    """Mean of saved states, for a training with another number of ranks than the saved training.

    Each saved rank, node or replica is a row, with one file per part of the residuals. Ranks that hold the same part
    each read some of the rows, and all-reduce the sums. ``state`` is the content of file ``number``.
    """

    def __init__(self, folder: str, number: int, state: dict[str, Any], engine: Engine) -> None:
        self._folder, self._engine, self._replicas = folder, engine, engine.pipeline.levels.same_shard
        self._number, self._state, header = number, state, state["header"]
        self._parameters = dict(engine.module.named_parameters())
        self._is_sharded, self._parts = header["is_sharded"], header["local_world_size"]
        self._rows = header["world_size"] // self._parts
        self._sums: dict[Place, Tensor] = {}
        self._forms: dict[Place, tuple[torch.Size, torch.dtype]] = {}

    def read(self) -> None:
        """Read some files, and sum the tensors. Ranks with the same part of the residuals read different files."""
        parts = [dist.get_rank() % self._parts] if self._is_sharded else range(self._parts)
        first = self._file(self._replicas.rank % self._rows, parts[0])
        for row in range(self._replicas.rank, self._rows, self._replicas.world_size):
            for part in parts:
                for place, tensor in _floats(self._file(row, part)):
                    self._add(place, tensor, part)
        self._state = first

    def _file(self, row: int, part: int) -> dict[str, Any]:
        number = row * self._parts + part
        return self._state if number == self._number else _read(_path_of(self._folder, number))

    def _add(self, place: Place, tensor: Tensor, part: int) -> None:
        if place[0] == "memory" and place[1] not in NUMBERS:
            if place[2] not in self._parameters:
                return
            if not self._is_sharded and self._parts > 1:  # with two levels, a file has a slice of each residual
                whole = torch.zeros(self._parameters[place[2]].numel(), dtype=tensor.dtype)
                begin = -(-whole.numel() // self._parts) * part
                room = whole[begin : begin + tensor.numel()]
                room.copy_(tensor[: room.numel()])  # the last slices end in padding
                tensor = whole
        self._forms[place] = tensor.shape, tensor.dtype
        if _is_number(place):
            tensor = functional.pad(tensor.reshape(-1), (0, 1), value=1.0)  # the sum of these 1s counts the files
        self._sums[place] = self._sums[place].double().add_(tensor) if place in self._sums else tensor

    def mean(self) -> dict[str, Any]:
        """Return the mean state. With two levels, a residual covers the whole parameter, not only this rank's part."""
        forms: dict[Place, tuple[torch.Size, torch.dtype]] = {}
        for others in all_gather_object(self._forms, self._replicas.group):
            if any(forms.setdefault(place, form) != form for place, form in others.items()):
                raise CheckpointError(f"the files in {self._folder} hold tensors of different shapes. {HINT}")
        for place, (shape, dtype) in sorted(forms.items(), key=str):
            total = self._sums.pop(place, torch.zeros(shape.numel() + _is_number(place))).double().reshape(-1)
            for piece in total.split(_AT_ONCE) if len(total) else ():
                piece.copy_(self._replicas.all_reduce(piece.to(self._replicas.device, copy=True)))
            _put(self._state, place, self._mean_of(place, total).to(dtype).view(shape))
        return {**self._state, "is_whole": True}

    def _mean_of(self, place: Place, total: Tensor) -> Tensor:
        if not _is_number(place):
            is_in_parts = place[0] == "memory" or self._is_sharded
            return total.div_(self._rows if is_in_parts else self._rows * self._parts)
        return total[:-1].div_(total[-1])


def _is_number(place: Place) -> bool:
    return place[0] == "memory" and place[1] in NUMBERS


def _floats(part: Any, *place: Any) -> Iterator[tuple[Place, Tensor]]:
    """Yield all floating-point tensors in nested dictionaries and lists, each with the keys that lead to the tensor."""
    if isinstance(part, (dict, list)):
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            yield from _floats(value, *place, key)
    elif isinstance(part, Tensor) and part.is_floating_point():
        yield place, part


def _put(part: Any, place: Place, tensor: Tensor) -> None:
    *containers, last = place
    for key in containers:
        part = part.setdefault(key, {}) if isinstance(part, dict) else part[key]
    part[last] = tensor


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
    parameters, layouts, is_whole = local_tensors(engine.module), _layouts_of(engine.module), "is_whole" in state
    matched: dict[str, dict[str, Tensor]] = {kind: {} for kind in state["memory"]}
    gone = set()
    for kind, name, tensor in ((kind, *item) for kind, each in state["memory"].items() for item in each.items()):
        if name not in parameters:
            gone.add(name)
            continue
        parameter = parameters[name]
        numel = parameter.numel() if is_whole else engine.pipeline.levels.share_numel(parameter.numel())
        if tensor.numel() != NUMBERS.get(kind, numel):
            raise ValueError(
                f"the state has a {kind} of {tensor.numel()} elements for the parameter {name!r}, which has"
                f" {parameter.numel()}: resume with a model of the same shapes"
            )
        if kind not in NUMBERS:
            if (before := state["layouts"][name]) != (now := layouts[name]):
                raise ValueError(
                    f"the parameter {name!r} was saved with the shape and strides {before}, and now has {now}: resume"
                    " with the same memory_format"
                )
            tensor = engine.pipeline.levels.local_share(tensor) if is_whole else tensor
        matched[kind][name] = tensor.to(parameter.device, widened(parameter.dtype))
    if not engine.pipeline.compressor.feedback.rescale_on_lr_change:
        matched.pop(RATES, None)
    return matched, sorted(gone)


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
