"""Train a small GPT with AdamW on the characters of a text, on processes that send sparse updates.

By default the text is Python's own help pages, which need no download; ``--text`` trains on any UTF-8 text file. The
recipe is the usual one: AdamW with beta2 0.95, a learning rate that rises for 100 steps and falls as a cosine to a
tenth, gradient norm clipped to 1. Two thousand steps on four processes of one machine take minutes.

Four processes, then the same with ordinary DDP, then one process, then Muon in rounds of local steps::

    python examples/train_gpt.py --devices 4
    python examples/train_gpt.py --devices 4 --strategy ddp
    python examples/train_gpt.py --devices 1
    python examples/train_gpt.py --devices 4 --strategy sparse_qsgd --optimizer muon --epochs 40

Two nodes with two processes each; the first command on a host that the other reaches as ``first``::

    MASTER_ADDR=first MASTER_PORT=29500 NODE_RANK=0 python examples/train_gpt.py --nodes 2
    MASTER_ADDR=first MASTER_PORT=29500 NODE_RANK=1 python examples/train_gpt.py --nodes 2

The same two nodes, each of which holds the model in shards (``--devices`` of them)::

    MASTER_ADDR=first MASTER_PORT=29500 NODE_RANK=0 python examples/train_gpt.py --nodes 2 --strategy sparse_hsdp
    MASTER_ADDR=first MASTER_PORT=29500 NODE_RANK=1 python examples/train_gpt.py --nodes 2 --strategy sparse_hsdp

On a GPU, with bfloat16 where it helps and a compiled network::

    python examples/train_gpt.py --devices 2 --precision bf16-mixed --compile --width 768 --blocks 12 --heads 12
"""

from pathlib import Path
from typing import Any

import torch
from command_line import build_trainer, example_parser
from gpt import GPT, Block, GPTSize, RandomWindows, encoded, random_windows, warmed_up_cosine, window_loss
from muon import MuonAdamW, embeddings_and_head
from pytorch_lightning import LightningModule, seed_everything
from text_data import load_text
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from typing_extensions import override

_GRADIENT_NORM = 1.0
_VALIDATION_WINDOWS = 512
_BETAS = (0.9, 0.95)  # what language models are trained with
_WEIGHT_DECAY = 0.1


class CharacterModel(LightningModule):
    """Learn to predict the next character.

    Args:
        network: what predicts.
        learning_rate: the largest.
        steps: optimizer steps of the whole training.
        optimizer: ``"adamw"``, or ``"muon"`` for the matrices of blocks and AdamW for all else.
    """

    def __init__(self, network: nn.Module, learning_rate: float, steps: int, optimizer: str = "adamw") -> None:
        super().__init__()
        self.network = network
        self.learning_rate = learning_rate
        self.steps = steps
        self.optimizer = optimizer

    @override
    def configure_model(self) -> None:
        if self.device_mesh is None or isinstance(self.network, FSDPModule):  # nobody shards, or has done
            return
        mesh = self.device_mesh["data_parallel"]
        for module in self.network.modules():
            if isinstance(module, Block):
                fully_shard(module, mesh=mesh)
        fully_shard(self.network, mesh=mesh)

    @override
    def training_step(self, windows: Tensor) -> Tensor:
        loss = window_loss(self.network, windows)
        self.log("train_loss", loss)
        return loss

    @override
    def validation_step(self, windows: Tensor) -> None:
        self.log("loss", window_loss(self.network, windows), on_epoch=True, prog_bar=True, sync_dist=True)

    @override
    def configure_optimizers(self) -> Any:
        optimizer: torch.optim.Optimizer
        if self.optimizer == "muon":
            elementwise = embeddings_and_head(self.network)
            optimizer = MuonAdamW(
                self.parameters(), self.learning_rate, _BETAS, weight_decay=_WEIGHT_DECAY, elementwise=elementwise
            )
        else:
            optimizer = torch.optim.AdamW(self.parameters(), self.learning_rate, _BETAS, weight_decay=_WEIGHT_DECAY)
        schedule = LambdaLR(optimizer, lambda step: warmed_up_cosine(step, self.steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main() -> None:
    """Train as the command line says."""
    parser = example_parser(__doc__ or "", epochs=20, batch_size=8, learning_rate=0.016, strategy="sparse_lags")
    parser.add_argument("--text", type=Path, help="UTF-8 text file; without it, Python's help pages")
    parser.add_argument("--epoch-steps", type=int, default=100, help="optimizer steps of an epoch (default 100)")
    for name, number in GPTSize()._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=number, help=f"of the network (default {number})")
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "muon"], help="adamw (default) or muon")
    parser.add_argument("--precision", default="32-true", help="32-true (default), bf16-mixed, 16-mixed")
    parser.add_argument("--compile", action="store_true", help="compile the network with torch.compile")
    options = parser.parse_args()

    seed_everything(options.seed, workers=True)
    text = encoded(load_text(options.text))
    size = GPTSize(options.length, options.width, options.blocks, options.heads)
    network: nn.Module = GPT(text.different, size)
    if options.compile:
        network = torch.compile(network)  # type: ignore[assignment]  # a module, though typed as a function
    trainer = build_trainer(
        parser,
        options,
        "gpt",
        metric="loss",
        gradient_clip_val=_GRADIENT_NORM,
        limit_train_batches=options.epoch_steps,
        precision=options.precision,
        use_distributed_sampler=False,
    )
    windows = RandomWindows(
        text.train,
        options.batch_size,
        size.length,
        seed=1000 * options.seed + trainer.global_rank,
        epoch_of=lambda: trainer.current_epoch,
    )
    fixed = random_windows(
        text.validation, _VALIDATION_WINDOWS, size.length, torch.Generator().manual_seed(options.seed)
    )
    trainer.fit(
        CharacterModel(network, options.lr, options.epochs * options.epoch_steps, options.optimizer),
        DataLoader(windows, batch_size=None),
        DataLoader(fixed, batch_size=64),  # type: ignore[arg-type]  # a tensor of rows serves as well
    )


if __name__ == "__main__":
    main()
