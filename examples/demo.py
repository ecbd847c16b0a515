"""Train the image example twice on this machine, with ordinary DDP and with sparse gradients, and compare.

It needs two processor cores, no GPU and no download, and takes less than a minute::

    python examples/demo.py
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_sparse.cli.plan.forecast import FP32_BYTES, Candidate, forecast
from lightning_sparse.engine.settings import Settings
from lightning_sparse.schedule.network import Network

_TRAIN_IMAGE = Path(__file__).with_name("train_image.py")
_DENSITY = 0.01
_WAYS = {
    "ddp": Candidate("ddp"),
    "sparse_lags": Candidate("sparse_lags", _DENSITY, Settings.of("lags", _DENSITY, optimizer_correction=None)),
}
_PROCESSES = 2
_NETWORKS = {"1 Gbit/s": Network(1e9, 1e-4, _PROCESSES), "100 Mbit/s": Network(1e8, 1e-4, _PROCESSES)}
_COMPUTE_SECONDS = 0.005  # of a step without exchange: assumed, near what this network takes on a processor
_FORECAST = """
A forecast, not a measurement: a step between two machines whose link has this rate, by the formula of
`lightning-sparse plan`, if it computes for {:.0f} ms:

{}"""


def train(strategy: str) -> dict[str, Any]:
    """Train with one strategy in processes of their own, and return how it ended.

    Raises:
        SystemExit: if training failed; what it said is printed.
    """
    print(f"Training with {strategy} on {_PROCESSES} processes ...", end=" ", flush=True)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        flags = ["--accelerator", "cpu", "--strategy", strategy, "--result", str(result)]
        if strategy != "ddp":
            flags += ["--density", str(_DENSITY)]
        done = subprocess.run([sys.executable, str(_TRAIN_IMAGE), *flags], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"\n{done.stdout}{done.stderr}")
        outcome: dict[str, Any] = json.loads(result.read_text())
    print(f"{time.perf_counter() - begin:.0f} s")
    return outcome


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Lay out columns.

    Example::

        >>> print(table(("strategy", "accuracy"), [("ddp", "98.0 %")]))
        strategy  accuracy
        ddp         98.0 %
    """
    cells = [header, *lines]
    layout = [f"{'>' if column else '<'}{max(map(len, each))}" for column, each in enumerate(zip(*cells))]
    return "\n".join("  ".join(map(format, line, layout)) for line in cells)


def measured(outcomes: list[dict[str, Any]]) -> str:
    """Return accuracies and bytes of trainings, as a table."""
    header = ("strategy", "accuracy", "bytes sent per step", "times fewer than DDP")
    lines = [
        (
            outcome["strategy"],
            f"{100 * outcome['score']:.1f} %",
            f"{outcome['mean_bytes_per_step']:,.0f}",
            f"{outcome['compression_ratio']:.1f}",
        )
        for outcome in outcomes
    ]
    return table(header, lines)


def expected(elements: int) -> str:
    """Return the milliseconds of a step by formula, as a table."""
    steps = [forecast(elements, _COMPUTE_SECONDS, network, _WAYS.values()) for network in _NETWORKS.values()]
    lines = [(each[0].name, *(f"{1e3 * row.step_seconds:.1f} ms" for row in each)) for each in zip(*steps)]
    return table(("a step over", *_NETWORKS), lines)


def main() -> None:
    """Train, and print what was measured, and what it would be worth on slow networks."""
    outcomes = [train(strategy) for strategy in _WAYS]
    elements = round(outcomes[0]["dense_bytes"] / FP32_BYTES * _PROCESSES / (2 * (_PROCESSES - 1)))
    log_dirs = [outcome["log_dir"] for outcome in outcomes]
    print(f"\nMeasured here, on handwritten digits:\n\n{measured(outcomes)}")
    print(_FORECAST.format(1e3 * _COMPUTE_SECONDS, expected(elements)))
    print(f"\nCurves: tensorboard --logdir {os.path.commonpath(log_dirs)}")


if __name__ == "__main__":
    main()
