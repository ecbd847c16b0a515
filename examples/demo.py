"""Train the image example twice on this machine, with ordinary DDP and with sparse gradients, and compare.

It needs two processor cores, no GPU and no download, and takes about a minute::

    python examples/demo.py
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_TRAIN_IMAGE = Path(__file__).with_name("train_image.py")
_STRATEGIES: dict[str, list[str]] = {"ddp": [], "sparse_topk": ["--density", "0.01"]}
_HEADER = ("strategy", "accuracy", "bytes per step", "compression ratio")


def train(strategy: str, flags: list[str]) -> dict[str, Any]:
    """Train with one strategy in processes of their own, and return how it ended.

    Raises:
        subprocess.CalledProcessError: if training failed; it has said why.
    """
    print(f"\n{' '.join(['Training with', strategy, *flags])}, on 2 processes", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        command = [sys.executable, str(_TRAIN_IMAGE), "--accelerator", "cpu", "--strategy", strategy, *flags]
        subprocess.run([*command, "--result", str(result)], check=True)
        outcome: dict[str, Any] = json.loads(result.read_text())
    return outcome


def table(outcomes: list[dict[str, Any]]) -> str:
    """Lay outcomes out in columns.

    Example::

        >>> outcome = {"strategy": "ddp", "score": 0.98, "mean_bytes_per_step": 4000.0, "compression_ratio": 1.0}
        >>> print(table([outcome]))
        strategy  accuracy  bytes per step  compression ratio
        ddp         98.0 %           4,000                1.0
    """
    rows = [_HEADER] + [
        (
            outcome["strategy"],
            f"{100 * outcome['score']:.1f} %",
            f"{outcome['mean_bytes_per_step']:,.0f}",
            f"{outcome['compression_ratio']:.1f}",
        )
        for outcome in outcomes
    ]
    layout = [f"{side}{max(map(len, column))}" for side, column in zip("<>>>", zip(*rows))]
    return "\n".join("  ".join(map(format, cells, layout)) for cells in rows)


def main() -> None:
    """Train, and print the table."""
    outcomes = [train(strategy, flags) for strategy, flags in _STRATEGIES.items()]
    log_dirs = [outcome["log_dir"] for outcome in outcomes]
    print(f"\n{table(outcomes)}\n\nThe TensorBoard logs are in {' and '.join(log_dirs)}; to look at them:")
    print(f"  tensorboard --logdir {os.path.commonpath(log_dirs)}")


if __name__ == "__main__":
    main()
