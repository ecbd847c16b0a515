"""Files of a checkpoint: where its parts lie, and how each is written so that it is never half there."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional, Union

import torch
from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from typing_extensions import override

from lightning_sparse.strategy.lightning import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO, get_filesystem

PathLike = Union[str, Path]


class CheckpointError(RuntimeError):
    """A checkpoint, or a rank's part of it, cannot be written, read, or used."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write a local file under another name, wait until it is on the disk, and rename it; others go Lightning's way.

    Which leaves half a file after a crash where the temporary folder is on another disk, and holds it twice in memory.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: PathLike, storage_options: Optional[Any] = None
    ) -> None:
        target = _local(path)
        if storage_options is not None or target is None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        folder = os.path.dirname(target)
        os.makedirs(folder, exist_ok=True)
        partial = beside(target, ".partial")
        try:
            torch.save(checkpoint, partial)
            _wait_for_disk(partial)
            os.replace(partial, target)
        except BaseException:
            with suppress(FileNotFoundError):
                os.remove(partial)
            raise
        _wait_for_disk(folder)

    @override
    def remove_checkpoint(self, path: PathLike) -> None:
        with suppress(FileNotFoundError):  # on a shared file system another node may have been faster
            super().remove_checkpoint(path)


def beside(path: PathLike, suffix: str) -> str:
    """Return the path, beside a checkpoint file, of what is there before it.

    Lightning takes whatever has ``hpc_ckpt_`` in its name for a checkpoint to resume from.
    """
    folder, name = os.path.split(str(path))
    return os.path.join(folder, name.replace("hpc_ckpt_", "hpc-ckpt-") + suffix)


def state_folder(path: PathLike) -> str:
    """Return the folder that holds what the ranks kept when a checkpoint file was written."""
    return beside(path, ".sparse")


def shard_path(path: PathLike, save: str, rank: int) -> str:
    """Return where a rank writes its part of a save, whose name torch's cache of downloads needs in the file's."""
    return os.path.join(state_folder(path), save, f"rank_{rank:05d}.{save}.pt")


def saves_beside(path: PathLike) -> list[str]:
    """Return the names of the saves whose parts lie beside a checkpoint file; empty where they cannot be listed."""
    with suppress(OSError, ValueError, ImportError):  # the last two: an unknown protocol
        files = get_filesystem(path)
        return [os.path.basename(str(name).rstrip("/")) for name in files.ls(state_folder(path), detail=False)]
    return []


def followed(path: PathLike) -> str:
    """Return what a link to a checkpoint file leads to; the path itself where it is none."""
    local = _local(path)
    return os.path.realpath(local) if local is not None and os.path.islink(local) else str(path)


def synchronous(checkpoint_io: CheckpointIO) -> CheckpointIO:
    """Return what an asynchronous plugin writes with: the parts of all ranks have to be there before the file is."""
    while isinstance(checkpoint_io, AsyncCheckpointIO):
        assert checkpoint_io.checkpoint_io is not None
        checkpoint_io = checkpoint_io.checkpoint_io
    return checkpoint_io


def _local(path: PathLike) -> Optional[str]:
    """Return where a path lies in the local file system; ``None`` if it lies elsewhere."""
    with suppress(ValueError, ImportError):  # a protocol that only the user's own plugin knows
        filesystem, stripped = url_to_fs(str(path))
        if isinstance(filesystem, LocalFileSystem):
            return str(stripped)
    return None


def _wait_for_disk(path: str) -> None:
    descriptor = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
