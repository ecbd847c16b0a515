"""Change the rate of the network while ``sparse_auto`` trains, and see how many steps it takes to change its mind.

All hosts are network namespaces on this machine, so this needs Linux, root and iproute2, and no other machine::

    sudo python examples/benchmarks/adaptation.py
    sudo python examples/benchmarks/adaptation.py --rates 200mbit 10gbit    # the other way round
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple, Optional

from launch import WorkerError, run_on_all_hosts
from models import WORKLOADS
from network import NetworkRefusedError, ShapedNetwork

_WORKER = Path(__file__).with_name("adaptation_worker.py")


class Step(NamedTuple):
    """One step of rank 0.

    Attributes:
        seconds: since the step before.
        is_plain: whether it was left to plain DDP.
    """

    seconds: float
    is_plain: bool


class Adaptation(NamedTuple):
    """How a training went on after the network had changed.

    Attributes:
        before_ms: median of the steps before the change.
        after_ms: median of the last steps.
        was_plain: whether those before it were left to DDP.
        is_plain: whether the last ones are.
        steps: from the change until the first step from which on more than nine in ten are like the last.
    """

    before_ms: float
    after_ms: float
    was_plain: bool
    is_plain: bool
    steps: int


def adaptation(steps: Sequence[Step], changed_at: int, window: int = 20) -> Adaptation:
    """Summarise the steps of a training during which the network has changed."""
    before, last = steps[changed_at - window : changed_at], steps[-window:]
    is_plain = _mostly_plain(last)
    settled = next(
        start
        for start in range(changed_at, len(steps))
        if steps[start].is_plain == is_plain
        and sum(step.is_plain == is_plain for step in steps[start:]) > 0.9 * len(steps[start:])
    )
    return Adaptation(
        1e3 * median(step.seconds for step in before),
        1e3 * median(step.seconds for step in last),
        _mostly_plain(before),
        is_plain,
        settled - changed_at,
    )


def _mostly_plain(steps: Sequence[Step]) -> bool:
    return 2 * sum(step.is_plain for step in steps) > len(steps)


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Train, change the network, and tell what came of it."""
    options = _parser().parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    first, second = options.rates
    try:
        with ShapedNetwork(options.hosts, first, options.delay) as network:
            print(f"command: python {shlex.join(sys.argv)}\n{options.workload}: {network.description}, then {second}")
            changed_at: list[int] = []

            def react(line: str) -> None:
                if line.startswith("step ") and int(line.split()[1]) >= options.change_at and not changed_at:
                    network.set_rate(second)
                    changed_at.append(int(line.split()[1]))

            command = [str(_WORKER), "--workload", options.workload, "--hosts", str(options.hosts), "--steps"]
            command += [str(options.change_at + options.steps), "--output", str(options.output / "rank{rank}.json")]
            deadline = time.monotonic() + options.timeout
            run_on_all_hosts(network, command, options.output, deadline, "SparseDDPStrategy", react)
    except (NetworkRefusedError, WorkerError) as error:
        raise SystemExit(f"adaptation.py: {error}") from error
    seen = [json.loads((options.output / f"rank{rank}.json").read_text()) for rank in range(options.hosts)]
    found = adaptation([Step(*step) for step in seen[0]["steps"]], changed_at[0])
    print(
        f"changed at step {changed_at[0]}: {_way(found.was_plain)} {found.before_ms:.1f} ms a step, then"
        f" {_way(found.is_plain)} {found.after_ms:.1f} ms, from {found.steps} steps after the change on;"
        f" replicas are {'identical' if len({rank['digest'] for rank in seen}) == 1 else 'DIFFERENT'}, no step lost:"
        f" {all(len(rank['steps']) == options.change_at + options.steps for rank in seen)}"
    )


def _way(is_plain: bool) -> str:
    return "plain DDP" if is_plain else "compression"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rates", nargs=2, default=["10gbit", "200mbit"], metavar=("BEFORE", "AFTER"))
    parser.add_argument("--delay", default="0", help="one way")
    parser.add_argument("--workload", choices=WORKLOADS, default="deep_narrow")
    parser.add_argument("--change-at", type=int, default=250, help="step; the first choice is made within 200")
    parser.add_argument("--steps", type=int, default=150, help="after it")
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds for everything")
    parser.add_argument("--output", type=Path, default=Path(".benchmarks/adaptation"), help="folder for logs")
    return parser


if __name__ == "__main__":
    main()
