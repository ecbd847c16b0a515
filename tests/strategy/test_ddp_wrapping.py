"""The wrapper, which exchanges nothing by itself."""

import copy

import torch
from torch import nn

from lightning_sparse.strategy.ddp_wrapping import wrap
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
    ddp = wrap(Tied().to(DEVICE), devices, {})
    return sum(bucket.buffer().numel() for bucket in ddp.reducer._get_zeros_like_grad_buckets())


def test_buckets_take_no_memory(pair):
    assert pair.run(elements_in_buckets) == [1, 1]


def train_a_copy(rank):
    devices = None if DEVICE.type == "cpu" else [0]
    ddp = copy.deepcopy(wrap(Tied().to(DEVICE), devices, {}))
    ddp.training = False  # as the Trainer has it, which calls train() of the module inside
    words = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with torch.no_grad():
        seen = ddp(words).shape
    try:
        ddp(words)
    except RuntimeError as error:
        return tuple(seen), str(error)
    return tuple(seen), ""


def test_a_copy_may_be_looked_at_and_not_trained(pair):
    for seen, said in pair.run(train_a_copy):
        assert seen == (1, 1000)
        assert "copy the module inside" in said
