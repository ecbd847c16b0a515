from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_sparse.engine.collectives import Communicator, _all_gather_into
from lightning_sparse.schedule.costs import DIRECT_BYTES
from tests.helpers.devices import DEVICE
from tests.helpers.faults import GROUP_TIMEOUT


def gathered(rank, nbytes, dtype):
    collectives = Communicator(list(range(dist.get_world_size())), torch.device("cpu"))
    torch.manual_seed(rank)
    mine = torch.randint(-128, 128, (nbytes,), dtype=torch.int8).view(dtype)
    expected = [torch.empty_like(mine) for _ in range(collectives.world_size)]
    ring = "lightning_sparse.engine.collectives._all_gather_into"
    try:
        dist.all_gather(expected, mine)
        with patch(ring, wraps=_all_gather_into) as rings:
            received = collectives.all_gather(mine)
    finally:
        collectives.close()
    return received.view(torch.int8), torch.stack(expected).view(torch.int8), rings.call_count


@pytest.mark.parametrize(
    ("ranks", "nbytes", "dtype", "rings"),
    [
        (2, 8, torch.bfloat16, 1),
        (3, 0, torch.float32, 1),
        (3, 8, torch.uint8, 0),
        (4, DIRECT_BYTES // 4, torch.bfloat16, 0),
        (4, DIRECT_BYTES // 4 + 4, torch.float32, 1),
    ],
)
def test_an_all_gather_gives_what_torch_gives(pools, ranks, nbytes, dtype, rings):
    for received, expected, used in pools[ranks].run(gathered, nbytes, dtype):
        assert torch.equal(received, expected)
        assert used == rings


def added_up(rank, shape, dtype):
    collectives = Communicator(list(range(dist.get_world_size())), torch.device("cpu"))
    theirs = [
        torch.randn(shape, generator=torch.Generator().manual_seed(each)).mul(8).to(dtype)
        for each in range(collectives.world_size)
    ]
    mine = theirs[rank]
    expected = torch.stack(theirs).double().sum(dim=0)
    try:
        with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as rings:
            received = collectives.all_reduce(mine)
        assert received.data_ptr() == mine.data_ptr()
    finally:
        collectives.close()
    return received, expected, rings.call_count


@pytest.mark.parametrize(
    ("ranks", "shape", "dtype", "rings"),
    [
        (2, (5,), torch.int32, 1),
        (3, (0,), torch.float32, 1),
        (3, (5,), torch.int32, 0),
        (3, (5,), torch.float32, 0),
        (4, (3, 7), torch.bfloat16, 0),
        (4, (), torch.float32, 0),
        (3, (DIRECT_BYTES // 2 + 1,), torch.bfloat16, 1),
    ],
)
def test_an_all_reduce_adds_up_in_place_the_same_on_all_ranks(pools, ranks, shape, dtype, rings):
    sums = pools[ranks].run(added_up, shape, dtype)
    for received, expected, used in sums:
        assert torch.equal(received, sums[0][0])
        torch.testing.assert_close(received.double(), expected, rtol=0.02, atol=0.1)
        assert used == rings


def timeouts(rank, given):
    collectives = Communicator([0, 1], torch.device("cpu"), given)
    groups = (collectives.group, dist.group.WORLD)
    try:
        collectives.all_gather(torch.ones(1))  # the first to finish would close a connection in progress
        return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]
    finally:
        collectives.close()


def test_a_group_waits_as_long_as_the_jobs_own_unless_it_is_told(forked):
    ((ours, jobs),) = {tuple(each) for each in forked[2].run(timeouts, None)}
    assert ours == jobs == GROUP_TIMEOUT
    hour = timedelta(hours=1)
    assert forked[2].run(timeouts, hour) == [[hour, GROUP_TIMEOUT]] * 2


GLOO = (
    "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.2]:1: Connection reset by peer"
)
OF_OTHERS = [
    RuntimeError(GLOO),
    dist.DistBackendError("NCCL error, ncclRemoteError: A call failed possibly due to a remote process exiting"),
]
OF_THIS_RANK = [
    torch.OutOfMemoryError("CUDA out of memory"),
    dist.DistBackendError("NCCL error, ncclUnhandledCudaError: Call to CUDA function failed. 'out of memory'"),
    dist.DistBackendError("NCCL error, ncclInvalidUsage: Duplicate GPU detected"),
]


def meanings(rank, errors):
    collectives, found = Communicator([0, 1], DEVICE, timedelta(seconds=9)), []
    collectives.all_gather(torch.zeros(1, device=DEVICE))  # both ranks connect before either closes
    for error in errors:
        try:
            with collectives.translate_errors("a gradient"):
                raise error
        except RuntimeError as raised:
            found.append(f"{type(raised).__name__}: {raised}")
    collectives.close()
    return found


def test_what_other_ranks_cause_is_told_from_what_is_this_ranks_own(pair):
    for meant in pair.run(meanings, OF_OTHERS)[0]:
        assert meant.startswith(
            "ExchangeError: rank 0 of 2 waited in vain in all_gather of a gradient, with a timeout of 0:00:09"
        )
        assert "another rank has died, " in meant
    assert not any(meant.startswith("ExchangeError") for meant in pair.run(meanings, OF_THIS_RANK)[1])
