"""Predictions for people and for programs."""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Union

from lightning_sparse.callbacks.overlap_timeline import figure_class
from lightning_sparse.cli.plan.forecast import Candidate, SystemPrediction, best_of, predict_systems
from lightning_sparse.cli.plan.profiler import BackwardProfile
from lightning_sparse.loop.summary import in_bytes
from lightning_sparse.schedule.network import Network

_HEADER = ("", "strategy", "density", "step ms", "x {}", "exposed ms", "sent", "messages")
_WORKERS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_BANDWIDTHS = (1e8, 3e8, 1e9, 3e9, 1e10, 3e10, 1e11)


def as_table(profile: BackwardProfile, rows: Sequence[SystemPrediction]) -> str:
    """Return a table with the best row marked, and what follows from it, as text."""
    heading = (
        f"{profile.elements:,} gradient elements in {len(profile.sizes)} tensors; on {profile.device} backward takes"
        f" {sum(profile.backward_seconds) * 1e3:.1f} ms, the rest of a step {profile.other_seconds * 1e3:.1f} ms."
    )
    best = best_of(rows)
    header = tuple(title.format(rows[0].name.upper()) for title in _HEADER)
    cells = [header, *(_cells(row, row is best) for row in rows)]
    layout = [f"{side}{max(map(len, column))}" for side, column in zip("<<>>>>>>", zip(*cells))]
    lines = ["  ".join(map(format, line, layout)).rstrip() for line in cells]
    return "\n".join([heading, "", *lines, "", *_verdict(rows)])


def as_json(profile: BackwardProfile, network: Network, rows: Sequence[SystemPrediction]) -> dict[str, Any]:
    """Return the same as plain numbers, words and lists; ``best`` is the position of a row, or ``None``."""
    best = best_of(rows)
    names = network._fields if network.node_ranks > 1 else network._fields[:3]
    return {
        "profile": {
            "elements": profile.elements,
            "tensors": len(profile.sizes),
            "backward_seconds": sum(profile.backward_seconds),
            "other_seconds": profile.other_seconds,
            "device": profile.device,
        },
        "network": {name: getattr(network, name) for name in names},
        "rows": [row._asdict() for row in rows],
        "best": next((position for position, row in enumerate(rows) if row is best), None),
    }


def _cells(row: SystemPrediction, is_best: bool) -> tuple[str, ...]:
    return (
        "*" if is_best else "",
        row.name,
        "" if row.density is None else f"{row.density:g}",
        f"{row.step_seconds * 1e3:.1f}",
        f"{row.speedup:.2f}",
        f"{row.exposed_seconds * 1e3:.1f}",
        in_bytes(row.sent_bytes),
        str(row.messages),
    )


def _verdict(rows: Sequence[SystemPrediction]) -> list[str]:
    best = best_of(rows)
    if best is None:
        verdict = f"Nothing pays: nothing is clearly faster than {rows[0].name}. Stay with it."
    else:
        density = "" if best.density is None else f" at density {best.density:g}"
        verdict = f"* {best.name}{density} is predicted to be {best.speedup:.2f} times as fast as {rows[0].name}."
    notes = ["Times only: a lower density delays more of each gradient."]
    apart = sorted({row.name for row in rows if row.replicas_diverge and row.local_steps == 1})
    if apart:
        notes.append(f"{', '.join(apart)} lets replicas drift apart and is never marked.")
    rounds = [row for row in rows if row.local_steps > 1]
    if rounds:
        made = ", ".join(f"{row.name} {row.local_steps}" for row in rounds)
        enough = ", ".join(f"{row.name} {row.fitting_steps}" for row in rounds)
        notes.append(
            "Strategies with local steps are never marked, as they need more steps to the same loss. Steps between two"
            f" exchanges: {made}. As many would be enough for exchanges to take 5 % of the time: {enough}."
        )
    return [verdict, " ".join(notes)]


def draw(profile: BackwardProfile, network: Network, candidates: Sequence[Candidate], path: Union[str, Path]) -> None:
    """Draw the speed-up over DDP against workers and bandwidth, each system at its density fastest over ``network``."""
    steps = [row.step_seconds for row in predict_systems(profile, network, candidates)]
    by_name = groupby(zip(steps, candidates), key=lambda pair: pair[1].name)
    shown = [min(densities, key=itemgetter(0))[1] for _, densities in by_name]
    figure = figure_class("--picture")(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    fills = [each for each in _WORKERS if each <= network.node_ranks or not each % network.node_ranks]
    _panel(left, profile, {workers: network._replace(workers=workers) for workers in fills}, shown)
    _panel(right, profile, {each / 1e9: network._replace(bandwidth=each) for each in _BANDWIDTHS}, shown)
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
    figure.legend(*right.get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(path, dpi=120)


def _panel(axes: Any, profile: BackwardProfile, networks: dict[float, Network], shown: Sequence[Candidate]) -> None:
    """Draw the candidates' speed-up over the first of them, on networks by their place on the axis."""
    predictions = [predict_systems(profile, network, shown) for network in networks.values()]
    places = list(networks)
    axes.axhline(1.0, color="black", linewidth=1, label=shown[0].name)
    for column, rows in enumerate(list(zip(*predictions))[1:]):
        density = "" if rows[0].density is None else f" {rows[0].density:g}"
        style = "-" if column < 10 else "--"  # more lines than colours: the second time round they are dashed
        speedups = [row.speedup for row in rows]
        axes.plot(places, speedups, style, marker=".", color=f"C{column % 10}", label=rows[0].name + density)
    axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
