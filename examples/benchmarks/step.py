"""Measure the time of a training step over a network of given rate and delay, one row for each way to train.

All hosts are network namespaces on this machine, so this needs Linux, root and iproute2, and no other machine::

    sudo python examples/benchmarks/step.py
    sudo python examples/benchmarks/step.py --hosts 2 --rate 100mbit --delay 1ms --workloads lstm
    sudo python examples/benchmarks/step.py --workloads deep_narrow --rounds 1 --steps 8   # to see that it works
    sudo python examples/benchmarks/step.py --hosts 2 --ranks-per-host 2 --workloads transformer --rows hsdp

Rows take turns, round after round, in the same processes, so that whatever else the machine does hits all alike.

The workloads of ``paced.py`` wait as long as a GPU computes. With ``--slower 8`` they and the network are eight times
as slow, so that what hosts that share a processor select and copy weighs an eighth; times are printed divided by 8::

    sudo python examples/benchmarks/step.py --workloads resnet50 --slower 8 --rows ddp "sparse_lags 0.01"
"""

import argparse
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

import torch
from launch import WorkerError, run_on_all_hosts
from models import WORKLOADS
from network import NetworkRefusedError, ShapedNetwork
from paced import PACED
from plot import draw
from results import Line, Measurement, as_csv, as_text, summarise
from rows import DDP, DEFAULT_ROWS, NO_COMMUNICATION, ROWS
from shape import parse_delay, parse_rate, slower_delay, slower_rate

_WORKER = Path(__file__).with_name("worker.py")
_NOTES = [
    "median, spread (interquartile range): of the time of a batch, over the batches of all ranks and rounds",
    "to_ddp, to_no_communication: median relative to that of these rows in the same run",
    "longest: batch of a step or of a round of local steps, relative to the median batch; median over steps or rounds",
    "sent: left a rank for each batch, as counted; link: transmitted by a host's device for each batch",
]


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Measure what the command line asks for; print the table, and write it and its picture."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.slower != 1 and not PACED.keys() >= set(options.workloads):
        parser.error(f"--slower is for workloads that wait: {', '.join(PACED)}")
    try:
        parse_rate(options.rate), parse_delay(options.delay)
    except ValueError as error:
        parser.error(str(error))
    try:
        _measure_all(options)
    except (NetworkRefusedError, WorkerError) as error:
        raise SystemExit(f"step.py: {error}") from error


def _measure_all(options: argparse.Namespace) -> None:
    deadline = time.monotonic() + options.timeout
    options.output.mkdir(parents=True, exist_ok=True)
    facts = _machine()
    print("\n".join(facts))
    lines: list[Line] = []
    for workload in options.workloads:
        rate, delay = slower_rate(options.rate, options.slower), slower_delay(options.delay, options.slower)
        with ShapedNetwork(options.hosts, rate, delay) as network:
            print(f"\n{workload}, {options.slower:g} times as slow: {network.description}", flush=True)
            measurements = _measure(network, workload, options, deadline)
        newest = summarise(workload, measurements, DDP, NO_COMMUNICATION)
        print(as_text(newest), flush=True)
        _compare_ddp(workload, newest, options)
        lines += newest
        # After every workload, so that a later one that fails takes nothing with it.
        (options.output / "step.csv").write_text(as_csv(lines, [*facts, network.description, *_NOTES]))
    print("\n" + "\n".join(_NOTES))
    _draw(lines, network.description, options.output)


def _measure(
    network: ShapedNetwork, workload: str, options: argparse.Namespace, deadline: float
) -> dict[str, list[Measurement]]:
    logs = options.output / "logs" / workload
    logs.mkdir(parents=True, exist_ok=True)
    ranks = options.hosts * options.ranks_per_host
    command = [str(_WORKER), "--workload", workload, "--hosts", str(ranks), "--rounds", str(options.rounds)]
    command += ["--steps", str(options.steps), "--warm-up", str(options.warm_up), "--slower", str(options.slower)]
    command += ["--output", str(logs / "rank{rank}.json"), "--rows", *options.rows]
    run_on_all_hosts(network, command, logs, deadline, show="round ", ranks_per_host=options.ranks_per_host)
    pooled: dict[str, list[Measurement]] = {row: [] for row in options.rows}
    for rank in range(ranks):
        for row, seen in json.loads((logs / f"rank{rank}.json").read_text()).items():
            pooled[row] += [Measurement(*fields) for fields in seen]
    return pooled


def _compare_ddp(workload: str, lines: Sequence[Line], options: argparse.Namespace) -> None:
    for line in lines:
        if line.row == DDP and workload in PACED:
            least_ms = 1e3 * PACED[workload].least_ddp_seconds(options.hosts, parse_rate(options.rate))
            print(
                f"{DDP}: {line.median_ms / least_ms:.2f} times the {least_ms:.0f} ms that its forward and its bytes,"
                " 2 (n - 1) / n of all, take at this rate",
                flush=True,
            )


def _draw(lines: Sequence[Line], title: str, output: Path) -> None:
    try:
        draw(lines, title, output / "step.png")
    except ImportError:
        print("No picture: it needs matplotlib (pip install matplotlib).")


def _machine() -> list[str]:
    return [
        f"command: python {shlex.join(sys.argv)}",
        f"cores: {os.cpu_count()}, kernel: {platform.release()}, python {platform.python_version()},"
        f" torch {torch.__version__}",
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks-per-host", type=int, default=1, help="that share its device")
    parser.add_argument("--rate", default="1gbit", help="of each host's egress")
    parser.add_argument("--delay", default="100us", help="one way, or 0")
    workloads = [*WORKLOADS, *PACED]
    parser.add_argument("--workloads", nargs="+", choices=workloads, default=["lstm", "deep_narrow", "transformer"])
    parser.add_argument("--slower", type=float, default=1.0, help=f"factor of time, of {', '.join(PACED)} only")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=DEFAULT_ROWS, metavar="ROW", help=f"{list(ROWS)}")
    parser.add_argument("--rounds", type=int, default=2, help="times that each row takes its turn")
    parser.add_argument("--steps", type=int, default=10, help="measured in a turn")
    parser.add_argument("--warm-up", type=int, default=4, help="steps before them")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for everything")
    parser.add_argument("--output", type=Path, default=Path(".benchmarks/step"), help="folder for table and picture")
    return parser


if __name__ == "__main__":
    main()
