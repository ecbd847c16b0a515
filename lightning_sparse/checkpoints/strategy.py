"""A DDP strategy whose checkpoints hold what its engine keeps on every rank."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Optional
from uuid import uuid4

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from pytorch_lightning.plugins import AsyncCheckpointIO, CheckpointIO
from torch import Tensor
from torch.nn import Parameter
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
from lightning_sparse.checkpoints.restoring import fitted_gradients, remarks, take_up
from lightning_sparse.checkpoints.shards import (
    KEY,
    AbsentError,
    CheckpointError,
    Save,
    on_host,
    read_header,
    read_state,
)
from lightning_sparse.settings import Settings
from lightning_sparse.switchable import SwitchableDDPStrategy


class ResumableDDPStrategy(SwitchableDDPStrategy):
    """Write what each rank keeps beside Lightning's checkpoint, and read it again.

    Args:
        settings: what the user chose.
        resume_compression: whether a run that is resumed from a checkpoint takes up what the ranks had kept.
        **ddp_kwargs: arguments of ``SwitchableDDPStrategy``.
    """

    def __init__(self, settings: Settings, resume_compression: bool, **ddp_kwargs: Any) -> None:
        self._settings = settings
        self._resumes = resume_compression
        self._loaded: Optional[tuple[str, Optional[Save]]] = None
        self._final_state: Optional[dict[str, Any]] = None
        self._written: dict[str, str] = {}
        self._gradients: dict[Parameter, Tensor] = {}
        super().__init__(**ddp_kwargs)

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
            if self.is_global_zero and not is_asynchronous and saves_beside(filepath):
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
            before = self._written.get(str(filepath))
            if is_asynchronous and before is not None:
                self._remove_saves(filepath, keep={before, save.name})
            self._together(partial(write_file, {**checkpoint, **header}, filepath, storage_options), complaint)
        except Exception:
            if not is_asynchronous:  # an asynchronous plugin may still be writing the file that names this save
                self._remove_saves(filepath, keep=set(saves_beside(filepath)) - {save.name})
            raise
        self._written[str(filepath)] = save.name
        if not is_asynchronous:
            self._remove_saves(filepath, keep={save.name})

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

    def _remove_saves(self, filepath: PathLike, keep: set[str]) -> None:
        if self.local_rank == 0:
            for save in set(saves_beside(filepath)) - keep:
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
        if self._is_accumulating:
            assert self.lightning_module is not None
            parameters = self.lightning_module.named_parameters()
            shard["gradients"] = {name: tensor.grad for name, tensor in parameters if tensor.grad is not None}
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

    @override
    def load_checkpoint(self, checkpoint_path: PathLike, weights_only: Optional[bool] = None) -> dict[str, Any]:
        given = {} if weights_only is None else {"weights_only": weights_only}
        checkpoint = super().load_checkpoint(checkpoint_path, **given)
        self._loaded = (str(checkpoint_path), read_header(checkpoint, str(checkpoint_path)) if self._resumes else None)
        return checkpoint

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        # Lightning has set all gradients to zero since the checkpoint was read.
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient
        self._is_accumulating = bool(self._gradients)

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, *args, **kwargs)
        # Only now: DDP puts views of its buckets in their place while, on a GPU, a stream that their memory's allocator
        # has not heard of still reads them. That memory would be given to the gradient of another layer.
        self._gradients = {}
        return output

    def _close_engine(self) -> None:
        """End the engine, and keep on the host what a checkpoint that is saved after training has to hold."""
        assert self._engine is not None
        self._final_state = on_host(self._engine.state_dict()) if self._engine.close() else None
        self._engine = None  # on a GPU its residuals take as much memory as the model

    @override
    def teardown(self) -> None:
        super().teardown()
        self._loaded, self._gradients = None, {}
        for path, save in self._written.items() if self.is_global_zero else ():
            # The file that an asynchronous plugin was writing is there now, which no other rank can know.
            self._remove_saves(path, keep={save})
        self._written.clear()

    def _has_loaded_state(self) -> bool:
        return self._loaded is not None and self._loaded[1] is not None

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        (path, save), self._loaded = self._loaded or ("", None), None
        if not path or self._engine is None:
            return
        if save is None:
            reason = "holds nothing that a sparse strategy kept" if self._resumes else "was read without it"
            rank_zero_info(f"{type(self).__name__}: {path} {reason}; residuals start empty.")
            return
        if (shard := self._read_together(path, save)) is not None:
            complaint = f"{path}: another rank could not take up what it had kept"
            self._together(partial(self._take_up, shard, save, path), complaint)

    def _read_together(self, path: str, save: Save) -> Optional[dict[str, Any]]:
        """Read on every rank, and raise on every rank if one of them cannot; ``None`` if there is nothing anywhere."""
        shard = error = None
        try:
            shard = read_state(synchronous(self.checkpoint_io), path, save, self.global_rank, self.world_size)
        except Exception as raised:
            error = raised
        if self.reduce_boolean_decision(isinstance(error, AbsentError)):
            rank_zero_warn(
                f"{type(self).__name__}: residuals start empty, because what {save.ranks} ranks kept is not in"
                f" {state_folder(path)}: it was left behind when the checkpoint was copied, moved or renamed. To go on"
                " exactly, put that folder there, with its name changed like the file's."
            )
            return None
        self._agree(error, f"{path}: another rank could not read what it had kept")
        return shard

    def _take_up(self, shard: dict[str, Any], save: Save, path: str) -> None:
        """Give the engine, the optimizers and the parameters what this rank had kept, and say what is not used."""
        assert self._engine is not None
        assert self.lightning_module is not None
        parameters = dict(self.lightning_module.named_parameters())
        trained = {name: tensor for name, tensor in parameters.items() if tensor.requires_grad}
        unused = take_up(self._engine, self._settings.compressor, shard["engine"], save, parameters, path)
        self._gradients = fitted_gradients(shard.get("gradients", {}), trained, path)
        if self._settings.compressor.replicas_diverge:
            for optimizer, kept in zip(self.optimizers, shard.get("optimizers", [])):
                optimizer.load_state_dict({**optimizer.state_dict(), "state": kept})
        if self._switch is not None and not self._gradients and save.ranks == self.world_size and "is_plain" in shard:
            self._switch.take_up(bool(shard["is_plain"]))
            self._is_at_border = True
        for line in remarks(save, self.world_size, unused, path):
            rank_zero_info(f"{type(self).__name__}: {line}")
