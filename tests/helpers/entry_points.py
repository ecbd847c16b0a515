"""A network and its data that can be trained through any entry point."""

import os
import warnings
from contextlib import contextmanager
from importlib import import_module

import torch
import torch.distributed as dist
from torch import nn

ROWS = 4  # of a batch


class Net(nn.Module):
    """A network with BatchNorm, which returns its loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, rows):
        """Return a loss as Hugging Face's Trainer wants it."""
        return {"loss": (self.network(rows) - rows).square().mean()}


def rows_of(rank, step):
    return torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(100 * rank + step))


def optimizer_of(net, settings=None):
    """Return AdamW, or the SGD of a compressor that carries its momentum, and a learning rate that falls by step."""
    if settings is not None and settings.get("compressor") == "dgc":
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)


def tensors_of(net):
    """Copy parameters and buffers, but the count of BatchNorm."""
    tensors = [*net.named_parameters(), *net.named_buffers()]
    return {name: each.detach().cpu().clone() for name, each in tensors if each.is_floating_point()}


@contextmanager
def as_hugging_face_wants(rank):
    """Be one of the processes that a launcher has started, and leave the warnings of Accelerate to itself."""
    ranks = str(dist.get_world_size())
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        import_module("accelerate.state").AcceleratorState._reset_state(reset_partial_state=True)
        yield
