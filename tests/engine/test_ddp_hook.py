"""What the hook keeps of the buckets that DDP hands it."""

import weakref
from typing import Any
from unittest import mock

import torch

from lightning_sparse.engine.ddp_hook import GradientStream
from lightning_sparse.testing.pool import Pool
from tests.helpers.sparse_ddp import Edges, backpropagate, batch, sparse_ddp


def train_watched(rank: int) -> tuple[int, int, int]:
    """Make three steps; return how many buckets the first had, how many of them were alive in the second, and the last.

    DDP makes its buckets anew between the first step and the forward of the second.
    """
    torch.manual_seed(0)
    seen: list[weakref.ref[torch.Tensor]] = []
    receive = GradientStream.receive

    def receive_watched(stream: GradientStream, bucket: Any) -> Any:
        seen.append(weakref.ref(bucket.buffer()))
        return receive(stream, bucket)

    with mock.patch.object(GradientStream, "receive", receive_watched), sparse_ddp(Edges()) as (ddp, engine):
        alive: list[int] = []
        first: list[weakref.ref[torch.Tensor]] = []
        ddp.module.register_forward_pre_hook(lambda *_: alive.append(sum(each() is not None for each in first)))
        for step in range(3):
            backpropagate(ddp, engine, ddp(batch(rank, step)))
            engine.settle()
            first[:] = first or seen
    return len(first), alive[1], alive[2]


def test_the_memory_of_the_first_buckets_is_given_back(pair: Pool) -> None:
    for buckets, in_second_step, in_third_step in pair.run(train_watched):
        assert buckets > 0
        assert in_second_step == in_third_step == 0
