"""Train an example with every system, and set their accuracy and their bytes beside DDP's.

Two processes on this machine; a row of the image example takes about half a minute, of the text example minutes::

    python examples/benchmarks/accuracy.py image
    python examples/benchmarks/accuracy.py text --rows ddp "sparse_lags 0.01" "sparse_lags 0.001"
    python examples/benchmarks/accuracy.py image --seeds 1 2 3 -- --epochs 20

What comes after ``--`` is passed on to the example.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_EXAMPLES = {"image": "train_image.py", "text": "train_text.py"}
_SPARSIFIERS = ("sparse_topk", "sparse_lags", "sparse_exdyna", "sparse_micro", "sparse_sdagc", "sparse_dgc")
_DENSITIES = ("0.01", "0.001")
_WARMUP_EPOCHS = "4"
_HEADER = """\
| system | mean | of each seed | bytes of the last step | bytes of a step on average | compression ratio |
| --- | ---: | --- | ---: | ---: | ---: |"""


def rows() -> dict[str, list[str]]:
    """Return the flags of every row, by its name."""
    table = {"ddp": ["--strategy", "ddp"]}
    for density in _DENSITIES:
        for name in _SPARSIFIERS:
            flags = ["--strategy", name, "--density", density, "--warmup-epochs", _WARMUP_EPOCHS]
            table[f"{name} {density}"] = flags
    return {**table, **{name: ["--strategy", name] for name in ("sparse_a2sgd", "sparse_qsgd")}}


def train(example: str, flags: list[str]) -> dict[str, Any]:
    """Train once in processes of their own, and return how it ended.

    Raises:
        subprocess.CalledProcessError: if training failed; what it said is on standard output.
    """
    script = Path(__file__).parent.parent / _EXAMPLES[example]
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        command = [sys.executable, str(script), "--accelerator", "cpu", "--log-dir", directory, *flags]
        finished = subprocess.run([*command, "--result", str(result)], capture_output=True, text=True)
        if finished.returncode:
            print(finished.stdout[-4000:], finished.stderr[-4000:])
            finished.check_returncode()
        outcome: dict[str, Any] = json.loads(result.read_text())
    return outcome


def table_row(name: str, outcomes: list[dict[str, Any]]) -> str:
    """Lay the outcomes of one row's seeds out as a row of a Markdown table.

    Example::

        >>> outcome = {"score": 0.5, "bytes_per_step": 4.0, "mean_bytes_per_step": 8.0, "compression_ratio": 2.0}
        >>> table_row("ddp", [outcome, {**outcome, "score": 0.75}])
        '| ddp | 0.6250 | 0.5000 0.7500 | 4 | 8 | 2.0 |'
    """
    scores = [outcome["score"] for outcome in outcomes]
    each = " ".join(f"{score:.4f}" for score in scores)
    last = outcomes[-1]
    sent = f"{last['bytes_per_step']:,.0f} | {last['mean_bytes_per_step']:,.0f} | {last['compression_ratio']:.1f}"
    return f"| {name} | {statistics.fmean(scores):.4f} | {each} | {sent} |"


def main() -> None:
    """Train the rows asked for, and print the table as it grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", choices=_EXAMPLES)
    parser.add_argument(
        "--rows", nargs="+", choices=rows(), default=list(rows()), metavar="ROW", help=f"{list(rows())}"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("flags", nargs="*", help="after --: passed on to the example")
    options = parser.parse_args()

    print(_HEADER)
    for name in options.rows:
        flags = [*rows()[name], *options.flags]
        outcomes = [train(options.example, [*flags, "--seed", str(seed)]) for seed in options.seeds]
        print(table_row(name, outcomes), flush=True)


if __name__ == "__main__":
    main()
