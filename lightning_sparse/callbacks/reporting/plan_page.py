"""The plan in force, as a page of text."""

from typing import Optional

from lightning_sparse.callbacks.reporting.tensorboard import as_list, as_table
from lightning_sparse.engine.observe import GroupMarks, StepMarks
from lightning_sparse.schedule import Plan


def plan_page(compressor: str, plan: Optional[Plan], marks: StepMarks) -> str:
    """Write what is sent, in which groups, and what that is expected to take, in Markdown.

    Args:
        compressor: name of what chooses what is sent.
        plan: what the schedule follows; ``None`` if it follows none, or none yet.
        marks: of a step on this rank.
    """
    if plan is None:
        columns = ["group", "parameters", "elements", "asked for", "bytes"]
        rows = [[position, *_size(group)] for position, group in enumerate(marks.groups)]
        note = "No plan, or none yet: these are the groups of the step in which this was written."
        return f"{note}\n\n{as_list({'compressor': compressor, 'groups': len(rows)})}\n\n{as_table(columns, rows)}"
    facts = {
        "compressor": compressor,
        "groups": len(plan.groups),
        "backward and exchange, measured": _milliseconds(plan.seconds),
        "after backward, measured": _milliseconds(plan.exposed_seconds),
    }
    if plan.predicted is not None:
        facts["backward and exchange, predicted"] = _milliseconds(plan.predicted.total)
        facts["after backward, predicted"] = _milliseconds(plan.predicted.exposed_seconds)
    facts["tried, the fastest by number of groups"] = ", ".join(
        f"{groups}: {_milliseconds(each)}" for groups, each in plan.tried
    )
    origin = "" if plan.predicted is None else "Times of groups count from the start of backward.\n\n"
    return f"{as_list(facts)}\n\n{origin}{_groups(plan)}"


def _groups(plan: Plan) -> str:
    columns = ["group", "parameters"]
    rows: list[list[object]] = [[position, _names(names)] for position, names in enumerate(plan.groups)]
    if plan.predicted is not None:
        columns = [*columns, "ready at", "selected from", "exchanged from", "ends at (all predicted)"]
        rows = [[*row, *map(_milliseconds, times)] for row, times in zip(rows, plan.predicted.groups)]
    return as_table(columns, rows)


def _size(group: GroupMarks) -> list[object]:
    return [_names(group.names), group.elements, group.counts + group.dense_elements, group.wire_bytes]


def _names(names: tuple[str, ...]) -> str:
    return f"`{names[0]}`" if len(names) == 1 else f"{len(names)}, from `{names[0]}` to `{names[-1]}`"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
