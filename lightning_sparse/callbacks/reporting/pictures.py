"""Pictures, drawn by matplotlib where it is installed."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_sparse.engine.observe.timeline import (
    BACKWARD,
    WORKER,
    RecordedStep,
    Slice,
    hidden_seconds,
    stage_seconds,
)

_COLOURS = {
    "gradient": "#9aa5b1",
    "wait": "#d64545",
    "select": "#f0b429",
    "encode": "#8d6e63",
    "exchange": "#2186eb",
    "commit": "#3f9142",
}
_MAX_RANKS = 8
_MAX_LABELS = 40
_MAX_BARS = 40


def figure_class(callback: object) -> Any:
    """Return matplotlib's class of figures.

    Raises:
        ValueError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f"the pictures of {type(callback).__name__} need matplotlib, which is not installed: pip install"
            " 'lightning-sparse[plot]', or give pictures=False"
        ) from error
    return Figure


def draw_step(figure: Any, recorded: RecordedStep) -> None:
    """Draw when backward and the exchange worker of each rank did what, in one step."""
    shown = list(recorded.ranks[:_MAX_RANKS])
    axes = figure.subplots()
    figure.set_size_inches(12, 1.6 + 1.1 * len(shown))
    origin = min(each.start for slices in shown for each in slices)
    ticks, labels = [], []
    for rank, slices in enumerate(shown):
        for offset, row in ((0.0, BACKWARD), (0.8, WORKER)):
            place = 2.0 * rank + offset
            ticks.append(place)
            labels.append(f"rank {rank} {row}")
            _draw_row(axes, [each for each in slices if each.row == row and each.stage in _COLOURS], place, origin)
    axes.set_yticks(ticks, labels)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    left_out = f" (the first {_MAX_RANKS} of {len(recorded.ranks)} ranks)" if len(recorded.ranks) > _MAX_RANKS else ""
    axes.set_title(f"step {recorded.step}{left_out}: {_summary(recorded.ranks)}")
    axes.grid(axis="x", alpha=0.3)
    _legend(figure)


def draw_density(figure: Any, steps: Sequence[int], densities: Mapping[str, Sequence[float]]) -> None:
    """Draw the density of every parameter over time, in the order of the model."""
    from matplotlib.colors import LogNorm

    axes = figure.subplots()
    figure.set_size_inches(10, 1.5 + 0.22 * min(len(densities), _MAX_LABELS))
    seen = [density for row in densities.values() for density in row if density > 0]
    least, most = min(seen, default=0.1), max(seen, default=1.0)
    centre = math.sqrt(least * most)
    # At least a factor of four, lest roundings of one density look like different ones.
    norm = LogNorm(vmin=min(least, centre / 2), vmax=max(most, centre * 2))
    image = axes.imshow(list(densities.values()), aspect="auto", interpolation="nearest", norm=norm, cmap="viridis")
    every = -(-len(densities) // _MAX_LABELS)
    axes.set_yticks(range(0, len(densities), every), list(densities)[::every], fontsize=8)
    columns = range(0, len(steps), -(-len(steps) // 10))
    axes.set_xticks(columns, [str(steps[column]) for column in columns])
    axes.set_xlabel("step")
    axes.set_title("density by parameter, mean over ranks")
    figure.colorbar(image, ax=axes)


def draw_time(figure: Any, steps: Sequence[int], rows: Sequence[Mapping[str, float]]) -> None:
    """Draw, for each logged step, what it waits for and what the exchange worker does meanwhile."""
    axes = figure.subplots()
    figure.set_size_inches(10, 4)
    steps, rows = steps[-_MAX_BARS:], rows[-_MAX_BARS:]
    labels = {"gradient": "backward", "wait": "exposed exchange"}
    for offset, parts in ((-0.2, _main_parts(rows)), (0.2, _worker_parts(rows))):
        bottom = [0.0] * len(rows)
        for stage, seconds in parts.items():
            places = [position + offset for position in range(len(rows))]
            colour = _COLOURS.get(stage, "#dfe3e8")
            heights = [1e3 * each for each in seconds]
            axes.bar(places, heights, 0.38, bottom, color=colour, label=labels.get(stage, stage))
            bottom = [below + height for below, height in zip(bottom, heights)]
    columns = range(0, len(steps), -(-len(steps) // 20))
    axes.set_xticks(columns, [str(steps[column]) for column in columns])
    axes.set_xlabel("step; left bar: what the step waits for, right bar: the exchange worker meanwhile")
    axes.set_ylabel("ms")
    axes.set_title("where the time of logged steps goes (means over ranks; exposed: of the slowest)")
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False)


def as_image(figure: Any) -> Any:
    """Return a figure's pixels, uint8 ``[height, width, 3]``."""
    import numpy
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return numpy.asarray(canvas.buffer_rgba())[:, :, :3].copy()


def _draw_row(axes: Any, slices: Sequence[Slice], place: float, origin: float) -> None:
    for stage, colour in _COLOURS.items():
        bars = [(1e3 * (each.start - origin), 1e3 * (each.end - each.start)) for each in slices if each.stage == stage]
        # Edges tell neighbouring gradients apart, and would hide slices that are thinner than they.
        edge = "white" if stage == "gradient" else colour
        axes.broken_barh(bars, (place - 0.35, 0.7), facecolors=colour, edgecolors=edge, linewidth=0.4)


def _summary(ranks: Sequence[Sequence[Slice]]) -> str:
    exchange = sum(stage_seconds(slices, "exchange") for slices in ranks) / len(ranks)
    hidden = sum(hidden_seconds(slices) for slices in ranks) / len(ranks)
    exposed = sum(stage_seconds(slices, "wait") for slices in ranks) / len(ranks)
    behind = f"{1e3 * exchange:.1f} ms in collectives, {1e3 * hidden:.1f} of them behind backward"
    return f"{behind}; {1e3 * exposed:.1f} exposed (means over ranks)"


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    labels = {"gradient": "backward, by gradient", "wait": "optimizer waits"}
    handles = [Patch(color=colour, label=labels.get(stage, stage)) for stage, colour in _COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def _main_parts(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    backward = [row["backward_seconds"] for row in rows]
    exposed = [row["exposed_seconds"] for row in rows]
    rest = [max(0.0, row["step_seconds"] - row["backward_seconds"] - row["exposed_seconds"]) for row in rows]
    return {"gradient": backward, "wait": exposed, "everything else": rest}


def _worker_parts(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    return {stage: [row[f"{stage}_seconds"] for row in rows] for stage in ("select", "exchange", "commit")}
