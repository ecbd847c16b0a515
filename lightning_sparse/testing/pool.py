"""Processes that start once and then run many functions, each with a time limit."""

import copy
import io
import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Optional
from unittest.mock import patch

import torch
import torch.distributed as dist

from lightning_sparse.testing.tensors import moved


class RemoteError(AssertionError):
    """A function failed on some ranks. The message has the traceback of each failed rank."""


class Pool:
    """A process group of ``ranks`` processes that run functions. Tensors in results are returned as CPU tensors.

    Args:
        ranks: number of processes, one for each rank.
        limit: seconds from the start of a function to the result of the first rank.
        context: how ``multiprocessing`` starts processes; ``None`` to start new interpreters.
        **group: arguments of ``init_process_group``. Only the default backend, gloo, lets several ranks share a GPU.
    """

    def __init__(self, ranks: int, limit: float = 120.0, context: Any = None, **group: Any) -> None:
        self.ranks = ranks
        self._limit = limit
        self._context: Any = context or multiprocessing.get_context("spawn")
        self._group = {"backend": "gloo", **group}
        self._members: list[tuple[Any, Connection]] = []  # pairs of a process and a connection to this process, by rank
        self._stores: dict[int, str] = {}  # path of the `FileStore` of the present process group, by number of ranks

    def first(self, ranks: int) -> "Pool":
        """Return a pool of the first ``ranks`` processes, which form a new process group when a function runs."""
        smaller = copy.copy(self)
        smaller.ranks = ranks
        return smaller

    def run(self, function: Callable[..., Any], *args: Any, **limits: float) -> list[Any]:
        """Return each rank's result of ``function(rank, *args)``, or raise ``RemoteError`` with all failures."""
        answers = self.answers(function, *args, **limits)
        failures = [f"rank {rank}: {failure}" for rank, (failure, _) in enumerate(answers) if failure]
        if failures:
            raise RemoteError("\n".join(failures))
        return [result for _, result in answers]

    def answers(
        self, function: Callable[..., Any], *args: Any, timeout: float = 0.0, patience: float = 0.0
    ) -> list[tuple[Optional[str], Any]]:
        """Run ``function(rank, *args)`` on all ranks. Return ``(None, result)`` or ``(failure, None)`` of each rank.

        The first result must arrive within ``timeout`` seconds (0: the pool's ``limit``), and each further result
        within ``patience`` seconds (0: ``timeout``) after another result. After a failure, all processes end.
        """
        self._start()
        waiting = connections = [connection for _, connection in self._members[: self.ranks]]
        for connection in connections:
            _send(connection, (self.ranks, self._stores[self.ranks], function, args))
        limit, answers = timeout or self._limit, {}
        while waiting and (ready := wait(waiting, limit)):
            answers.update({connection: _answer(connection) for connection in waiting if connection in ready})
            waiting = [connection for connection in waiting if connection not in answers]
            limit = patience or limit
        answers.update(dict.fromkeys(waiting, (f"no answer within {limit} s", None)))
        in_order = [answers[connection] for connection in connections]
        if any(failure for failure, _ in in_order):
            self.stop()
        return in_order

    def stop(self) -> None:
        """Kill all processes, including processes that other pools share."""
        for process, _ in self._members:
            process.kill()
            process.join()
        self._members.clear()
        self._stores.clear()

    def _start(self) -> None:
        for rank in range(len(self._members), self.ranks):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, rank, self._group), daemon=True)
            process.start()
            self._members.append((process, ours))
        if self.ranks not in self._stores:
            self._stores.clear()
            self._stores[self.ranks] = str(Path(tempfile.mkdtemp()) / "store")


def _send(connection: Connection, content: Any) -> None:
    written = io.BytesIO()  # `Connection.send` opens shared files, which takes half the time of a short fit
    torch.save(content, written, pickle_protocol=4)  # older pickle protocols cannot store a `torch.memory_format`
    connection.send_bytes(written.getbuffer())


def _receive(connection: Connection) -> Any:
    return torch.load(io.BytesIO(connection.recv_bytes()), weights_only=False)


def _answer(connection: Connection) -> Any:
    try:
        return _receive(connection)
    except EOFError:
        return "the process died", None


def _serve(connection: Connection, rank: int, group: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    joined = ""
    while True:
        try:
            ranks, store, function, args = _receive(connection)
        except EOFError:
            return
        try:
            if store != joined:
                if joined:
                    dist.destroy_process_group()
                dist.init_process_group(init_method=f"file://{store}", rank=rank, world_size=ranks, **group)
                joined = store
            with patch.dict(os.environ):  # a seed that Lightning writes to os.environ must not affect the next function
                answer = moved(function(rank, *args), "cpu")
            _send(connection, (None, answer))
        except BaseException:
            _send(connection, (traceback.format_exc(), None))
