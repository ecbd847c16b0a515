"""A plan as plain lists and numbers, for checkpoints that are read without running what a pickle asks for."""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from lightning_sparse.schedule.cost.model import CostModel
from lightning_sparse.schedule.plan import Plan
from lightning_sparse.schedule.step_profile import Profile


def plain(plan: Plan) -> dict[str, Any]:
    """Return what :func:`plan_from` makes the same plan of."""
    fields = plan._asdict()
    del fields["predicted"]  # follows from the rest
    return {name: _lists(value) for name, value in fields.items()}


def plan_from(state: Mapping[str, Any]) -> Plan:
    """Return the plan that :func:`plain` was given."""
    groups = tuple(tuple(map(str, group)) for group in state["groups"])
    profile = None if state["profile"] is None else _profile(*state["profile"])
    stops = tuple(accumulate(map(len, groups)))
    return Plan(
        groups,
        tuple(map(float, state["densities"])),
        None if profile is None else profile.predict(stops),
        float(state["seconds"]),
        float(state["exposed_seconds"]),
        tuple((int(count), float(seconds)) for count, seconds in state["tried"]),
        profile,
    )


def _profile(
    elements: list[int],
    counts: list[int],
    ready: list[float],
    select: list[Any],
    exchange: list[Any],
    commit_seconds: float,
    dense: Any,
) -> Profile:
    return Profile(
        tuple(elements),
        tuple(counts),
        tuple(ready),
        CostModel(*select),
        CostModel(*exchange),
        commit_seconds,
        None if dense is None else CostModel(*dense),
    )


def _lists(value: Any) -> Any:
    return [_lists(each) for each in value] if isinstance(value, tuple) else value
