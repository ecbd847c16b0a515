"""A picture of where it pays: speed-up over DDP against workers and against bandwidth."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Union

from lightning_sparse.cli.plan.backward_profile import BackwardProfile
from lightning_sparse.cli.plan.candidates import Candidate
from lightning_sparse.cli.plan.forecast import SystemPrediction, predict_systems
from lightning_sparse.schedule.cost.network import Network

WORKERS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
BANDWIDTHS = (1e8, 3e8, 1e9, 3e9, 1e10, 3e10, 1e11)


def figure_class() -> Any:
    """Return matplotlib's class of figures.

    Raises:
        ValueError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "a picture needs matplotlib, which is not installed: pip install 'lightning-sparse[plot]', or leave"
            " --picture out"
        ) from error
    return Figure


def draw(profile: BackwardProfile, network: Network, candidates: Sequence[Candidate], path: Union[str, Path]) -> Path:
    """Draw the speed-up over DDP against workers (2 to 1024) and against bandwidth (100 Mbit/s to 100 Gbit/s).

    A system that has densities is drawn at the one that is fastest over ``network``.

    Args:
        profile: of the model's step on one worker; taken to be the same for any number of workers.
        network: what is not on an axis is taken from here.
        candidates: as for :func:`~lightning_sparse.cli.plan.predict_systems`.
        path: file to write, with the suffix of a picture.

    Returns:
        the path.

    Raises:
        ValueError: see :func:`figure_class`; or if the suffix names no kind of picture.
    """
    rows = predict_systems(profile, network, candidates)
    shown = _fastest_of_each_name(rows)
    profile = profile._replace(workers=None)
    figure = figure_class()(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    by_workers = [network._replace(workers=workers) for workers in _workers_of(network)]
    by_bandwidth = [network._replace(bandwidth=bandwidth) for bandwidth in BANDWIDTHS]
    _panel(left, profile, by_workers, [float(each.workers) for each in by_workers], candidates, shown)
    _panel(right, profile, by_bandwidth, [bandwidth / 1e9 for bandwidth in BANDWIDTHS], candidates, shown)
    left.set(
        xlabel="workers" if network.node_ranks == 1 else f"workers, {network.node_ranks} on a node",
        title=f"{network.bandwidth / 1e9:.4g} Gbit/s",
        ylabel="predicted speed-up over DDP",
        yscale="log",
    )
    right.set(xlabel="bandwidth, Gbit/s", title=f"{network.workers} workers")
    figure.suptitle(f"{profile.elements / 1e6:.3g} M elements, {network.latency * 1e6:.4g} us latency")
    left.yaxis.set_major_formatter("{x:g}")
    low, high = left.get_ylim()
    if high < 10 * low:  # where matplotlib labels what lies between powers of ten, too
        left.yaxis.set_minor_formatter("{x:.3g}")
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    figure.savefig(path, dpi=120)
    return Path(path)


def _workers_of(network: Network) -> list[int]:
    """Return the numbers of workers to draw: those that fill nodes."""
    return [workers for workers in WORKERS if workers <= network.node_ranks or not workers % network.node_ranks]


def _fastest_of_each_name(rows: Sequence[SystemPrediction]) -> list[int]:
    """Return the positions of the rows to draw, without the one that all are compared with."""
    fastest: dict[str, int] = {}
    for position, row in enumerate(rows[1:], 1):
        if row.name not in fastest or row.step_seconds < rows[fastest[row.name]].step_seconds:
            fastest[row.name] = position
    return list(fastest.values())


def _panel(
    axes: Any,
    profile: BackwardProfile,
    networks: Sequence[Network],
    places: Sequence[float],
    candidates: Sequence[Candidate],
    shown: Sequence[int],
) -> None:
    predictions = [
        predict_systems(profile, each, [candidates[0], *(candidates[at] for at in shown)]) for each in networks
    ]
    axes.axhline(1.0, color="black", linewidth=1, label=candidates[0].name)
    for column, position in enumerate(shown, 1):
        candidate = candidates[position]
        density = "" if candidate.density is None else f" {candidate.density:g}"
        speedups = [rows[column].speedup for rows in predictions]
        # More lines than colours: the second time round they are dashed.
        style = "-" if column <= 10 else "--"
        axes.plot(places, speedups, style, marker=".", color=f"C{(column - 1) % 10}", label=candidate.name + density)
    axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
