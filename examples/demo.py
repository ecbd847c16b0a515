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

_TRAIN_IMAGE = Path(__file__).with_name("train_image.py")
_DENSITY = 0.01
_WAYS = ("ddp", "sparse_lags")
_PROCESSES = 2


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


def main() -> None:
    """Train, and print what was measured."""
    outcomes = [train(strategy) for strategy in _WAYS]
    log_dirs = [outcome["log_dir"] for outcome in outcomes]
    print(f"\nMeasured here, on handwritten digits:\n\n{measured(outcomes)}")
    print(f"\nCurves: tensorboard --logdir {os.path.commonpath(log_dirs)}")


if __name__ == "__main__":
    main()
