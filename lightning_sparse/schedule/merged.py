"""Schedules that follow a plan, made from what was measured in the steps before."""

from collections.abc import Iterable
from typing import ClassVar, Optional

from typing_extensions import override

from lightning_sparse.schedule.base import UNPLANNED_ELEMENTS, Schedule


class Merged(Schedule):
    """Exchange in the groups that end a step first, found exactly from what the user's own model and network take.

    The first steps try a handful of groupings, which changes no number, and are timed. The plan that follows
    (:func:`~lightning_sparse.schedule.plan_groups`) is timed beside the best of the others, and the faster one is kept.
    It is made anew when the density, the graph, or a step's exposed time changes.
    """

    adapts_density: ClassVar[bool] = False  # send more where that costs no time, whatever the compressor says

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the plan."""
        self._ends: Optional[frozenset[str]] = None

    def follow(self, ends: Iterable[str]) -> None:
        """Close groups after these parameters; only between two steps, and on all ranks at once."""
        self._ends = frozenset(ends)

    @override
    def closes_group(self, newest: str, numel: int) -> bool:
        return numel >= UNPLANNED_ELEMENTS if self._ends is None else newest in self._ends


class Auto(Merged):
    """Send each group whole or in part, as is faster, or leave everything to DDP, where that is faster still.

    Planned like :class:`Merged`. A group that arrives earlier whole is sent whole; one with time to spare sends more
    than the density asks for, never less. Real steps are then timed under the plan and under DDP, and DDP is kept
    unless compression saves more than the error and what a delay is worth. It looks again after some time, and when a
    step's time changes. What is measured decides, so two runs do not give the same bits.
    """

    adapts_density: ClassVar[bool] = True
