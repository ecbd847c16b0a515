"""Write what each rank keeps beside Lightning's checkpoint, read it again, and delete both together."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Optional, Union
from uuid import uuid4

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.distributed.distributed_c10d import ProcessGroup

from lightning_sparse.engine.step.levels import Topology
from lightning_sparse.strategy.checkpoints.files import (
    CheckpointError,
    PathLike,
    saves_beside,
    shard_path,
    state_folder,
    synchronous,
)
from lightning_sparse.strategy.checkpoints.shards import (
    CURE,
    KEY,
    AbsentError,
    PartialSum,
    SaveHeader,
    mean_of_sums,
    read_header,
    read_state,
)
from lightning_sparse.strategy.lightning import AsyncCheckpointIO, FabricDDPStrategy, ParallelStrategy


class Checkpointer:
    """The ranks' parts of checkpoints."""

    def __init__(self, strategy: Union[ParallelStrategy, FabricDDPStrategy], resumes: bool) -> None:
        # The checkpoint that was read, until it is restored from: Lightning's file, and its save, if one is wanted.
        self.loaded: Optional[tuple[str, Optional[SaveHeader]]] = None
        self.node_ranks = 1  # that share what is kept; 1 where each keeps all
        self.same_shards: Optional[ProcessGroup] = None  # ranks that hold the same shards, where the model has some
        self._strategy = strategy
        self._resumes = resumes
        self._written: dict[str, str] = {}
        self._removed: list[str] = []  # files of which rank 0 has removed its part, and others have not heard

    def save(
        self,
        kept: Mapping[str, dict[str, Any]],
        compressor: str,
        checkpoint: dict[str, Any],
        filepath: PathLike,
        storage_options: Optional[Any],
        write_file: Callable[..., None],
    ) -> None:
        """Write what all ranks kept of each model, then Lightning's file, then delete what was there before."""
        if not kept:
            write_file(checkpoint, filepath, storage_options)
            self._written[str(filepath)] = ""
            if self._strategy.is_global_zero and not self._is_asynchronous and saves_beside(filepath):
                self._remove(state_folder(filepath))
            return
        if self._is_asynchronous:
            # Waits until the last file is written, which rank 0 alone may have failed in; the next starts it again.
            late = "the last checkpoint is not there: another rank could not write it"
            self.together(self._strategy.checkpoint_io.teardown, late)
        # Rank 0's path counts, as with DDP: users may well have put a process's number, or the time, into it.
        name, filepath = self._strategy.broadcast((uuid4().hex, filepath))
        self._follow_removals(but=str(filepath))  # whose old save is removed below
        ranks, node_ranks = self._topology
        save = SaveHeader(name, ranks, compressor, node_ranks, self.same_shards is not None)
        header = {KEY: save.as_header()}
        path = shard_path(filepath, name, self._strategy.global_rank)
        write_shard = synchronous(self._strategy.checkpoint_io).save_checkpoint
        complaint = f"{filepath} stays as it was: another rank could not write its part"
        try:
            self.together(partial(write_shard, {**header, "models": kept}, path, storage_options), complaint)
            if self._is_asynchronous and (last := self._written.get(str(filepath))) is not None:
                self._remove_saves(filepath, set(saves_beside(filepath)) - {last, save.name})
            self.together(partial(write_file, {**checkpoint, **header}, filepath, storage_options), complaint)
        except Exception:
            if not self._is_asynchronous:  # such a plugin may still be writing the file that names this save
                self._remove_saves(filepath, {save.name})
            raise
        self._written[str(filepath)] = save.name
        if not self._is_asynchronous:  # or what the old file names is removed at the next save, when it is replaced
            self._remove_saves(filepath, set(saves_beside(filepath)) - {save.name})

    @property
    def _topology(self) -> Topology:
        return Topology(self._strategy.world_size, self.node_ranks)

    @property
    def _is_asynchronous(self) -> bool:
        return isinstance(self._strategy.checkpoint_io, AsyncCheckpointIO)

    def remove(self, filepath: PathLike) -> None:
        """Delete the ranks' parts of a checkpoint whose file rank 0 has deleted.

        By what a rank has measured alone, it would take another checkpoint for the worst. So others follow rank 0 at
        their next save; of the last one deleted, nodes without a file system in common keep their parts.
        """
        if self._strategy.is_global_zero:
            self._removed.append(str(filepath))
            self._remove_parts(str(filepath))

    def _follow_removals(self, but: str = "") -> None:
        """Delete what rank 0 has deleted the parts of, ``but`` those of one file; all ranks call."""
        removed, self._removed = self._strategy.broadcast(self._removed), []
        for path in () if self._strategy.is_global_zero else set(removed) - {but}:
            self._remove_parts(path)

    def _remove_parts(self, path: str) -> None:
        save = self._written.pop(path, None)
        if saves_beside(path):
            if self._strategy.local_rank == 0:
                self._remove(state_folder(path))
        elif save:
            self._remove(shard_path(path, save, self._strategy.global_rank))

    def _remove_saves(self, filepath: PathLike, saves: set[str]) -> None:
        if self._strategy.local_rank == 0:
            for save in saves.intersection(saves_beside(filepath)):
                self._remove(f"{state_folder(filepath)}/{save}")

    def _remove(self, path: str) -> None:
        """Remove what is of no use any more. Who raises here leaves the other ranks waiting, for nothing."""
        try:
            self._strategy.checkpoint_io.remove_checkpoint(path)
        except FileNotFoundError:  # on a shared file system another rank may have been faster
            pass
        except OSError as error:
            warnings.warn(
                f"{path} is of no use any more and could not be removed ({error}): delete it by hand if it stays",
                stacklevel=3,
            )

    def note(self, checkpoint: dict[str, Any], filepath: PathLike, goes_back: bool = False) -> None:
        """Record a checkpoint of Lightning's that was read; one of its own a training ``goes_back`` to as a whole."""
        path = str(filepath)
        is_wanted = self._resumes or (goes_back and path in self._written)
        self.loaded = path, read_header(checkpoint, path) if is_wanted else None

    @property
    def has_loaded_save(self) -> bool:
        """Whether there is something to restore."""
        return self.loaded is not None and self.loaded[1] is not None

    def restore_models(self, restore_models: Callable[[dict[str, dict[str, Any]]], Sequence[str]]) -> None:
        """Read what this rank has in the checkpoint that was noted, and hand it over; on all ranks or on none."""
        loaded, self.loaded = self.loaded, None
        if loaded is None:
            return
        path, save = loaded
        self._check_shards(path, save)
        if save is None:
            reason = "holds nothing that a sparse strategy kept" if self._resumes else "was read without it"
            rank_zero_info(f"{type(self._strategy).__name__}: {path} {reason}; residuals start empty.")
            return
        models = self._read_together(path, save)
        if models is None:
            return

        def restore() -> None:
            try:
                unused = restore_models(models)
            except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
                raise CheckpointError(
                    f"{path} does not fit what goes on, a {save.compressor} in this model: {error!r}. {CURE}"
                ) from error
            for line in _remarks(save, self._topology, unused, path):
                rank_zero_info(f"{type(self._strategy).__name__}: {line}")

        self.together(restore, f"{path}: another rank could not restore what it had kept")

    def _check_shards(self, path: str, save: Optional[SaveHeader]) -> None:
        """Refuse shards for a whole model, and the other way round; on all ranks alike."""
        is_sharded = self.same_shards is not None
        if save is not None and save.is_sharded != is_sharded:
            kept, wanted = ("in shards" if each else "whole" for each in (save.is_sharded, is_sharded))
            raise CheckpointError(
                f"{path} keeps the residual of each replica {kept}, and here it is kept {wanted}: resume with the same"
                f" strategy. {CURE}"
            )

    def _read_together(self, path: str, save: SaveHeader) -> Optional[dict[str, Any]]:
        """Read on every rank, and raise on every rank if one of them cannot; ``None`` if there is nothing anywhere."""
        found = error = None
        strategy = self._strategy
        try:
            found = read_state(synchronous(strategy.checkpoint_io), path, save, strategy.global_rank, self._topology)
        except Exception as raised:
            error = raised
        if strategy.reduce_boolean_decision(isinstance(error, AbsentError)):
            rank_zero_warn(
                f"{type(strategy).__name__}: residuals start empty, because what {save.ranks} ranks kept is not in"
                f" {state_folder(path)}: it was left behind when the checkpoint was copied, moved or renamed. To go on"
                " exactly, put that folder there, with its name changed like the file's."
            )
            return None
        self._agree(error, f"{path}: another rank could not read what it had kept")
        if isinstance(found, PartialSum):
            return mean_of_sums(found, save, strategy.root_device, self.same_shards)
        return found

    def together(self, action: Callable[[], None], complaint: str) -> None:
        """Act on every rank, and raise on every rank if one of them cannot."""
        error: Optional[Exception] = None
        try:
            action()
        except Exception as raised:
            error = raised
        self._agree(error, complaint)

    def _agree(self, error: Optional[Exception], complaint: str) -> None:
        """Raise on every rank if one of them has an error: nobody is to wait for a rank that has given up."""
        strategy = self._strategy
        try:
            agreed = strategy.reduce_boolean_decision(error is None)
        except RuntimeError as lost:
            raise CheckpointError(
                f"{complaint}, or has died: rank {strategy.global_rank} of {strategy.world_size} waited in vain for the"
                " others to say whether they could. Look at the other ranks' output for the first error, and start the"
                f" job again from its last checkpoint (ckpt_path=...). The backend said: {lost}"
            ) from (error or lost)
        if not agreed:
            raise error or CheckpointError(f"{complaint}, see its output.")

    def close(self) -> None:
        """Forget what was written and read."""
        self._written.clear()
        self.loaded = None


def _remarks(save: SaveHeader, topology: Topology, unused: Sequence[str], source: str) -> Iterator[str]:
    """Yield what the user should know of a state that was taken up by ranks of a :attr:`SaveHeader.topology`."""
    if save.topology != topology:
        group = "in replicas" if save.is_sharded else "on nodes"
        before, now = ("" if each == 1 else f" {group} of {each}" for each in (save.node_ranks, topology[1]))
        yield (
            f"{save.ranks} ranks{before} saved {source}, {topology[0]}{now} go on. Each begins with the mean of what"
            " those had not sent yet, so that nothing is lost; what each rank held a part of is cut into parts anew."
        )
    if unused:
        yield f"not used of {source}: {'; '.join(unused)}."
