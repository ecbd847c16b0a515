"""``fit(ckpt_path="last")``: from the newest checkpoint that is whole, which is the same for all ranks."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_sparse.engine.collectives import gather_together
from lightning_sparse.strategy.lightning import SLURMEnvironment, Trainer, get_filesystem

_LAST = "last"
_NEWEST = "newest"  # to Lightning the path of a file, and not "last", for which it would look itself


class CheckpointError(RuntimeError):
    """A checkpoint, or a rank's part of it, cannot be written, read, or used."""


@contextmanager
def taking_newest(trainer: Trainer, arguments: Sequence[Any]) -> Iterator[list[Any]]:
    """Have "last" among the arguments of a fit mean the newest checkpoint that all ranks can read."""
    connector: Any = trainer._checkpoint_connector
    is_last = [isinstance(each, str) and each == _LAST and trainer.state.fn == "fit" for each in arguments]
    if any(is_last):  # only there have ranks found each other, and callbacks their folders
        connector.resume_start = partial(_start_from_newest, trainer, connector.resume_start)
    try:
        yield [_NEWEST if each else argument for each, argument in zip(is_last, arguments)]
    finally:
        vars(connector).pop("resume_start", None)


def _start_from_newest(trainer: Trainer, start: Callable[..., None], parsed: Any = None, **given: Any) -> None:
    """Read the newest checkpoint that every rank can read, and its part of it; pass over others, and say so."""
    connector: Any = trainer._checkpoint_connector
    del connector.resume_start  # a search for a learning rate comes back to a file of its own
    folders = _folders(trainer)
    found: dict[str, float] = {}
    for theirs in gather_together(_files_in(folders)):  # a node may have what another one lacks
        found.update({path: max(time, found.get(path, time)) for path, time in theirs.items()})
    for path in sorted(found, key=lambda each: (found[each], each), reverse=True):
        complaint = ""
        try:
            start(path, **given)
            trainer.strategy.check_whole(connector._loaded_checkpoint)  # type: ignore[attr-defined]
        except Exception as error:  # whatever a damaged file makes torch stumble over
            complaint = f"{type(error).__name__}: {error}"
        complaints = [(rank, each) for rank, each in enumerate(gather_together(complaint)) if each]
        if not complaints:
            return
        lines = "rank {} says {}".format(*complaints[0])
        rank_zero_warn(f"ckpt_path={_LAST!r} passes over {path}, which is not whole: {lines}")
    where = " and ".join(path + pattern for path, pattern in folders) or "no folder, as there is no ModelCheckpoint"
    if found:
        raise CheckpointError(
            f"ckpt_path={_LAST!r}: none of the {len(found)} checkpoints in {where} is whole on all ranks, see the"
            " warnings above. Without a shared file system, copy file and folder to every node. To begin anew, move"
            " them; to go on without what the ranks had kept, name the file: ckpt_path='...'"
        )
    start(None, **given)
    rank_zero_info(
        f"ckpt_path={_LAST!r}: there is no checkpoint in {where}, so that training starts from the beginning. Where a"
        " logger gives each start a folder of its own, ModelCheckpoint(dirpath=...) has one for all."
    )


def _folders(trainer: Trainer) -> list[tuple[str, str]]:
    """Return where checkpoints may lie, each time with the beginning of their names."""
    named = [getattr(each, "dirpath", None) for each in trainer.checkpoint_callbacks]
    places = [(str(path), "") for path in dict.fromkeys(named) if path]
    is_on_slurm = isinstance(getattr(trainer.strategy, "cluster_environment", None), SLURMEnvironment)
    return [*places, (str(trainer.default_root_dir), "hpc_ckpt_")] if is_on_slurm else places


def _files_in(folders: list[tuple[str, str]]) -> dict[str, float]:
    """Return the checkpoint files in folders, and when each was written."""
    found = {}
    for folder, beginning in folders:
        files = get_filesystem(folder)
        for each in files.ls(folder, detail=False) if files.isdir(folder) else ():
            name = os.path.basename(str(each))
            if name.startswith(beginning) and name.endswith(".ckpt"):
                path = os.path.join(folder, name)
                found[path] = files.modified(path).timestamp()
    return found
