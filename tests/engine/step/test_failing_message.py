"""An error of the exchange worker while a message of a dense step is on its way: closing does not wait for that."""

import time
from contextlib import suppress
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_sparse.engine.collectives import Communicator
from tests.helpers.sparse_ddp import sparse_ddp

SLOW = 8.0  # seconds after which the other rank leaves, and what it has not sent is given up


def close_after_an_error(rank):
    """Fail in the second message, where the other rank has not sent the first; return the seconds that closing took."""
    begin_all_reduce, sent = Communicator.begin_all_reduce, []

    def fail_in_the_second(collectives, tensor):
        sent.append(tensor)
        if len(sent) > 1:
            raise MemoryError("no room for the second message")
        return begin_all_reduce(collectives, tensor)

    model = nn.Sequential(*(nn.Linear(600, 600) for _ in range(3)))  # 1.4 MB each: a message of its own
    with sparse_ddp(model) as (ddp, engine):
        engine.send_dense(True)
        ddp(torch.ones(1, 600)).sum().backward()  # all ranks agree on an order
        if rank == 1:
            time.sleep(SLOW)
            return None
        with mock.patch.object(Communicator, "begin_all_reduce", fail_in_the_second), suppress(MemoryError):
            ddp(torch.ones(1, 600)).sum().backward()
        begun = time.perf_counter()
    assert len(sent) == 2
    return time.perf_counter() - begun


@pytest.mark.exhaustive
def test_closing_does_not_wait_for_ranks_that_never_send(forked):
    seconds, _ = forked[2].run(close_after_an_error)
    assert seconds < 0.9 * SLOW
