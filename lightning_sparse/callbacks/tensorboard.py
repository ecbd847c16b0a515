"""Output of loggers beyond scalars, which TensorBoard shows: charts and pages of text."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from lightning_sparse.engine.observe import ExchangeRecord
from lightning_sparse.schedule import Plan
from lightning_sparse.strategy.lightning import TensorBoardLogger, Trainer

# Charts of the tab "Custom Scalars", in this order. Each has one statistic: a line for each run, whose colours the tab
# explains; lines of one run have one colour, and no legend.
_CHARTS = {
    "sparse: how much is sent": {
        "Density, log10 of the fraction of elements": "log10_density",
        "Sent by a rank in a step, bytes": "wire_bytes",
        "Sent by a rank to other nodes in a step, bytes": "link_bytes",
        "Compression ratio, times": "compression_ratio",
        "Sent by a rank since the start, bytes": "total_wire_bytes",
        "Compression ratio since the start, times": "total_compression_ratio",
    },
    "sparse: where the time of a step goes": {
        "Step, seconds": "step_seconds",
        "Exposed exchange, seconds": "exposed_seconds",
        "Exposed since the start, part of the time": "exposed_share",
        "Backward, seconds": "backward_seconds",
        "Selection, seconds": "select_seconds",
        "Exchange, seconds": "exchange_seconds",
        "Commit, seconds": "commit_seconds",
        "Throughput, samples a second": "samples_per_second",
    },
    "sparse: residual": {
        "Residual over the gradient, ratio of norms": "residual_to_gradient",
        "Pending updates over the update, ratio of norms": "update_error",
        "Age of the second moment, steps": "second_moment_age",
        "Drift of replicas over parameters, ratio of norms": "replica_divergence",
    },
}


def log_layout(trainer: Trainer, shown: Sequence[str]) -> None:
    """Have TensorBoard's tab "Custom Scalars" open sorted, with a chart for each statistic that is shown."""
    shown = [*shown, "log10_density"]
    layout: dict[str, dict[str, list[Any]]] = {
        # Tags are regular expressions; without an end, those that begin alike would be drawn, too.
        category: {title: ["Multiline", [f"sparse/{name}$"]] for title, name in charts.items() if name in shown}
        for category, charts in _CHARTS.items()
    }
    for logger in _boards(trainer):
        logger.experiment.add_custom_scalars({category: charts for category, charts in layout.items() if charts})


def log_log_density(trainer: Trainer, density: float, step: int) -> None:
    """Give TensorBoard the logarithm of the density, which falls from 1 to a thousandth: its charts have even axes."""
    if density > 0:
        for logger in _boards(trainer):
            logger.experiment.add_scalar("sparse/log10_density", math.log10(density), step)


def log_text(trainer: Trainer, tag: str, markdown: str, step: int) -> None:
    """Show a page of text in TensorBoard."""
    for logger in _boards(trainer):
        logger.experiment.add_text(tag, markdown, step)


def plan_page(compressor: str, plan: Optional[Plan], record: ExchangeRecord) -> str:
    """Write what is sent, in the groups of the plan or else of ``record``, and what that should take, in Markdown."""
    facts: dict[str, object] = {"compressor": compressor}
    if plan is None:
        columns = ["group", "parameters", "elements", "asked for", "bytes"]
        rows: list[list[object]] = [
            [position, _names(each.names), each.elements, each.counts + each.dense_elements, each.wire_bytes]
            for position, each in enumerate(record.groups)
        ]
        note = "Groups are not planned, or their plan is still being measured. These are the groups of this step.\n\n"
        return f"{note}{_list({**facts, 'groups': len(rows)})}\n\n{table(columns, rows)}"
    facts["groups"] = len(plan.groups)
    facts["backward and exchange, measured"] = _milliseconds(plan.seconds)
    facts["of it after backward, measured"] = _milliseconds(plan.exposed_seconds)
    facts["fastest step measured, by number of groups"] = ", ".join(
        f"{groups}: {_milliseconds(each)}" for groups, each in plan.tried
    )
    rows = [[position, _names(names)] for position, names in enumerate(plan.groups)]
    return f"{_list(facts)}\n\n{table(['group', 'parameters'], rows)}"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Write a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _list(facts: Mapping[str, object]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def _names(names: tuple[str, ...]) -> str:
    return f"`{names[0]}`" if len(names) == 1 else f"{len(names)}, from `{names[0]}` to `{names[-1]}`"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _boards(trainer: Trainer) -> list[TensorBoardLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
