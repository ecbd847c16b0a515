"""A CPU backend over gloo with NCCL's restrictions, return values and arguments."""

from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from typing import ClassVar, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

NAME = "nccl_like"
_WITHOUT_NAME = (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128)


class Communicator(NamedTuple):
    ranks: tuple[int, ...]
    timeout: timedelta
    calls: Counter[str]  # counts calls: NCCL creates a communicator, and allocates its GPU memory, in the first call


class NCCLLike(dist.ProcessGroup):
    """A process group over gloo with NCCL's restrictions.

    Tensors must be dense and no 16-bit integers. Synchronous calls return no work. Gathered sizes must be equal.
    ``made`` holds the live groups of this process by name.
    """

    made: ClassVar[dict[str, Communicator]] = {}

    def __init__(self, asked, options):
        super().__init__(asked.group_rank, asked.group_size)
        self._store = asked.store
        self._gloo = dist.ProcessGroupGloo(asked.store, asked.group_rank, asked.group_size, asked.timeout)
        self._name = asked.group_id
        self._size, self._rank = asked.group_size, asked.group_rank
        ranks = tuple(asked.global_ranks_in_group) or tuple(range(self._size))
        NCCLLike.made[self._name] = Communicator(ranks, asked.timeout, Counter())

    def size(self):
        return self._size

    def rank(self):
        return self._rank

    @property
    def pg_name(self):
        return self._name

    @property
    def group_name(self):
        return self._name

    def _get_backend(self, device):
        return self._gloo

    def get_group_store(self):
        return self._store

    def shutdown(self):
        """Do nothing, and so retain the record of this group's calls."""

    def perform(self, name, arguments):
        for tensor in tree_leaves(arguments[:2]):
            if torch.is_tensor(tensor):
                _mind(tensor)
        NCCLLike.made[self._name].calls[name] += 1
        options = arguments[-1]
        if getattr(options, "reduceOp", None) == dist.ReduceOp.AVG and not arguments[0][0].is_floating_point():
            options.reduceOp = dist.ReduceOp.SUM
            work = self._gloo.allreduce(*arguments)
            work.wait()
            arguments[0][0].div_(self._size, rounding_mode="trunc")
        else:
            work = getattr(self._gloo, name)(*arguments)
        if getattr(arguments[-1], "asyncOp", True):
            return work
        work.wait()
        return None


def _mind(tensor):
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise ValueError("Tensors must be CUDA and dense")
    if tensor.dtype in _WITHOUT_NAME:
        raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")


def _named(name):
    return lambda self, *arguments, **named: self.perform(name, (*arguments, *named.values()))


_NAMES = ["allreduce", "broadcast", "allgather", "barrier", "reduce", "gather", "scatter", "reduce_scatter", "alltoall"]
for _name in (*_NAMES, "alltoall_base", "_allgather_base", "_reduce_scatter_base"):
    setattr(NCCLLike, _name, _named(_name))
for _new, _old in {
    "all_gather_single": "_allgather_base",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
}.items():
    setattr(NCCLLike, _new, _named(_old))

dist.Backend.register_backend(NAME, NCCLLike, extended_api=True, devices=["cpu"])


@contextmanager
def taken_for_nccl():
    """Report this backend as NCCL. Yield the groups and their call counts."""
    ask = dist.get_backend_config
    for each in NCCLLike.made.values():
        each.calls.clear()
    with mock.patch.object(dist, "get_backend_config", lambda group=None: ask(group).replace(NAME, "nccl")):
        yield NCCLLike.made
