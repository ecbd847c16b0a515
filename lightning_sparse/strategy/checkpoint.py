"""Checkpoints: Lightning's file, and the folder that it names, with the states of all ranks.

States of all ranks are as large as the model times their number, and are never gathered. The folder of a new save is
complete before Lightning's file names it; only then is the folder of the old file removed. After a crash the old
checkpoint or the new one loads.
"""

import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Optional, Union
from uuid import uuid4

from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_sparse.engine import Engine
from lightning_sparse.engine.collectives import all_gather_object
from lightning_sparse.loop.state import (
    HINT,
    VERSION,
    CheckpointError,
    act_together,
    check_version,
    exists,
    load_state,
    save_state,
)
from lightning_sparse.strategy.lightning import AsyncCheckpointIO, FabricDDPStrategy, ParallelStrategy

PathLike = Union[str, Path]
KEY = "lightning_sparse"
_UNKNOWN = (ValueError, ImportError)  # from a protocol that only the user's own plugin can read


class Checkpointer:
    """The folders of a strategy's checkpoints."""

    def __init__(self, strategy: Union[ParallelStrategy, FabricDDPStrategy], resumes: bool) -> None:
        # The checkpoint that was read, until it is restored from: its path, and the save that it names, if wanted.
        self.loaded: Optional[tuple[str, Optional[Mapping[str, Any]]]] = None
        self._strategy = strategy
        self._resumes = resumes
        self._written: dict[str, str] = {}  # the save that each file names
        self._removed: list[str] = []  # files that rank 0 has removed, and other nodes not yet

    def save(
        self,
        states: Mapping[str, dict[str, Any]],
        checkpoint: dict[str, Any],
        filepath: PathLike,
        write_file: Callable[[dict[str, Any], PathLike], None],
    ) -> None:
        """Write the states of all ranks, then Lightning's file, and remove the folders that no file names any more."""
        if not states:
            write_file(checkpoint, filepath)
            self.remove(filepath)
            return
        # Rank 0's path counts, as with DDP: users may have put a process's number, or the time, into it.
        save, filepath, removed = self._strategy.broadcast((uuid4().hex, filepath, self._removed))
        self._removed, path, is_first = [], str(filepath), self._strategy.local_rank == 0
        for each in set(removed) - {path} if is_first else ():
            _remove(_folder_of(each))
        is_async = isinstance(self._strategy.checkpoint_io, AsyncCheckpointIO)
        if is_async:  # the file before has to be there
            act_together(self._strategy.checkpoint_io.teardown, "the last checkpoint was not written")
        header = {"version": VERSION, "save": save, "models": list(states)}
        try:
            for number, state in enumerate(states.values()):
                save_state(state, f"{_folder_of(path)}/{save}/{number}")
            act_together(partial(write_file, {**checkpoint, KEY: header}, filepath), f"{path} was not written")
        except Exception:
            if is_first and not is_async:  # which may still be writing the file
                _remove(f"{_folder_of(path)}/{save}")
            raise
        last = self._written.get(path)
        self._written[path] = save
        if is_first and (last or not is_async):
            for each in set(_saves_of(path)) - {save, last if is_async else save}:
                _remove(f"{_folder_of(path)}/{each}")

    def remove(self, filepath: PathLike) -> None:
        """Remove the folder of a file that rank 0 has removed; on other nodes at their next save.

        By a metric of its own another rank would take another checkpoint for the worst.
        """
        if self._strategy.is_global_zero:
            self._written.pop(str(filepath), None)
            self._removed.append(str(filepath))
            _remove(_folder_of(filepath))

    def note(self, checkpoint: Mapping[str, Any], filepath: PathLike, goes_back: bool = False) -> None:
        """Record a checkpoint of Lightning's that was read, or one of its own that a training ``goes_back`` to."""
        path, header = _followed(filepath), checkpoint.get(KEY)
        is_wanted = self._resumes or (goes_back and str(filepath) in self._written)
        self.loaded = path, header if is_wanted else None
        if is_wanted and header is not None:
            check_version(header.get("version") if isinstance(header, dict) else None, path)
            if not re.fullmatch("[0-9a-f]{32}", str(header.get("save"))):  # it becomes part of a path
                raise CheckpointError(
                    f"{path} names {header.get('save')!r}, which is not a save of this package. {HINT}"
                )

    @property
    def has_loaded_save(self) -> bool:
        """Whether there is something to restore."""
        return self.loaded is not None and self.loaded[1] is not None

    def restore(self, model: str, engine: Engine, load: Callable[[dict[str, Any]], Sequence[str]]) -> None:
        """Load the state of a model from the checkpoint that was noted; all ranks call, and all raise if one has to.

        ``load`` returns what of it is of no use.
        """
        if self.loaded is None:
            return
        path, header = self.loaded
        if header is None or model not in header["models"]:
            reason = "holds no state of a sparse strategy" if self._resumes else "was read without its states"
            self._log(f"{path} {reason}; residuals start empty.")
            return
        folder = f"{_folder_of(path)}/{header['save']}/{header['models'].index(model)}"
        if not any(all_gather_object(exists(_folder_of(path)))):
            rank_zero_warn(
                f"{type(self._strategy).__name__}: residuals start empty, because there is no {_folder_of(path)}: it"
                " was left behind when the checkpoint was copied, moved or renamed. To continue exactly, put it there,"
                " and rename it like the file."
            )
            return
        state = load_state(folder, engine)
        act_together(lambda: self._load(state, engine, path, load), f"{path} was not loaded")

    def _load(self, state: dict[str, Any], engine: Engine, path: str, load: Callable[..., Sequence[str]]) -> None:
        try:
            unused = load(state)
        except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
            name = type(engine.pipeline.compressor).__name__
            raise CheckpointError(f"{path} does not fit this model and {name}: {error!r}. {HINT}") from error
        if "is_whole" in state:
            header = state["header"]
            group = "in replicas" if header["is_sharded"] else "on nodes"
            sizes = ((header["world_size"], header["local_world_size"]), engine.topology)
            before, now = (f"{ranks} ranks{f' {group} of {size}' if size > 1 else ''}" for ranks, size in sizes)
            self._log(f"{before} saved {path}, {now} continue, each from the mean of the residuals: nothing is lost.")
        if unused:
            self._log(f"not used of {path}: {'; '.join(unused)}.")

    def _log(self, line: str) -> None:
        rank_zero_info(f"{type(self._strategy).__name__}: {line}")

    def close(self) -> None:
        """Drop the record of what was written and read."""
        self._written.clear()
        self.loaded = None


def _folder_of(path: PathLike) -> str:
    """Return the folder of a file's saves. Lightning resumes from any name with ``hpc_ckpt_`` in it."""
    folder, name = os.path.split(str(path))
    return os.path.join(folder, name.replace("hpc_ckpt_", "hpc-ckpt-") + ".sparse")


def _followed(path: PathLike) -> str:
    """Return the target of a link to a file; the path itself if it is none."""
    with suppress(*_UNKNOWN):
        files, place = url_to_fs(str(path))
        if isinstance(files, LocalFileSystem) and os.path.islink(place):
            return str(os.path.realpath(place))
    return str(path)


def _saves_of(path: PathLike) -> list[str]:
    files, place = url_to_fs(_folder_of(path))
    with suppress(OSError):
        return [os.path.basename(str(each).rstrip("/")) for each in files.ls(place, detail=False)]
    return []


def _remove(folder: str) -> None:
    """Remove a folder that is of no use any more. An error here would leave the other ranks waiting."""
    try:
        with suppress(FileNotFoundError, *_UNKNOWN):  # on a shared file system another rank may have been faster
            files, place = url_to_fs(folder)
            files.rm(place, recursive=True)
    except OSError as error:
        warnings.warn(f"{folder} could not be removed ({error}): delete it by hand if it stays", stacklevel=3)
