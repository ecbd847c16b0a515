"""Draw how many times faster than DDP a step is, from the first table of results in this directory's README.

The picture in the main README; it needs no run of a benchmark, only the figures that stand there::

    python examples/benchmarks/speed_up.py
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from plot import draw_speed_ups

_HERE = Path(__file__).parent
_TITLE = "Four hosts at 1 Gbit/s that share two processor cores: steps beside DDP's"
_DDP = "ddp"
# Top to bottom, under the names that the table gives them.
_SHOWN = {
    _DDP: "ddp",
    "ddp + bf16 hook": "ddp, bf16 hook",
    "ddp + PowerSGD rank 1": "ddp, PowerSGD rank 1",
    "sparse_topk 0.01": "sparse_topk, density 0.01",
    "sparse_topk 0.001": "sparse_topk, density 0.001",
    "no communication": "no communication at all",
}


def step_times(text: str) -> dict[str, dict[str, float]]:
    """Read the first table whose columns are called ``<model> ms (spread)``.

    Args:
        text: of this directory's README.

    Returns:
        for each model the milliseconds of each row.

    Raises:
        ValueError: if there is no such table.
    """
    tables: list[list[list[str]]] = [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    ]
    for head, _, *rows in tables:
        columns = {cell.split(" ms ")[0]: place for place, cell in enumerate(head) if " ms (spread)" in cell}
        if columns:
            return {model: _column(rows, place) for model, place in columns.items()}
    raise ValueError("no table has a column '<model> ms (spread)': give the README of the benchmarks")


def _column(rows: Sequence[Sequence[str]], place: int) -> dict[str, float]:
    return {row[0]: float(row[place].split()[0]) for row in rows}


def speed_ups(times: Mapping[str, float]) -> dict[str, float]:
    """Return how many times faster than DDP each row is that is shown, under the name that it is shown with."""
    return {shown: times[_DDP] / times[row] for row, shown in _SHOWN.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the picture.

    Args:
        arguments: of the command line; ``None`` for the program's own.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=_HERE / "README.md", metavar="FILE", help="where the figures are")
    parser.add_argument("--output", type=Path, default=_HERE.parents[1] / "docs" / "images" / "speed_up.png")
    options = parser.parse_args(arguments)
    times = step_times(options.table.read_text(encoding="utf-8"))
    draw_speed_ups({model: speed_ups(rows) for model, rows in times.items()}, _TITLE, options.output)


if __name__ == "__main__":
    main()
