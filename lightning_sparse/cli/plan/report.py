"""Predictions for people and for programs."""

from collections.abc import Sequence
from typing import Any

from lightning_sparse.cli.plan.backward_profile import BackwardProfile
from lightning_sparse.cli.plan.forecast import WORTH, SystemPrediction, alike, best_of
from lightning_sparse.loop.summary import in_bytes
from lightning_sparse.schedule.cost.network import Network

_HEADER = ("", "strategy", "density", "step ms", "x DDP", "exposed ms", "sent", "messages")


def as_table(profile: BackwardProfile, network: Network, rows: Sequence[SystemPrediction]) -> str:
    """Return a table with the best row marked, and what follows from it, as text.

    Args:
        profile: what was predicted from.
        network: what was predicted for.
        rows: from :func:`~lightning_sparse.cli.plan.predict_systems`.
    """
    best = best_of(rows, profile.spread_seconds)
    cells = [_HEADER, *(_cells(row, row is best) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADER))]
    lines = [
        "  ".join(cell.ljust(width) if column < 2 else cell.rjust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(line, widths)) for line in cells)
    ]
    return "\n".join([_heading(profile, network), "", *(line.rstrip() for line in lines), "", *_verdict(profile, rows)])


def as_json(profile: BackwardProfile, network: Network, rows: Sequence[SystemPrediction]) -> dict[str, Any]:
    """Return the same as plain numbers, words and lists.

    ``best`` is the position of a row, or ``None``; ``alike`` are those of the rows that are not told from the fastest.
    """
    best = best_of(rows, profile.spread_seconds)
    positions = {id(row): position for position, row in enumerate(rows)}
    return {
        "profile": {
            "elements": profile.elements,
            "tensors": len(profile.sizes),
            "backward_seconds": sum(profile.backward_seconds),
            "other_seconds": profile.other_seconds,
            "spread_seconds": profile.spread_seconds,
            "device": profile.device,
        },
        "network": _network(network),
        "rows": [row._asdict() for row in rows],
        "best": None if best is None else positions[id(best)],
        "alike": [positions[id(row)] for row in alike(rows, profile.spread_seconds)],
    }


def _network(network: Network) -> dict[str, Any]:
    names = network._fields if network.node_ranks > 1 else ("bandwidth", "latency", "workers")
    return {name: getattr(network, name) for name in names}


def _heading(profile: BackwardProfile, network: Network) -> str:
    nodes = ""
    if network.node_ranks > 1:
        nodes = f"; {network.node_ranks} on each node, with {network.node_bandwidth / 1e9:.4g} Gbit/s inside"
    return (
        f"{profile.elements:,} gradient elements in {len(profile.sizes)} tensors; on {profile.device} backward takes"
        f" {sum(profile.backward_seconds) * 1e3:.1f} ms, the rest of a step {profile.other_seconds * 1e3:.1f} ms.\n"
        f"{network.workers} workers, {network.bandwidth / 1e9:.4g} Gbit/s, {network.latency * 1e6:.4g} us"
        f" latency{nodes}."
    )


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


def _verdict(profile: BackwardProfile, rows: Sequence[SystemPrediction]) -> list[str]:
    best = best_of(rows, profile.spread_seconds)
    if best is None:
        verdict = f"Nothing pays: nothing is clearly faster than {rows[0].name}. Stay with strategy={rows[0].name!r}."
    else:
        density = "" if best.density is None else f" at density {best.density:g}"
        verdict = f"* {best.name}{density} is predicted to be {best.speedup:.2f} times as fast as {rows[0].name}."
    notes = ["Times only: a lower density delays more of each gradient, see the README."]
    apart = sorted({row.name for row in rows if row.replicas_diverge and row.local_steps == 1})
    if apart:
        notes.append(f"{', '.join(apart)} lets replicas drift apart and is never marked.")
    rounds = [row for row in rows if row.local_steps > 1]
    if rounds:
        told = ", ".join(f"{row.name} {row.local_steps}, where {row.fitting_steps} keep" for row in rounds)
        notes.append(
            f"Local steps cost steps, and are never marked; between two exchanges: {told} exchanges at 5 % of the time."
        )
    return [verdict, _sureness(profile, rows), " ".join(notes)]


def _sureness(profile: BackwardProfile, rows: Sequence[SystemPrediction]) -> str:
    count = len(alike(rows, profile.spread_seconds))
    step = sum(profile.backward_seconds) + profile.other_seconds
    spread = profile.spread_seconds
    measured = f"steps measured here took {1e3 * step:.1f} ms, give or take {1e3 * spread:.1f}" if spread else ""
    worth = f"a prediction is worth {WORTH - 1:.0%}"
    told = "one row is" if count == 1 else f"{count} rows are"
    which = "" if count == 1 else ", of which the simplest counts, and of those as simple the highest density"
    return f"How sure: {', and '.join(filter(None, (measured, worth)))}; within that, {told} as fast as any{which}."
