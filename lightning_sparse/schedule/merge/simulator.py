"""The pipeline on paper: backward, selection and one serial channel. The planner optimises it, and it predicts steps.

The clocks are those of OMGS-SGD (Shi et al., INFOCOM 2020), from the start of backward: no grouping changes forward.
There selection stops backward; our engine runs it on the worker that runs the exchange. Both are here.
"""

import math
import operator
import reprlib
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

from lightning_sparse.registry import one_of

SELECTIONS = ("worker", "backward")

Cost = Callable[[int], float]


class Problem(Protocol):
    """Sizes, times and costs to plan for. Tensors stand in the order in which backward makes their gradients ready."""

    @property
    def ready(self) -> Sequence[float]:
        """Seconds of backward, without selection, after which the first k tensors are ready, for k from 0."""

    @property
    def tensors(self) -> int:
        """Number of tensors."""

    def select_seconds(self, start: int, stop: int) -> float:
        """Return the cost of selecting from the tensors from ``start`` up to but without ``stop``, merged."""

    def exchange_seconds(self, start: int, stop: int) -> float:
        """Return the cost of exchanging them, merged."""


class MergeProblem(NamedTuple):
    """A checked :class:`Problem`."""

    elements: list[int]  # how many the first k tensors hold together, for k from 0
    ready: list[float]  # seconds of backward, without selection, after which the first k are ready
    select_cost: Cost
    exchange_cost: Cost

    @property
    def tensors(self) -> int:
        """Number of tensors."""
        return len(self.ready) - 1

    def select_seconds(self, start: int, stop: int) -> float:
        """Return the cost of selecting from a merged group."""
        return checked_seconds("select_cost", self.select_cost, self.elements[stop] - self.elements[start])

    def exchange_seconds(self, start: int, stop: int) -> float:
        """Return the cost of exchanging a merged group."""
        return checked_seconds("exchange_cost", self.exchange_cost, self.elements[stop] - self.elements[start])


class GroupTimes(NamedTuple):
    """The life of one group, in seconds after the start of backward."""

    ready: float  # its last gradient has been written
    select_start: float
    exchange_start: float
    end: float


class Prediction(NamedTuple):
    """Times that a plan leads to."""

    groups: tuple[GroupTimes, ...]
    backward_end: float  # with the selections that stopped backward, if they do
    total: float  # seconds from the start of backward to the end of the last exchange

    @property
    def exposed_seconds(self) -> float:
        """Seconds of selection and exchange that backward does not hide."""
        return self.total - self.backward_end


def predict(
    groups: Sequence[Sequence[int]],
    sizes: Sequence[int],
    backward_seconds: Sequence[float],
    select_cost: Cost,
    exchange_cost: Cost,
    selection: str = "worker",
) -> Prediction:
    """Predict when each group (positions, in order) is ready, selected from and exchanged; else as ``plan_groups``."""
    one_of("selection", selection, SELECTIONS)
    problem = checked_problem(sizes, backward_seconds, select_cost, exchange_cost)
    if [position for group in groups for position in group] != list(range(problem.tensors)) or not all(groups):
        raise ValueError(
            f"groups={reprlib.repr(groups)} must hold the positions 0 to {problem.tensors - 1} in this order, and no"
            " empty group"
        )
    return simulate(problem, list(accumulate(len(group) for group in groups)), selection)


def simulate(problem: Problem, stops: Iterable[int], selection: str) -> Prediction:
    """Predict as :func:`predict` does, for groups that are given by where each stops."""
    start, stopped, worker_free = 0, 0.0, 0.0
    times = []
    for stop in stops:
        ready = problem.ready[stop] + stopped
        select_seconds = problem.select_seconds(start, stop)
        if selection == "backward":
            stopped += select_seconds
            select_start = ready
            exchange_start = max(worker_free, ready + select_seconds)
        else:
            select_start = max(worker_free, ready)
            exchange_start = select_start + select_seconds
        worker_free = exchange_start + problem.exchange_seconds(start, stop)
        times.append(GroupTimes(ready, select_start, exchange_start, worker_free))
        start = stop
    return Prediction(tuple(times), problem.ready[-1] + stopped, worker_free)


def checked_problem(
    sizes: Sequence[int], backward_seconds: Sequence[float], select_cost: Cost, exchange_cost: Cost
) -> MergeProblem:
    """Sum sizes and times up, and refuse what is empty, negative, not finite or of different lengths."""
    if len(sizes) == 0:
        raise ValueError("sizes=[] must not be empty: pass the elements of every tensor that has a gradient")
    if len(backward_seconds) != len(sizes):
        raise ValueError(
            f"backward_seconds has {len(backward_seconds)} entries and sizes has {len(sizes)}: pass one each per tensor"
        )
    elements = [_whole(position, size) for position, size in enumerate(sizes)]
    seconds = [_seconds(position, value) for position, value in enumerate(backward_seconds)]
    return MergeProblem(
        list(accumulate(elements, initial=0)), list(accumulate(seconds, initial=0.0)), select_cost, exchange_cost
    )


def checked_seconds(noun: str, cost: Cost, elements: int) -> float:
    """Return a cost of a number of elements, unless it is negative or not finite."""
    seconds = cost(elements)
    if not 0 <= seconds < math.inf:
        raise ValueError(
            f"{noun}({elements})={seconds} must be finite seconds, at least 0; the models of"
            " lightning_sparse.schedule.cost.model always are"
        )
    return seconds


def _whole(position: int, size: int) -> int:
    try:
        whole = operator.index(size)
    except TypeError:
        whole = -1
    if whole < 0:
        raise ValueError(f"sizes[{position}]={size!r} must be a whole number of elements, at least 0")
    return whole


def _seconds(position: int, value: float) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError(
            f"backward_seconds[{position}]={value!r} must be finite and at least 0; leave disturbed steps out of the"
            " profile"
        )
    return seconds
