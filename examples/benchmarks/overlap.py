"""Draw one step whose exchange hides behind backward, beside one of the same training that hides nothing.

Both hosts are network namespaces on this machine, so this needs Linux, root, iproute2 and matplotlib::

    sudo python examples/benchmarks/overlap.py

What it draws is `docs/images/overlap.png`.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist
from launch import WorkerError, run_on_all_hosts
from matplotlib.figure import Figure
from models import WORKLOADS, BenchmarkModule
from network import NetworkRefusedError, ShapedNetwork
from rows import Row
from training import begin_rank, train

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.callbacks import OverlapTimeline
from lightning_sparse.callbacks.reporting.pictures import draw_steps
from lightning_sparse.engine.observe.timeline import RecordedStep

_HOSTS = 2
_TRIAL_STEPS = {"single": 3, "merged": 90}  # until the plan is followed
_RECORDED_STEPS = 9  # of which the one of median length is drawn
_WORKLOAD = "transformer"


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Train twice over a shaped link, and draw."""
    options = _parser().parse_args(arguments)
    if options.as_rank:
        _train_and_draw(options)
        return
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        with ShapedNetwork(_HOSTS, options.rate, options.delay) as network:
            print(f"command: python {shlex.join(sys.argv)}\n{_WORKLOAD}: {network.description}")
            command = [__file__, "--as-rank", "--output", str(options.output)]
            deadline = time.monotonic() + options.timeout
            run_on_all_hosts(network, command, options.output, deadline, "SparseDDPStrategy")
    except (NetworkRefusedError, WorkerError) as error:
        raise SystemExit(f"overlap.py: {error}") from error
    print(f"drawn: {options.output / 'overlap.png'}")


def _train_and_draw(options: argparse.Namespace) -> None:
    begin_rank(_HOSTS)
    drawn = {}
    for schedule, first in _TRIAL_STEPS.items():
        steps = range(first, first + _RECORDED_STEPS)
        timeline = OverlapTimeline(
            steps, max_steps=len(steps), path=options.output / f"{schedule}.json", pictures=False
        )
        torch.manual_seed(0)
        train(_row(schedule), BenchmarkModule(WORKLOADS[_WORKLOAD]), _HOSTS, steps.stop, [timeline])
        drawn[f"schedule={schedule!r}, "] = median_step(timeline.recorded)
    if dist.get_rank() == 0:
        figure = Figure(layout="constrained")
        draw_steps(figure, drawn)
        figure.savefig(options.output / "overlap.png", dpi=100)
    dist.barrier()
    dist.destroy_process_group()


def _row(schedule: str) -> Row:
    def arguments(hosts: int) -> dict[str, Any]:
        return {"strategy": SparseDDPStrategy("dense", schedule=schedule, wire="bfloat16"), "num_nodes": hosts}

    return Row(arguments)


def median_step(steps: Sequence[RecordedStep]) -> RecordedStep:
    """Return the step of median length, from the first that any rank did to the last."""

    def seconds(step: RecordedStep) -> float:
        slices = [each for rank in step.ranks for each in rank]
        return max(each.end for each in slices) - min(each.start for each in slices)

    return sorted(steps, key=seconds)[len(steps) // 2]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rate", default="500mbit")
    parser.add_argument("--delay", default="0", help="one way")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for everything")
    parser.add_argument("--output", type=Path, default=Path(".benchmarks/overlap"), help="folder for what it writes")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
