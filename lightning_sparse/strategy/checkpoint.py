"""Checkpoints: Lightning's file, and beside the file a folder with the compression states of all ranks.

Each rank writes a file into the folder, because the states of all ranks do not fit on one rank. A save first writes a
new folder, then Lightning's file with the folder's name. Finally the save removes the old folder. After a crash, either
the old or the new checkpoint loads.
"""

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Optional, Union
from uuid import uuid4

from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sparse.engine.collectives import all_gather_object
from lightning_sparse.loop.state import VERSION, act_together, check_version, exists, save_state
from lightning_sparse.loop.training import Log, Training, load_folder
from lightning_sparse.strategy.lightning import AsyncCheckpointIO

PathLike = Union[str, Path]
KEY = "lightning_sparse"


class Checkpointer:
    """Write, read and remove the folders of a strategy's checkpoints."""

    def __init__(self, strategy: Any, resumes: bool, log: Log) -> None:
        # Path and entry ``KEY`` of the checkpoint that was read. The entry is None if restore() must not load states.
        self.loaded: Optional[tuple[str, Optional[Mapping[str, Any]]]] = None
        self._strategy, self._resumes, self._log = strategy, resumes, log
        self._removed: list[str] = []  # folders of removed files; at the next save, all nodes remove these folders
        self._outdated: set[str] = set()  # folders to remove when an asynchronous write has finished

    def save(
        self,
        states: Mapping[str, dict[str, Any]],
        checkpoint: dict[str, Any],
        filepath: PathLike,
        write_file: Callable[[dict[str, Any], PathLike], None],
    ) -> None:
        """Write the states of all ranks, then Lightning's file, and remove outdated folders. All ranks must call this.

        Args:
            states: this rank's state by model name; if empty, only Lightning's file is written.
            checkpoint: contents of Lightning's file.
            filepath: path of Lightning's file; all ranks use the path of rank 0.
            write_file: writes Lightning's file from ``checkpoint`` and ``filepath``.
        """
        if not states:
            write_file(checkpoint, filepath)
            self.remove(filepath)
            return
        # As with DDP, all ranks use rank 0's path, because a user's path may contain a rank number or the time.
        save, filepath, removed = self._strategy.broadcast((uuid4().hex, filepath, self._removed))
        self._removed, folder = [], _folder_of(filepath)
        is_async = isinstance(self._strategy.checkpoint_io, AsyncCheckpointIO)
        if is_async:  # the previous asynchronous write has to finish first
            act_together(self._strategy.checkpoint_io.teardown, "the last checkpoint was not written")
        header = {"version": VERSION, "save": save, "models": list(states)}
        for number, state in enumerate(states.values()):
            save_state(state, f"{folder}/{save}/{number}")
        act_together(partial(write_file, {**checkpoint, KEY: header}, filepath), f"{filepath} was not written")
        if self._strategy.local_rank == 0:
            earlier = {f"{folder}/{each}" for each in _saves_in(folder) if each != save}
            # Until an asynchronous write has finished, the file names an earlier folder.
            outdated, self._outdated = (self._outdated, earlier) if is_async else (earlier, set())
            for each in {*removed, *outdated} - {folder}:
                _remove(each)

    def remove(self, filepath: PathLike) -> None:
        """On rank 0, remove the folder of a removed file. All other nodes remove their folders at the next save.

        Calls on other ranks do nothing, because ranks with different metrics would remove different checkpoints.
        """
        if self._strategy.is_global_zero:
            self._removed.append(_folder_of(filepath))
            _remove(_folder_of(filepath))

    def note(self, checkpoint: Mapping[str, Any], filepath: PathLike) -> None:
        """Record a checkpoint that Lightning has read, for :meth:`restore`."""
        path = os.path.realpath(filepath) if os.path.islink(filepath) else str(filepath)
        header = checkpoint.get(KEY)
        self.loaded = path, header if self._resumes else None
        if self._resumes and header is not None:
            check_version(header.get("version") if isinstance(header, dict) else None, path)

    @property
    def has_loaded_save(self) -> bool:
        """Whether the recorded checkpoint has states that :meth:`restore` would load."""
        return self.loaded is not None and self.loaded[1] is not None

    def restore(self, model: str, training: Optional[Training]) -> None:
        """Load the compression state of the model with the name ``model``. All ranks must call this."""
        if self.loaded is None:
            return
        path, header = self.loaded
        if training is None:
            if header is not None:
                self._log(f"the residuals of {path} are not used, because there is nothing to exchange.")
            return
        if header is None or model not in header["models"]:
            reason = "holds no state of a sparse strategy" if self._resumes else "was read without its states"
            self._log(f"{path} {reason}, so residuals start empty.")
            return
        folder = f"{_folder_of(path)}/{header['save']}/{header['models'].index(model)}"
        if not any(all_gather_object(exists(_folder_of(path)))):
            rank_zero_warn(
                f"{type(self._strategy).__name__}: residuals start empty, because there is no {_folder_of(path)}. The"
                " folder belongs to the checkpoint file, and was not copied, moved or renamed with the file. To"
                " continue exactly, put the folder there."
            )
            return
        if unused := load_folder(training, folder, path):
            self._log(f"unused parts of {path}: {'; '.join(unused)}.")


def _folder_of(path: PathLike) -> str:
    folder, name = os.path.split(str(path))
    # Lightning would try to resume from a folder with hpc_ckpt_ in the name.
    return os.path.join(folder, name.replace("hpc_ckpt_", "hpc-ckpt-") + ".sparse")


def _saves_in(folder: str) -> list[str]:
    files, place = url_to_fs(folder)
    with suppress(OSError):
        return [os.path.basename(str(each).rstrip("/")) for each in files.ls(place, detail=False)]
    return []


def _remove(folder: str) -> None:
    try:
        # FileNotFoundError: another rank has removed the folder on a shared disk. Others: fsspec lacks the protocol.
        with suppress(FileNotFoundError, ValueError, ImportError):
            files, place = url_to_fs(folder)
            files.rm(place, recursive=True)
    except OSError as error:  # a warning, because an error on one rank would block all other ranks
        warnings.warn(f"{folder} could not be removed ({error}). Delete the folder by hand.", stacklevel=3)
