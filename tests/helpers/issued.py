"""Record the collectives that ranks issue, from any thread and in the order of calls."""

import random
import time
from collections import deque
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lightning_sparse.engine.engine as engine_module
from lightning_sparse.engine.collectives import ExchangeWorker


class Issued(NamedTuple):
    communicator: str
    ranks: tuple[int, ...]
    operation: str
    numels: tuple[int, ...]  # sizes of the tensors; empty if ranks send different sizes


class Recording(TorchDispatchMode):
    """Record the collectives issued on a thread, including collectives from C++ such as DDP's reducer."""

    def __init__(self, issued):
        super().__init__()
        self._issued = issued

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.namespace == "c10d":
            self._issued.append(_issued(operation, args))
        return operation(*args, **(kwargs or {}))


def _issued(operation, args):
    groups = (each for each in args if isinstance(each, torch.ScriptObject))
    group = dist.ProcessGroup.unbox(next(groups))
    name = operation.__name__.partition(".")[0].strip("_")
    numels = () if "alltoall" in name else tuple(each.numel() for each in tree_leaves(args) if torch.is_tensor(each))
    return Issued(group.group_name, tuple(dist.get_process_group_ranks(group)), name, numels)


@contextmanager
def recording(seconds=0.0):
    """Record collectives, and let exchange workers sleep for ``seconds`` before each task."""
    issued = []

    class Recorded(ExchangeWorker):
        def submit(self, task):
            def recorded():
                time.sleep(seconds)
                with Recording(issued):
                    return task()

            return super().submit(recorded)

    with mock.patch.object(engine_module, "ExchangeWorker", Recorded), Recording(issued):
        yield issued


def stuck_at(recordings):
    """Return the collectives of a deadlock, or ``None``.

    The model is a device with a single queue: each collective waits for the previous collective. NCCL permits this.
    """
    queues = [deque(issued) for issued in recordings]
    while any(queues):
        heads = [queue[0] if queue else None for queue in queues]
        begun = next((each for each in heads if each and all(heads[rank] == each for rank in each.ranks)), None)
        if begun is None:
            return heads
        for rank in begun.ranks:
            queues[rank].popleft()
    return None


class Sluggish(ExchangeWorker):
    """An exchange worker that sleeps before every task. The time is random and differs between ranks."""

    def submit(self, task):
        chance = random.Random(f"{dist.get_rank()} {time.perf_counter_ns()}")

        def run_late():
            time.sleep(chance.random() * 0.005)
            return task()

        return super().submit(run_late)
