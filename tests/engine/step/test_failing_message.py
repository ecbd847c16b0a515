"""Closing after an error of the exchange worker does not wait for a pending dense message."""

import time
from contextlib import suppress
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_sparse.engine.collectives import Communicator
from tests.helpers.sparse_ddp import sparse_ddp

SLOW = 8.0  # seconds until the other rank stops, with unsent messages


def close_after_an_error(rank):
    """Fail in the second message before the other rank has sent the first. Return the seconds of the close."""
    begin_all_reduce, sent = Communicator.begin_all_reduce, []

    def fail_in_the_second(collectives, tensor):
        sent.append(tensor)
        if len(sent) > 1:
            raise MemoryError("no room for the second message")
        return begin_all_reduce(collectives, tensor)

    model = nn.Sequential(*(nn.Linear(600, 600) for _ in range(3)))  # 1.4 MB per layer, so one message per layer
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
