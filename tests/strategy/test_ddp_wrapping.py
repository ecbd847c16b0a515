"""The wrapper of rounds of local steps, which exchanges nothing by itself."""

import torch
from torch import nn

from lightning_sparse.strategy.ddp_wrapping import DDPWrapping
from tests.helpers.devices import DEVICE


class Tied(nn.Module):
    """An embedding that is the head, too, and parameters of the module itself."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(1000, 32), nn.Linear(32, 1000, bias=False)
        self.head.weight = self.words.weight
        self.positions, self.scale = nn.Parameter(torch.ones(50, 32)), nn.Parameter(torch.ones(1))

    def forward(self, words):
        return self.head(self.words(words) * self.scale + self.positions[0])


def elements_in_buckets(rank):
    """Return how many elements the buckets of the wrapper have memory for."""
    devices = None if DEVICE.type == "cpu" else [0]
    ddp = DDPWrapping().wrap(Tied().to(DEVICE), devices, {}, is_silent=True)
    return sum(bucket.buffer().numel() for bucket in ddp.reducer._get_zeros_like_grad_buckets())


def test_buckets_of_local_steps_take_no_memory(pair):
    assert pair.run(elements_in_buckets) == [1, 1]
