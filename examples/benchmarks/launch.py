"""Run a program on every host of a network, and stay with it until it is done."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from network import ShapedNetwork

_MASTER_PORT = 29533  # the namespaces are empty, so any port is free
_POLL_SECONDS = 0.2
_LAST_LINES = 20  # of the log of a program that failed


class WorkerError(RuntimeError):
    """A host's program failed, or took too long; the message holds the end of its log."""


def run_on_all_hosts(
    network: ShapedNetwork,
    program: Sequence[str],
    logs: Path,
    deadline: float,
    show: str,
    ranks_per_host: int = 1,
) -> None:
    """Run a Python program on every host until all have ended.

    Args:
        network: whose hosts.
        program: script and arguments; ``{rank}`` in an argument is replaced.
        logs: folder for what the ranks print.
        deadline: when it must be done, on ``time.monotonic()``.
        show: lines of rank 0 that start like this are printed here as they come.
        ranks_per_host: that run on each, one after the other.

    Raises:
        WorkerError: if a rank fails, or the deadline passes.
    """
    paths = [logs / f"rank{rank}.log" for rank in range(network.hosts * ranks_per_host)]
    processes = [_start(network, rank, program, path, ranks_per_host) for rank, path in enumerate(paths)]
    with paths[0].open() as progress:
        while any(process.poll() is None for process in processes):
            _print_lines(progress, show)
            _check(processes, paths, deadline)
            time.sleep(_POLL_SECONDS)
        _print_lines(progress, show)
    _check(processes, paths, deadline)


def rank_environment(network: ShapedNetwork, rank: int, ranks_per_host: int = 1) -> dict[str, str]:
    """Return the environment variables by which a rank finds the others."""
    return {
        **os.environ,
        "MASTER_ADDR": network.address(0),
        "MASTER_PORT": str(_MASTER_PORT),
        "WORLD_SIZE": str(network.hosts * ranks_per_host),
        "NODE_RANK": str(rank),
        "LOCAL_RANK": "0",
        "GLOO_SOCKET_IFNAME": "eth0",
        # Unless told, Lightning gives every rank a thread for each core, and here all hosts share the cores.
        "OMP_NUM_THREADS": "1",
    }


def _start(
    network: ShapedNetwork, rank: int, program: Sequence[str], log: Path, ranks_per_host: int
) -> subprocess.Popen[Any]:
    command = [sys.executable, *(argument.replace("{rank}", str(rank)) for argument in program)]
    with log.open("w") as output:
        environment = rank_environment(network, rank, ranks_per_host)
        return network.start(rank // ranks_per_host, command, environment, stdout=output, stderr=subprocess.STDOUT)


def _print_lines(log: TextIO, start: str) -> None:
    for line in log.readlines():
        if line.startswith(start):
            print(f"  {line.rstrip()}", flush=True)


def _check(processes: Sequence[subprocess.Popen[Any]], logs: Sequence[Path], deadline: float) -> None:
    for rank, (process, log) in enumerate(zip(processes, logs)):
        if process.poll():
            raise WorkerError(f"rank {rank} ended with status {process.returncode}. {_end_of(log)}")
    if time.monotonic() > deadline:
        raise WorkerError(f"the time is up (see --timeout). {_end_of(logs[0])}")


def _end_of(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    return "\n".join([f"The end of {log}:", *lines])
