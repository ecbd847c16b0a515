"""The models of the step benchmark, each with the batches that it trains on."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent.parent))
from gpt import GPT, GPTSize
from paced import PACED, Paced, PacedModel, PacedSGD

VOCABULARY = 10_000


class Lstm(nn.Module):
    """Word-level language model, 20 M parameters in 11 tensors; its gradients are as large as its steps are short."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 650)
        self.lstm = nn.LSTM(650, 650, num_layers=2, batch_first=True)
        self.decoder = nn.Linear(650, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens ``[batch, time]`` to logits ``[batch, time, vocabulary]``."""
        logits: Tensor = self.decoder(self.lstm(self.embedding(tokens))[0])
        return logits


class DeepNarrow(nn.Module):
    """60 blocks of a small layer and a normalisation: 4 M parameters in 240 tensors, many of them tiny."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(256, 256) for _ in range(60))
        self.norms = nn.ModuleList(nn.LayerNorm(256) for _ in range(60))

    def forward(self, features: Tensor) -> Tensor:
        """Map ``[batch, 256]`` to ``[batch, 256]``."""
        for linear, norm in zip(self.linears, self.norms):
            features = features + functional.relu(linear(norm(features)))
        return features


class Transformer(nn.Module):
    """12 encoder layers of width 256, about 10 M parameters in 147 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1_000, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=12, enable_nested_tensor=False)
        self.decoder = nn.Linear(256, 1_000)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens ``[batch, time]`` to logits ``[batch, time, 1000]``."""
        logits: Tensor = self.decoder(self.layers(self.embedding(tokens)))
        return logits


class Workload(NamedTuple):
    """A model and its batches.

    Attributes:
        network: builds the model.
        batch: makes one batch of inputs and targets.
        loss: of outputs and targets.
        optimizer: of its parameters; SGD without momentum unless a row says otherwise.
    """

    network: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.01)


def _tokens(batch: int, time: int, vocabulary: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randint(vocabulary, (batch, time)), torch.randint(vocabulary, (batch, time)))


def _token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


_GPT = GPTSize()
_CHARACTERS = 96

WORKLOADS = {
    "gpt": Workload(lambda: GPT(_CHARACTERS, _GPT), _tokens(8, _GPT.length, _CHARACTERS), _token_loss),
    "lstm": Workload(Lstm, _tokens(10, 10, VOCABULARY), _token_loss),
    "deep_narrow": Workload(DeepNarrow, lambda: (torch.randn(32, 256), torch.randn(32, 256)), functional.mse_loss),
    "transformer": Workload(Transformer, _tokens(4, 32, 1_000), _token_loss),
}


def million_layers(layers: int) -> Workload:
    """Return a model of linear layers of a million elements each, as in a language model of moderate size."""
    return Workload(
        lambda: nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(layers))),
        lambda: (torch.randn(4, 1000), torch.randn(4, 1000)),
        functional.mse_loss,
    )


def workload(name: str, slower: float) -> Workload:
    """Return a workload by its name; one of :data:`~paced.PACED` computes more slowly by a factor."""
    return WORKLOADS[name] if name in WORKLOADS else _paced(PACED[name], slower)


def _paced(model: PacedModel, slower: float) -> Workload:
    return Workload(
        lambda: Paced(model, slower),
        lambda: (torch.zeros(1), torch.zeros(1)),
        lambda outputs, targets: outputs,
        partial(PacedSGD, lr=0.01),
    )


class BenchmarkModule(LightningModule):
    """Train a workload on the same few random batches.

    Attributes:
        build_optimizer: of its parameters; the workload's unless somebody says otherwise.
    """

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.workload = workload
        self.build_optimizer = workload.optimizer
        self.network = workload.network()

    def configure_model(self) -> None:
        """Shard the network where it is to be, in two replicas if FSDP is given all ranks."""
        if self.device_mesh is None:
            return
        mesh = self.device_mesh["data_parallel"]
        if mesh.size() == dist.get_world_size():
            mesh = init_device_mesh("cpu", (2, mesh.size() // 2), mesh_dim_names=("replicate", "shard"))
        for module in self.network.modules():
            if isinstance(module, nn.TransformerEncoderLayer):
                fully_shard(module, mesh=mesh)
        fully_shard(self.network, mesh=mesh)

    def training_step(self, batch: list[Tensor], batch_index: int) -> Tensor:
        """Return the loss of one batch."""
        inputs, targets = batch
        return self.workload.loss(self.network(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return it."""
        return self.build_optimizer(self.parameters())

    def batches(self, count: int) -> DataLoader[tuple[Tensor, ...]]:
        """Return a loader of ``count`` batches made beforehand."""
        inputs, targets = zip(*(self.workload.batch() for _ in range(count)))
        return DataLoader(TensorDataset(torch.stack(inputs), torch.stack(targets)), batch_size=None)
