"""Entry points for Hugging Face's Trainer and Accelerate. Only this file imports transformers."""

import math
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Optional, Union
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm
from transformers import Trainer, TrainerCallback
from typing_extensions import Unpack, override

from lightning_sparse.loop.arguments import LoopArguments
from lightning_sparse.loop.handle import GradientSparsifier
from lightning_sparse.loop.sparsify import sparsify_gradients


class SparsifyCallback(TrainerCallback):
    """Compress gradients in Hugging Face's Trainer, like :func:`~lightning_sparse.sparsify_gradients`.

    The callback also replaces the clipping to ``max_grad_norm``: with AdamW ``.grad`` holds updates, which must not be
    clipped. With local steps the Trainer evaluates and saves the shared model of all ranks. After ``train`` the model
    is the shared model. Each checkpoint folder also holds the compression state of all processes. Add this callback
    after callbacks that request evaluations or saves, because this callback acts on the requests.

    Args:
        trainer: the Trainer that receives the callback.
        resume_from: checkpoint folder from which ``train`` resumes. ``None`` for the folder in ``output_dir``.
        resume_compression: whether to load the compression state. ``False`` starts with empty residuals.
        **settings: arguments of :func:`~lightning_sparse.sparsify_gradients`.

    Attributes:
        stats: :meth:`~lightning_sparse.GradientSparsifier.compression_stats` at the end of training.

    Raises:
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
        self._accelerator: Any = None  # the accelerator with methods that this callback has replaced
        self._shown = ExitStack()  # holds ``shared_model()`` while the shared model is in place
        self.stats: dict[str, float] = {}

    @override
    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Begin the exchange, after the Trainer has wrapped and loaded model and optimizer."""
        self._end_failed()
        ddp = self._trainer.model_wrapped
        if args.world_size == 1 and not isinstance(ddp, DistributedDataParallel):
            return
        self._accelerator = accelerator = self._trainer.accelerator
        accelerator.free_memory = self._free_memory
        scaler = getattr(accelerator, "scaler", None)
        given: LoopArguments = {"scaler": scaler, "total_steps": state.max_steps, **self._settings}
        self._handle = sparsify_gradients(ddp, self._trainer.optimizer, **given)
        accelerator.clip_grad_norm_ = self._clip
        if state.global_step and self._resumes:
            folder = self._resume_from or self._folder(state)
            self._handle.load_state(Path(folder) / _NAME)
            if args.eval_strategy == "epoch" and state.epoch == int(state.epoch) >= args.eval_delay:
                self._handle.synchronize()  # in the earlier run, the evaluation after this step ended a round

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
        self._give_back()

    def _folder(self, state: Any) -> Path:
        if state.is_hyper_param_search:
            raise ValueError(
                "hyperparameter_search() saves each trial in its own folder, which SparsifyCallback does not support."
                " Pass save_strategy='no' to TrainingArguments."
            )
        return Path(self._trainer.args.output_dir) / f"checkpoint-{state.global_step}"

    def _clip(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip in place of Accelerate, and return the norm before clipping. With ``max_norm=inf``, do not clip."""
        assert self._handle is not None
        self._accelerator.unscale_gradients()
        norm = get_total_norm([each.grad for each in parameters if each.grad is not None], norm_type)
        if max_norm < math.inf:
            self._handle.clip(norm=max_norm)
        return norm

    def _free_memory(self, *objects: Any) -> Any:
        """End a failed training, then call Accelerate's method. A training calls this before wrapping the model."""
        accelerator, trainer = self._accelerator, self._trainer
        self._end_failed()  # no callback runs when training raises an error
        trainer.model_wrapped = trainer.model  # the exchange of the earlier wrapper has ended
        return accelerator.free_memory(*objects)

    def _end_failed(self) -> None:
        """End a training that raised an error. Weights stay unchanged, because the user may have loaded new weights."""
        self._give_back()
        if self._handle is None:
            return
        if self._handle.training is not None and (rounds := self._handle.training.engine.rounds) is not None:
            rounds.shared.swap_out(own=False)
        self._shown.close()
        self._handle.close(has_failed=True)

    def _give_back(self) -> None:
        if self._accelerator is not None:
            for ours in ("clip_grad_norm_", "free_memory"):
                vars(self._accelerator).pop(ours, None)
            self._accelerator = None


_NAME = "lightning_sparse"  # folder name inside a checkpoint folder
_REGISTERED: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # number of save_with() calls, by accelerator


def save_with(accelerator: Any, handle: GradientSparsifier) -> None:
    """Include the compression state of each process in Accelerate's ``save_state`` and ``load_state``.

    Accelerate's ``register_for_checkpointing`` saves the state of one process only. For several models, call this
    function once per model. A resumed training must make these calls in the same order.

    Args:
        accelerator: the ``Accelerator`` of the training.
        handle: handle of a model.

    Raises:
        ValueError: for local steps, because Accelerate loads the model after other states.
    """
    if handle.settings.local_steps is not None:
        raise ValueError(
            "save_with does not support local_steps: call handle.save_state(folder) beside accelerator.save_state, and"
            " handle.load_state(folder) after accelerator.load_state"
        )
    number = _REGISTERED.get(accelerator, 0)
    _REGISTERED[accelerator] = number + 1
    name = f"{_NAME}-{number}" if number else _NAME

    def save(models: Any, weights: Any, folder: str) -> None:
        handle.save_state(Path(folder) / name)

    def load(models: Any, folder: str) -> None:
        handle.load_state(Path(folder) / name)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
