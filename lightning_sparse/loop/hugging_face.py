"""Hugging Face's entry points: a callback for its Trainer, and saving with Accelerate; no other file imports either."""

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
from lightning_sparse.loop.sparsify import GradientSparsifier, sparsify_gradients


class SparsifyCallback(TrainerCallback):
    """Have Hugging Face's Trainer exchange as :func:`~lightning_sparse.sparsify_gradients` does.

    To ``TrainingArguments(max_grad_norm=...)`` this clips, as updates of AdamW must not be clipped like gradients.
    With local steps the shared model is evaluated and saved, and there when ``train`` returns. The Trainer's folder of
    a checkpoint holds the state of all processes, from which a training resumes. On one process nothing is done. Add it
    after callbacks that ask for evaluations and saves.

    Args:
        trainer: that it is added to.
        resume_from: folder of the checkpoint that ``train`` is given, where that is not in this training's folder.
        resume_compression: whether to load the state of the processes; ``False`` starts with empty residuals.
        **settings: arguments of :func:`~lightning_sparse.sparsify_gradients`.

    Attributes:
        stats: statistics of the training when it has ended, as of
            :meth:`~lightning_sparse.GradientSparsifier.compression_stats`.

    Raises:
        CheckpointError: when training resumes from a checkpoint without the state of the processes.
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
        self._accelerator: Any = None  # some of whose methods are ours, until they are given back
        self._shown = ExitStack()
        self.stats: dict[str, float] = {}

    @override
    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Begin the exchange, when model and optimizer have been wrapped and loaded."""
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
                self._handle.synchronize()  # that evaluation ended a round, maybe after the save

    @override
    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Go on with this process's own model."""
        self._shown.close()

    @override
    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Show the shared model, which is what will be evaluated or saved; an evaluation ends a round."""
        if self._handle is not None and self._handle.training is not None and control.should_evaluate:
            self._handle.training.end_round()
        if self._handle is not None and (control.should_evaluate or control.should_save):
            self._shown.enter_context(self._handle.shared_model())

    on_epoch_end = on_step_end

    @override
    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Save the state of the processes beside the Trainer's own files."""
        if self._handle is not None:
            self._handle.save_state(self._folder(state) / _NAME)

    @override
    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """End the exchange, with the shared model or with the best one, where the Trainer has loaded that."""
        if self._handle is None:
            return
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._handle.reset_shared_model()
        self._shown.close()
        self._handle.close()
        self.stats = self._handle.compression_stats()
        self._trainer.model_wrapped = self._trainer.model  # for a further training to wrap
        self._give_back()

    def _folder(self, state: Any) -> Path:
        """Return the Trainer's folder of a checkpoint."""
        if state.is_hyper_param_search:
            raise ValueError(
                "hyperparameter_search() saves each trial in its own folder, which SparsifyCallback does not support."
                " Pass save_strategy='no' to TrainingArguments."
            )
        return Path(self._trainer.args.output_dir) / f"checkpoint-{state.global_step}"

    def _clip(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip in Accelerate's place, and return the norm before, which the Trainer also asks for with no limit."""
        assert self._handle is not None
        self._accelerator.unscale_gradients()
        norm = get_total_norm([each.grad for each in parameters if each.grad is not None], norm_type)
        if max_norm < math.inf:
            self._handle.clip(norm=max_norm)
        return norm

    def _free_memory(self, *objects: Any) -> Any:
        """Free memory in Accelerate's place, with which a training begins before it wraps the model."""
        accelerator, trainer = self._accelerator, self._trainer
        self._end_failed()  # the Trainer tells nobody of a training that raised, but by beginning the next
        trainer.model_wrapped = trainer.model  # the wrapper there was is closed
        return accelerator.free_memory(*objects)

    def _end_failed(self) -> None:
        """End a training that raised, if there is one, and leave the model as it is: by now it may have been loaded."""
        self._give_back()
        if self._handle is None:
            return
        if self._handle.training is not None and (rounds := self._handle.training.engine.rounds) is not None:
            rounds.shared.swap_out(own=False)
        self._shown.close()
        self._handle.close(has_failed=True)

    def _give_back(self) -> None:
        """Have Accelerate's own methods again."""
        if self._accelerator is not None:
            for ours in ("clip_grad_norm_", "free_memory"):
                vars(self._accelerator).pop(ours, None)
            self._accelerator = None


_NAME = "lightning_sparse"  # of a folder in that of a checkpoint
_REGISTERED: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # how many handles an accelerator saves


def save_with(accelerator: Any, handle: GradientSparsifier) -> None:
    """Have Accelerate's ``save_state`` and ``load_state`` include the state of each process.

    Its ``register_for_checkpointing`` would save that of one process. Call it for each of several models, in the same
    order when a training is resumed. With local steps save inside
    :meth:`~lightning_sparse.GradientSparsifier.shared_model`.
    """
    number = _REGISTERED.get(accelerator, 0)
    _REGISTERED[accelerator] = number + 1
    name = f"{_NAME}-{number}" if number else _NAME

    def save(models: Any, weights: Any, folder: str) -> None:
        handle.save_state(Path(folder) / name)

    def load(models: Any, folder: str) -> None:
        handle.load_state(Path(folder) / name)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
