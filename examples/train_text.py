"""Train a word-level LSTM language model with the Penn Treebank recipe, on processes that send sparse gradients.

By default the text is Python's own help pages, which need no download; ``--text`` trains on any UTF-8 text file. The
recipe is the usual one: windows of 35 words, 20 columns on two processes, hidden state carried from one window to the
next, gradient norm clipped to 0.25, plain SGD with a high learning rate, divided by 4 whenever the validation
perplexity does not fall.

So short a text gets a small model, in which one matrix embeds and predicts words, and 20 epochs, by which the
validation perplexity of ordinary DDP hardly falls. Whoever stops earlier compares speeds, not results: sparse
training sends part of every gradient late, and may lag behind while perplexity falls fast.

One process, then two, then two with ordinary DDP::

    python examples/train_text.py --devices 1
    python examples/train_text.py --density 0.01
    python examples/train_text.py --strategy ddp

Two nodes with two processes each; the first command on a host that the other reaches as ``first``::

    MASTER_ADDR=first MASTER_PORT=29500 NODE_RANK=0 python examples/train_text.py --nodes 2 --devices 2
    MASTER_ADDR=first MASTER_PORT=29500 NODE_RANK=1 python examples/train_text.py --nodes 2 --devices 2

The same under SLURM::

    srun --nodes=2 --ntasks-per-node=2 python examples/train_text.py --nodes 2 --devices 2

A larger text, such as the King James Bible of Debian's package bible-kjv, as long as the Penn Treebank::

    bible -f gen1:1-rev22:21 > bible.txt
    python examples/train_text.py --text bible.txt --vocabulary 10000
"""

from argparse import BooleanOptionalAction
from pathlib import Path
from typing import Any, Optional

import torch
from command_line import build_trainer, example_parser
from pytorch_lightning import LightningModule, seed_everything
from text_data import NOT_A_TARGET, TextDataModule, Window, load_text
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics.text import Perplexity
from typing_extensions import override

_GRADIENT_NORM = 0.25

LstmState = tuple[Tensor, Tensor]


class WordLstm(nn.Module):
    """Two LSTM layers between an embedding and its inverse.

    Args:
        vocabulary: number of words.
        hidden: width of every layer.
        is_tied: whether words are embedded and predicted by the same matrix.
        dropout: probability, between layers.
    """

    def __init__(self, vocabulary: int, hidden: int, is_tied: bool, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.lstm = nn.LSTM(hidden, hidden, num_layers=2, dropout=dropout, batch_first=True)
        self.decoder = nn.Linear(hidden, vocabulary)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        if is_tied:
            self.decoder.weight = self.embedding.weight

    @override
    def forward(self, inputs: Tensor, state: Optional[LstmState]) -> tuple[Tensor, LstmState]:
        """Map words ``[columns, time]`` to logits ``[columns, time, vocabulary]``, and read on from a state."""
        features, state = self.lstm(self.dropout(self.embedding(inputs)), state)
        return self.decoder(self.dropout(features)), state


class LanguageModel(LightningModule):
    """Learn to predict the next word; a window is read on from where the one before it ended.

    Args:
        network: what predicts.
        learning_rate: of SGD without momentum, at the start.
    """

    def __init__(self, network: WordLstm, learning_rate: float) -> None:
        super().__init__()
        self.network = network
        self.perplexity = Perplexity(ignore_index=NOT_A_TARGET)
        self.learning_rate = learning_rate
        self._state: Optional[LstmState] = None

    @override
    def on_train_epoch_start(self) -> None:
        self._state = None

    @override
    def on_validation_epoch_start(self) -> None:
        self._state = None

    @override
    def training_step(self, window: Window) -> Tensor:
        loss = functional.cross_entropy(self._read(window.inputs).flatten(0, 1), window.targets.flatten())
        self.log("train_loss", loss)
        return loss

    @override
    def validation_step(self, window: Window) -> None:
        self.perplexity.update(self._read(window.inputs), window.targets)
        self.log("perplexity", self.perplexity, on_epoch=True, prog_bar=True, batch_size=len(window.inputs))

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.learning_rate)
        scheduler = ReduceLROnPlateau(optimizer, factor=0.25, patience=0, threshold=0.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "perplexity"}}

    def _read(self, inputs: Tensor) -> Tensor:
        logits: Tensor
        logits, (hidden, cell) = self.network(inputs, self._state)
        self._state = hidden.detach(), cell.detach()
        return logits


def main() -> None:
    """Train as the command line says."""
    parser = example_parser(__doc__ or "", epochs=20, batch_size=10, learning_rate=20.0)
    parser.add_argument("--text", type=Path, help="UTF-8 text file; without it, Python's help pages")
    parser.add_argument("--vocabulary", type=int, default=10_000, help="different words at most (default 10000)")
    parser.add_argument("--bptt", type=int, default=35, help="words in a window (default 35)")
    parser.add_argument("--hidden", type=int, default=100, help="width of every layer (default 100)")
    parser.add_argument("--dropout", type=float, default=0.2, help="probability (default 0.2)")
    parser.add_argument(
        "--tied", action=BooleanOptionalAction, default=True, help="embed and predict words with the same matrix"
    )
    options = parser.parse_args()

    seed_everything(options.seed, workers=True)
    words = TextDataModule(load_text(options.text), options.vocabulary, options.batch_size, options.bptt)
    network = WordLstm(len(words.vocabulary), options.hidden, options.tied, options.dropout)
    trainer = build_trainer(
        parser,
        options,
        "text",
        metric="perplexity",
        gradient_clip_val=_GRADIENT_NORM,
        use_distributed_sampler=False,
    )
    trainer.fit(LanguageModel(network, options.lr), words)


if __name__ == "__main__":
    main()
