"""The entry point for Hugging Face's Trainer. Only this file imports transformers."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Optional, Union

from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback
from typing_extensions import Unpack, override

from lightning_sparse.loop.arguments import LoopArguments
from lightning_sparse.loop.handle import GradientSparsifier, sparsify_gradients

_NAME = "lightning_sparse"  # folder name inside a checkpoint folder


class SparsifyCallback(TrainerCallback):
    """Compress gradients in Hugging Face's Trainer, like :func:`~lightning_sparse.sparsify_gradients`.

    With local steps the Trainer evaluates and saves the shared model of all ranks. After ``train`` the model is the
    shared model. Each checkpoint folder also holds the compression state of all processes. Add this callback after
    callbacks that request evaluations or saves, because this callback acts on the requests.

    Args:
        trainer: the Trainer that receives the callback.
        resume_from: checkpoint folder from which ``train`` resumes. ``None`` for ``output_dir/checkpoint-<step>``.
        resume_compression: whether to load the compression state. ``False`` starts with empty residuals.
        **settings: arguments of :func:`~lightning_sparse.sparsify_gradients`.

    Attributes:
        stats: :meth:`~lightning_sparse.GradientSparsifier.compression_stats` at the end of training.

    Raises:
        ValueError: at the start of training, for ``auto_find_batch_size``, and for a hyperparameter search with saves.
        CheckpointError: when training resumes from a checkpoint without compression state.
    """

    def __init__(
        self,
        trainer: Trainer,
        resume_from: Union[str, Path, None] = None,
        resume_compression: bool = True,
        **settings: Unpack[LoopArguments],
    ) -> None:
        self._trainer: Any = trainer
        self._resume_from = resume_from
        self._resumes = resume_compression
        self._settings = settings
        self._handle: Optional[GradientSparsifier] = None
        self._shown = ExitStack()  # holds ``shared_model()`` while the shared model is in place
        self.stats: dict[str, float] = {}

    @override
    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Begin the exchange, after the Trainer has wrapped and loaded model and optimizer."""
        if args.auto_find_batch_size or (state.is_hyper_param_search and args.save_strategy != "no"):
            raise ValueError(
                "SparsifyCallback supports neither auto_find_batch_size=True nor saves of hyperparameter_search(): pass"
                " per_device_train_batch_size and save_strategy='no' to TrainingArguments"
            )
        ddp, accelerator = self._trainer.model_wrapped, self._trainer.accelerator
        if args.world_size == 1 and not isinstance(ddp, DistributedDataParallel):
            return
        scaler = getattr(accelerator, "scaler", None)
        given: LoopArguments = {"scaler": scaler, "total_steps": state.max_steps, **self._settings}
        self._handle = sparsify_gradients(ddp, self._trainer.optimizer, **given)
        if state.global_step and self._resumes:
            folder = self._resume_from or self._folder(state)
            self._handle.load_state(Path(folder) / _NAME)
            if args.eval_strategy == "epoch" and state.epoch == int(state.epoch) >= args.eval_delay:
                self._handle.synchronize()  # as in the saved run: an evaluation after this step ended the round

    @override
    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Swap this process's local model back in, after an evaluation or a save of the shared model."""
        self._shown.close()

    @override
    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Before an evaluation or a save, swap in the shared model. Before an evaluation, also end the round."""
        if self._handle is not None and control.should_evaluate:
            self._handle.synchronize()
        if self._handle is not None and (control.should_evaluate or control.should_save):
            self._shown.enter_context(self._handle.shared_model())

    on_epoch_end = on_step_end

    @override
    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Save the compression state of all processes in the Trainer's checkpoint folder."""
        if self._handle is not None:
            self._handle.save_state(self._folder(state) / _NAME)

    @override
    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """End the exchange. The shared model remains, or the best model if the Trainer has loaded the best model."""
        if self._handle is None:
            return
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._handle.reset_shared_model()
        self._shown.close()
        self._handle.close()
        self.stats = self._handle.compression_stats()
        self._trainer.model_wrapped = self._trainer.model  # the next training has to wrap the model again

    def _folder(self, state: Any) -> Path:
        return Path(self._trainer.args.output_dir) / f"checkpoint-{state.global_step}"
