"""A DDP strategy that writes what its engine keeps on every rank beside Lightning's checkpoints."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Optional
from uuid import uuid4

from pytorch_lightning.plugins import AsyncCheckpointIO, CheckpointIO
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sparse.checkpoints.files import (
    AtomicCheckpointIO,
    PathLike,
    saves_beside,
    shard_path,
    state_folder,
    synchronous,
)
from lightning_sparse.checkpoints.shards import KEY, CheckpointError, Save, on_host
from lightning_sparse.optimizers import waiting_gradients
from lightning_sparse.settings import Settings
from lightning_sparse.switchable import SwitchableDDPStrategy


class SavingDDPStrategy(SwitchableDDPStrategy):
    """Write what each rank keeps beside Lightning's checkpoint, and delete both together.

    Args:
        settings: what the user chose.
        **ddp_kwargs: arguments of ``SwitchableDDPStrategy``.
    """

    def __init__(self, settings: Settings, **ddp_kwargs: Any) -> None:
        self._settings = settings
        self._final_state: Optional[dict[str, Any]] = None
        self._written: dict[str, str] = {}
        self._superseded: dict[str, set[str]] = {}
        self._waiting: list[Optimizer] = []
        super().__init__(**ddp_kwargs)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        self._waiting = list(self.optimizers)

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, *args, **kwargs)
        self._waiting = [each for each in self._waiting if each is not optimizer]
        return output

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What writes and reads files: Lightning's, but atomic, unless the user gives another one."""
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        elif isinstance(self._checkpoint_io, AsyncCheckpointIO):
            self._checkpoint_io.checkpoint_io = AtomicCheckpointIO()  # which it takes if it was given none
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: CheckpointIO) -> None:
        self._checkpoint_io = plugin

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: PathLike, storage_options: Optional[Any] = None
    ) -> None:
        # Lightning leaves the optimizers out where the user wants the weights only.
        shard = self._shard() if "optimizer_states" in checkpoint else None
        is_asynchronous = isinstance(self.checkpoint_io, AsyncCheckpointIO)
        if shard is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            self._written[str(filepath)] = ""
            if is_asynchronous:
                self._superseded[str(filepath)] = set(saves_beside(filepath))
            elif self.is_global_zero and saves_beside(filepath):
                self.checkpoint_io.remove_checkpoint(state_folder(filepath))
            return
        if is_asynchronous:
            self.checkpoint_io.teardown()  # waits until the last file is written; the next one starts it again
        save = Save(self.broadcast(uuid4().hex), self.world_size, type(self._settings.compressor).__name__)
        header = {KEY: save.as_header()}
        path = shard_path(filepath, save.name, self.global_rank)
        write_shard = synchronous(self.checkpoint_io).save_checkpoint
        write_file = super().save_checkpoint
        complaint = f"{filepath} stays as it was: another rank could not write its part"
        try:
            self._together(partial(write_shard, {**header, **shard}, path, storage_options), complaint)
            if is_asynchronous:
                self._remove_saves(filepath, self._superseded.pop(str(filepath), set()))
            self._together(partial(write_file, {**checkpoint, **header}, filepath, storage_options), complaint)
        except Exception:
            if not is_asynchronous:  # an asynchronous plugin may still be writing the file that names this save
                self._remove_saves(filepath, {save.name})
            raise
        self._written[str(filepath)] = save.name
        others = set(saves_beside(filepath)) - {save.name}
        if is_asynchronous:
            self._superseded[str(filepath)] = others
        else:
            self._remove_saves(filepath, others)

    def _together(self, action: Callable[[], None], complaint: str) -> None:
        """Act on every rank, and raise on every rank if one of them cannot."""
        error: Optional[Exception] = None
        try:
            action()
        except Exception as raised:
            error = raised
        self._agree(error, complaint)

    def _agree(self, error: Optional[Exception], complaint: str) -> None:
        """Raise on every rank if one of them has an error: nobody is to wait for a rank that has given up."""
        try:
            agreed = self.reduce_boolean_decision(error is None)
        except RuntimeError as lost:
            raise CheckpointError(
                f"{complaint}, or has died: rank {self.global_rank} of {self.world_size} waited in vain for the others"
                " to say whether they could. Look at the other ranks' output for the first error, and start the job"
                f" again from its last checkpoint (ckpt_path=...). The backend said: {lost}"
            ) from (error or lost)
        if not agreed:
            raise error or CheckpointError(f"{complaint}, see its output.")

    def _remove_saves(self, filepath: PathLike, saves: set[str]) -> None:
        if self.local_rank == 0:
            for save in saves.intersection(saves_beside(filepath)):
                self.checkpoint_io.remove_checkpoint(f"{state_folder(filepath)}/{save}")

    def _shard(self) -> Optional[dict[str, Any]]:
        """Return what this rank has to save; ``None`` if nothing is compressed."""
        if self._engine is None:
            engine_state = self._final_state
        else:
            self._engine.settle()
            engine_state = self._engine.state_dict()
        if engine_state is None:
            return None
        shard: dict[str, Any] = {"engine": engine_state}
        if self._switch is not None and self._switch.chosen is not None:
            shard["is_plain"] = self._switch.chosen
        if self._waiting:
            assert self.lightning_module is not None
            shard["gradients"] = waiting_gradients(self.lightning_module, self.optimizers, self._waiting)
            shard["is_accumulating"] = self._is_accumulating
        if self._settings.compressor.replicas_diverge:
            # Lightning's file holds those of rank 0; here they differ, as the gradients that they were fed with.
            shard["optimizers"] = [optimizer.state_dict()["state"] for optimizer in self.optimizers]
        return shard

    @override
    def remove_checkpoint(self, filepath: PathLike) -> None:
        super().remove_checkpoint(filepath)
        save = self._written.pop(str(filepath), None)
        with suppress(FileNotFoundError):  # on a shared file system another rank may have been faster
            if saves_beside(filepath):
                if self.local_rank == 0:
                    self.checkpoint_io.remove_checkpoint(state_folder(filepath))
            elif save:
                self.checkpoint_io.remove_checkpoint(shard_path(filepath, save, self.global_rank))

    def _close_engine(self) -> None:
        """End the engine, and keep on the host what a checkpoint that is saved after training has to hold."""
        assert self._engine is not None
        is_whole = self._engine.close()
        self._final_state = on_host(self._engine.state_dict()) if is_whole else None
        self._engine = None  # on a GPU its residuals take as much memory as the model

    @override
    def teardown(self) -> None:
        super().teardown()
        for path, saves in self._superseded.items() if self.is_global_zero else ():
            # The file that an asynchronous plugin was writing is there now, which no other rank can know. Only what was
            # there before it: somebody else may have saved under that name since.
            self._remove_saves(path, saves)
        self._superseded.clear()
        self._written.clear()
