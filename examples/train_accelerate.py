"""Train with Hugging Face's Accelerate: a wrapped model, AdamW, accumulation, clipping, saving and resuming.

torchrun --nproc-per-node 2 examples/train_accelerate.py --folder runs/accelerate
"""

import argparse
from pathlib import Path
from typing import Optional, Union

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.utils import set_seed  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_sparse
from lightning_sparse import AdamCorrection


def train(
    folder: Path,
    density: Optional[float] = 0.01,
    correction: Union[str, AdamCorrection] = "auto",
    steps: int = 100,
    save_at: int = 50,
    resumes: bool = False,
) -> tuple[float, dict[str, Tensor]]:
    """Train a small model; return its last loss and its parameters.

    Args:
        folder: of the checkpoint.
        density: fraction of the gradients' elements that is sent; ``None`` for plain DDP.
        correction: of AdamW, as ``sparsify_gradients`` takes it.
        steps: optimizer steps.
        save_at: step after which the state is saved.
        resumes: whether to go on from the saved state.
    """
    set_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 1))
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    inputs = torch.randn(16 * 2 * steps, 32, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ddp, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    # What comes next is all that is added.
    handle = None
    if density is not None:
        handle = lightning_sparse.sparsify_gradients(
            ddp, optimizer, "lags", density=density, optimizer_correction=correction, total_steps=steps
        )
    first = 0
    if resumes:
        accelerator.load_state(str(folder))
        first = save_at
        if handle is not None:
            handle.load_state(folder / "residuals")
    step, loss = first, torch.zeros(())
    for rows, targets in accelerator.skip_first_batches(loader, 2 * first):
        with accelerator.accumulate(ddp):
            loss = (ddp(rows) - targets).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(ddp.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            if step == save_at and not resumes:
                accelerator.save_state(str(folder))
                if handle is not None:
                    handle.save_state(folder / "residuals")
    parameters = {name: each.detach().clone() for name, each in model.named_parameters()}
    if handle is not None:
        ratio = handle.compression_stats().get("total_compression_ratio", 1.0)
        accelerator.print(f"step {step} loss {loss.item():.3f} sent {ratio:.1f} times fewer bytes than DDP")
        handle.close()
    return loss.item(), parameters


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/accelerate"))
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--resumes", action="store_true")
    options = parser.parse_args()
    train(options.folder, options.density, resumes=options.resumes)
