"""Draw the table of the step benchmark, and, from traces of ``OverlapTimeline``, what hides behind backward.

The traces that rows ending in "traced" have left behind, one above the other::

    python examples/benchmarks/plot.py .benchmarks/overlap/single.json .benchmarks/overlap/merged.json --slower 8
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results import Line

_INCHES_PER_BAR = 0.32
_STAGES = {
    "backward": "#9aa5b1",
    "exposed": "#d64545",
    "select": "#f0b429",
    "encode": "#8d6e63",
    "exchange": "#2186eb",
    "commit": "#3f9142",
}

Spans = dict[str, list[tuple[float, float]]]


def draw(lines: Sequence[Line], title: str, path: Path) -> None:
    """Write a picture: for each workload a bar for each row, its time for a batch relative to ``ddp``.

    Args:
        lines: of one run; those without ``ddp`` in their run are left out.
        title: what the numbers depend on.
        path: where to, with an ending that matplotlib knows.

    Raises:
        ImportError: without matplotlib.
    """
    from matplotlib.figure import Figure

    lines = [line for line in lines if line.to_ddp is not None]
    if not lines:
        return
    workloads = list(dict.fromkeys(line.workload for line in lines))
    rows = list(dict.fromkeys(line.row for line in lines))
    figure = Figure(figsize=(3.0 + 3.6 * len(workloads), 1.8 + _INCHES_PER_BAR * len(rows)), layout="constrained")
    all_axes = figure.subplots(1, len(workloads), sharey=True, squeeze=False)[0]
    for axes, workload in zip(all_axes, workloads):
        _draw_workload(axes, [line for line in lines if line.workload == workload], rows)
    all_axes[0].invert_yaxis()
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=150)


def _draw_workload(axes: Any, lines: Sequence[Line], rows: Sequence[str]) -> None:
    heights = [rows.index(line.row) for line in lines]
    ratios = [line.to_ddp or 0.0 for line in lines]
    errors = [line.spread_ms / line.median_ms * ratio / 2 for line, ratio in zip(lines, ratios)]
    colours = ["tab:blue" if line.row.startswith("sparse") else "tab:gray" for line in lines]
    bars = axes.barh(heights, ratios, xerr=errors, color=colours, ecolor="black", capsize=2)
    axes.bar_label(bars, [f"{line.median_ms:.0f} ms" for line in lines], padding=4, fontsize="small")
    axes.axvline(1.0, color="black", linewidth=0.8)
    first = lines[0]
    if first.to_ddp and first.to_no_communication:
        floor = first.to_ddp / first.to_no_communication
        axes.axvline(floor, color="tab:red", linestyle="--", label="no communication")
        axes.legend(loc="lower right", fontsize="small")
    axes.set(title=lines[0].workload, xlabel="time of a batch / ddp", xlim=(0, 1.25 * max(ratios)))
    axes.set_yticks(range(len(rows)), rows)


def spans_of(trace: Path, slower: float) -> Spans:
    """Return starts and durations in milliseconds of each stage of a step, from the start of backward.

    Args:
        trace: as ``OverlapTimeline`` writes it.
        slower: factor by which the step was slower than what is shown.
    """
    spans: Spans = defaultdict(list)
    for event in json.loads(trace.read_text())["traceEvents"]:
        name = str(event.get("name", ""))
        if name.startswith("sparse.") and event.get("cat") == "user_annotation":
            spans[name.removeprefix("sparse.")].append((event["ts"] / 1e3 / slower, event["dur"] / 1e3 / slower))
    begin = spans["backward"][0][0]
    return {stage: [(start - begin, seconds) for start, seconds in each] for stage, each in spans.items()}


def draw_overlap(traces: Sequence[Path], slower: float, path: Path) -> None:
    """Write a picture: for each trace backward, what is exposed behind it, and the stages of the exchange below.

    Args:
        traces: of one step each; the name of a file is that of its schedule.
        slower: as for :func:`spans_of`.
        path: where to.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.6 * len(traces) + 1), dpi=130, layout="constrained")
    for axes, trace in zip(figure.subplots(len(traces), sharex=True, squeeze=False)[:, 0], traces):
        spans = spans_of(trace, slower)
        for stage, colour in _STAGES.items():
            place = 0 if stage in ("backward", "exposed") else 1
            axes.broken_barh(spans.get(stage, []), (place - 0.35, 0.7), color=colour, label=stage)
        exposed = spans["exposed"][0][1]
        axes.set(title=f"schedule={trace.stem!r}: {exposed:.0f} ms exposed", ylim=(1.5, -0.5))
        axes.set_yticks([0, 1], ["backward", "exchange"])
    axes.set(xlabel="ms")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path)


def main() -> None:
    """Draw what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--slower", type=float, default=1.0, help="factor by which the steps were slower")
    parser.add_argument("--output", type=Path, default=Path("overlap.png"))
    options = parser.parse_args()
    draw_overlap(options.traces, options.slower, options.output)


if __name__ == "__main__":
    main()
