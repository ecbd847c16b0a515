"""Pictures, drawn by matplotlib where it is installed."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
_LABELS = {"gradient": "backward", "wait": "exposed: optimizer waits"}
_MAX_RANKS = 8
_MAX_LABELS = 12
_MAX_LETTERS = 18
_MAX_TICKS = 6
_MAX_BARS = 20
# TensorBoard first shows a picture some 300 pixels wide, however large it is.
_FONT_SIZE = 14
_DOTS_PER_INCH = 160


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


def draw_steps(figure: Any, steps: Mapping[str, RecordedStep]) -> None:
    """Draw when backward and the exchange worker of each rank did what, step below step, on one axis of time.

    Args:
        figure: an empty one.
        steps: by what is to be said of each in front of its number; may be nothing.
    """
    shown = {said: recorded.ranks[:_MAX_RANKS] for said, recorded in steps.items()}
    with _legible(figure, 9, len(steps) + 0.9 * sum(map(len, shown.values())) + 0.9):
        panels = figure.subplots(len(steps), sharex=True, squeeze=False)[:, 0]
        for axes, (said, recorded) in zip(panels, steps.items()):
            _draw_ranks(axes, shown[said])
            some = (
                f" (the first {_MAX_RANKS} of {len(recorded.ranks)} ranks)" if len(recorded.ranks) > _MAX_RANKS else ""
            )
            axes.set_title(f"{said}step {recorded.step}{some}: {_summary(recorded.ranks)}", fontsize=_FONT_SIZE)
        panels[-1].set_xlabel("ms")
        _legend(figure)


def draw_density(figure: Any, steps: Sequence[int], densities: Mapping[str, Sequence[float]]) -> None:
    """Draw the density of every parameter over time, in the order of the model; some of them are named."""
    from matplotlib.colors import LogNorm

    with _legible(figure, 6.4, 4.8):
        axes = figure.subplots()
        seen = [density for row in densities.values() for density in row if density > 0]
        least, most = min(seen, default=0.1), max(seen, default=1.0)
        centre = math.sqrt(least * most)
        # At least a factor of four, lest roundings of one density look like different ones.
        norm = LogNorm(vmin=min(least, centre / 2), vmax=max(most, centre * 2))
        image = axes.imshow(list(densities.values()), aspect="auto", interpolation="nearest", norm=norm, cmap="viridis")
        every = -(-len(densities) // _MAX_LABELS)
        axes.set_yticks(range(0, len(densities), every), [_ending(name) for name in list(densities)[::every]])
        columns = range(0, len(steps), -(-len(steps) // _MAX_TICKS))
        axes.set_xticks(columns, [str(steps[column]) for column in columns])
        axes.set_xlabel("step")
        sends_nothing = any(density == 0 for row in densities.values() for density in row)
        axes.set_title("density, mean over ranks" + (" (white: nothing is sent)" if sends_nothing else ""))
        figure.colorbar(image, ax=axes)


def draw_time(figure: Any, steps: Sequence[int], rows: Sequence[Mapping[str, float]]) -> None:
    """Draw, for each logged step, what it waits for and what the exchange worker does meanwhile."""
    steps, rows = steps[-_MAX_BARS:], rows[-_MAX_BARS:]
    with _legible(figure, 6.4, 4.8):
        axes = figure.subplots()
        for offset, parts in ((-0.2, _main_parts(rows)), (0.2, _worker_parts(rows))):
            bottom = [0.0] * len(rows)
            for stage, seconds in parts.items():
                places = [position + offset for position in range(len(rows))]
                colour = _COLOURS.get(stage, "#dfe3e8")
                heights = [1e3 * each for each in seconds]
                axes.bar(places, heights, 0.38, bottom, color=colour, label=_LABELS.get(stage, stage))
                bottom = [below + height for below, height in zip(bottom, heights)]
        columns = range(0, len(steps), -(-len(steps) // _MAX_TICKS))
        axes.set_xticks(columns, [str(steps[column]) for column in columns])
        axes.set_xlabel("step; right: the exchange worker meanwhile")
        axes.set_ylabel("ms")
        axes.set_title("where the time of a step goes")
        axes.grid(axis="y", alpha=0.3)
        figure.legend(loc="outside lower center", ncols=3, frameon=False)


def as_image(figure: Any) -> Any:
    """Return a figure's pixels, uint8 ``[height, width, 3]``."""
    import numpy
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return numpy.asarray(canvas.buffer_rgba())[:, :, :3].copy()


@contextmanager
def _legible(figure: Any, width: float, height: float) -> Iterator[None]:
    """Have what is drawn inside be read in a thumbnail, and be sharp when it is enlarged; sizes are in inches."""
    from matplotlib import rc_context

    figure.set_size_inches(width, height)
    figure.set_dpi(_DOTS_PER_INCH)
    with rc_context({"font.size": _FONT_SIZE, "axes.titlesize": _FONT_SIZE + 1}):
        yield


def _ending(name: str) -> str:
    """Return the end of a name, which tells neighbours apart, if it is long."""
    return name if len(name) <= _MAX_LETTERS else "\N{HORIZONTAL ELLIPSIS}" + name[1 - _MAX_LETTERS :]


def _draw_ranks(axes: Any, ranks: Sequence[Sequence[Slice]]) -> None:
    origin = min(each.start for slices in ranks for each in slices)
    ticks, labels = [], []
    for rank, slices in enumerate(ranks):
        for offset, row, name in ((0.0, BACKWARD, f"rank {rank}"), (0.8, WORKER, "its exchange")):
            place = 2.0 * rank + offset
            ticks.append(place)
            labels.append(name)
            _draw_row(axes, [each for each in slices if each.row == row and each.stage in _COLOURS], place, origin)
    axes.set_yticks(ticks, labels)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)


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
    behind = f"{1e3 * hidden:.0f} of them behind backward; {1e3 * exposed:.0f} exposed"
    return f"{1e3 * exchange:.0f} ms in collectives,\n{behind}"


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=_LABELS.get(stage, stage)) for stage, colour in _COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)


def _main_parts(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    backward = [row["backward_seconds"] for row in rows]
    exposed = [row["exposed_seconds"] for row in rows]
    rest = [max(0.0, row["step_seconds"] - row["backward_seconds"] - row["exposed_seconds"]) for row in rows]
    return {"gradient": backward, "wait": exposed, "everything else": rest}


def _worker_parts(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    return {stage: [row[f"{stage}_seconds"] for row in rows] for stage in ("select", "exchange", "commit")}
