"""Train with Hugging Face's Trainer: a GPT-2 made on the spot, AdamW, accumulation, clipping, checkpoints, resuming.

torchrun --nproc-per-node 2 examples/train_hugging_face.py --folder runs/hugging-face
"""

import argparse
import os
from pathlib import Path
from typing import Any, Optional, Union

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

import lightning_sparse
from lightning_sparse import AdamCorrection


class Sparse(TrainerCallback):
    """Have a Trainer send only the part of each gradient that matters most, and save what each process keeps.

    It clips, too, as updates of AdamW are made before they are sent: leave that out of the Trainer's own arguments,
    ``max_grad_norm=0``.

    Args:
        trainer: that it is added to.
        clip_norm: largest norm of the gradient.
        resume_from: folder of the checkpoint that ``train`` is given, too; ``None`` to begin.
        **settings: arguments of :func:`lightning_sparse.sparsify`.
    """

    def __init__(self, trainer: Trainer, clip_norm: float, resume_from: Optional[Path] = None, **settings: Any) -> None:
        self._trainer = trainer
        self._clip_norm = clip_norm
        self._resume_from = resume_from
        self._settings = settings
        self.stats: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Begin the exchange, when model and optimizer have been wrapped and loaded."""
        ddp: Any = self._trainer.model_wrapped
        optimizer: Any = self._trainer.optimizer
        self._handle = lightning_sparse.sparsify(ddp, optimizer, total_steps=state.max_steps, **self._settings)
        if self._resume_from is not None:
            path = self._resume_from / f"kept-{args.process_index}.pt"
            self._handle.load_state_dict(torch.load(path, weights_only=True))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Tell of the epoch, over the first of which the density may fall."""
        self._handle.set_epoch(int(state.epoch or 0))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Clip."""
        self._handle.clip(norm=self._clip_norm)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Save what this process keeps beside the Trainer's own files."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self._handle.state_dict(), folder / f"kept-{args.process_index}.pt")

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """End the exchange."""
        self.stats = self._handle.stats()
        self._handle.close()


class Counting(Dataset[dict[str, Tensor]]):
    """Rows that count upward, each from a number of its own: what comes next can be learned."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (index + torch.arange(16)) % 32
        return {"input_ids": tokens, "labels": tokens}


def train(
    folder: Path,
    density: Optional[float] = 0.01,
    correction: Union[str, AdamCorrection] = "auto",
    resume_from: Optional[Path] = None,
    **arguments: Any,
) -> tuple[float, dict[str, Tensor]]:
    """Train a small GPT-2; return its mean loss and its parameters.

    Args:
        folder: of the checkpoints.
        density: fraction of the gradients' elements that is sent; ``None`` for plain DDP.
        correction: of AdamW, as ``sparsify`` takes it.
        resume_from: folder of the checkpoint to go on from; ``None`` to begin.
        **arguments: of ``TrainingArguments``.
    """
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    settings = TrainingArguments(
        output_dir=str(folder),
        max_steps=arguments.pop("max_steps", 60),
        learning_rate=3e-3,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0 if density is None else 0.0,
        ddp_find_unused_parameters=False,
        report_to=[],
        **{"ddp_bucket_cap_mb": lightning_sparse.bucket_cap_mb(model), **arguments},
    )
    trainer = Trainer(model=model, args=settings, train_dataset=Counting())
    if density is not None:
        method = {"compressor": "lags", "density": density, "optimizer_correction": correction}
        sparse = Sparse(trainer, clip_norm=1.0, resume_from=resume_from, **method)
        trainer.add_callback(sparse)
    done = trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
    if density is not None and settings.process_index == 0:
        ratio = sparse.stats.get("total_compression_ratio", 1.0)
        print(f"loss {done.training_loss:.3f} sent {ratio:.1f} times fewer bytes than DDP")
    return done.training_loss, {name: each.detach().clone() for name, each in model.named_parameters()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/hugging-face"))
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--resume-from", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    train(options.folder, options.density, resume_from=options.resume_from, use_cpu=not torch.cuda.is_available())
