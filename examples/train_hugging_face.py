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
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from lightning_sparse import AdamCorrection
from lightning_sparse.loop.hugging_face import SparsifyCallback


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
        correction: of AdamW, as ``sparsify_gradients`` takes it.
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
        max_grad_norm=1.0,
        ddp_find_unused_parameters=False,
        report_to=[],
        **arguments,
    )
    trainer = Trainer(model=model, args=settings, train_dataset=Counting())
    if density is not None:
        sparse = SparsifyCallback(trainer, compressor="lags", density=density, optimizer_correction=correction)
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
