"""A DDP strategy whose checkpoints hold what its engine keeps on every rank."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Optional

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from typing_extensions import override

from lightning_sparse.checkpoints.files import PathLike, state_folder, synchronous
from lightning_sparse.checkpoints.restoring import fitted_gradients, remarks, take_up
from lightning_sparse.checkpoints.saving import SavingDDPStrategy
from lightning_sparse.checkpoints.shards import AbsentError, Save, read_header, read_state
from lightning_sparse.optimizers import handled
from lightning_sparse.settings import Settings


class ResumableDDPStrategy(SavingDDPStrategy):
    """Write what each rank keeps beside Lightning's checkpoint, and read it again.

    Args:
        settings: what the user chose.
        resume_compression: whether a run that is resumed from a checkpoint takes up what the ranks had kept.
        **ddp_kwargs: arguments of ``SavingDDPStrategy``.
    """

    def __init__(self, settings: Settings, resume_compression: bool, **ddp_kwargs: Any) -> None:
        self._resumes = resume_compression
        self._loaded: Optional[tuple[str, Optional[Save]]] = None
        self._gradients: dict[Parameter, Tensor] = {}
        super().__init__(settings, **ddp_kwargs)

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
        self._waiting = [each for each in self.optimizers if not self._gradients.keys().isdisjoint(handled(each))]
        self._is_accumulating = self._is_accumulating and bool(self._gradients)
        self._note_use()

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        assert self.lightning_module is not None
        if self.lightning_module.automatic_optimization:
            # With another accumulate_grad_batches than before, Lightning takes this batch for the first of a step.
            for parameter, gradient in self._gradients.items():
                parameter.grad = gradient if parameter.grad is None else parameter.grad

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, *args, **kwargs)
        # Only now: DDP puts views of its buckets in their place while, on a GPU, a stream that their memory's allocator
        # has not heard of still reads them. That memory would be given to the gradient of another layer.
        self._gradients = {}
        return output

    @override
    def teardown(self) -> None:
        super().teardown()
        self._loaded = None
        self._gradients = {}

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
        self._is_accumulating = bool(shard.get("is_accumulating"))
        if self._settings.compressor.replicas_diverge:
            for optimizer, kept in zip(self.optimizers, shard.get("optimizers", [])):
                optimizer.load_state_dict({**optimizer.state_dict(), "state": kept})
        is_ours = save.ranks == self.world_size and "is_plain" in shard and not self._is_accumulating
        if self._switch is not None and is_ours:
            self._switch.take_up(bool(shard["is_plain"]))
            self._is_at_border = True
        for line in remarks(save, self.world_size, unused, path):
            rank_zero_info(f"{type(self).__name__}: {line}")
