"""Draw the table of the step benchmark."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results import Line

_INCHES_PER_BAR = 0.32


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
