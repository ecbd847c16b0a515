"""Schedules divide gradients into buckets during backward. Buckets depend on names and sizes, never on values."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Optional

from typing_extensions import override

from lightning_sparse.compressors.base import checked_count
from lightning_sparse.schedule.plan import Plan, plan_buckets

__all__ = ["SCHEDULES", "Auto", "FixedSize", "Layerwise", "Merged", "Plan", "Schedule", "Single", "plan_buckets"]

UNPLANNED_ELEMENTS = 1 << 23  # minimum elements of a bucket, in `Merged` without a plan, and by default in `FixedSize`


class Schedule(ABC):
    """Divide gradients into buckets, in the order of backward.

    All ranks must form the same buckets, so :meth:`closes_bucket` must return the same value on all ranks. If the
    exchange starts after backward, all gradients form a single bucket without a call of the schedule. A compressor with
    ``selects_across_bucket`` uses the schedule's buckets in any case.
    """

    @abstractmethod
    def closes_bucket(self, newest: str, numel: int) -> bool:
        """Return whether ``newest`` is the last parameter of the bucket. The end of backward ends the last bucket.

        Args:
            newest: name of the parameter that was just added to the bucket.
            numel: number of elements in the bucket, including ``newest``.
        """


class Layerwise(Schedule):
    """Exchange each gradient alone during backward: the most overlap with backward, and the most messages."""

    @override
    def closes_bucket(self, newest: str, numel: int) -> bool:
        return True


class Single(Schedule):
    """Exchange all gradients in one message after backward: no overlap with backward, and the fewest messages."""

    @override
    def closes_bucket(self, newest: str, numel: int) -> bool:
        return False


class FixedSize(Schedule):
    """Exchange a bucket when the bucket has at least ``min_elements`` elements.

    Args:
        min_elements: minimum size of a bucket. Small buckets overlap more of the exchange with backward. Large buckets
            need fewer messages, and so have less latency in total.

    Raises:
        ValueError: if ``min_elements`` is not a positive integer.
    """

    def __init__(self, min_elements: int = UNPLANNED_ELEMENTS) -> None:
        self.min_elements = checked_count("min_elements", min_elements, "elements")

    @override
    def closes_bucket(self, newest: str, numel: int) -> bool:
        return numel >= self.min_elements


class Merged(Schedule):
    """Try several plans, which divide gradients into buckets, and use the fastest plan for the model and the network.

    The first steps of a training time several plans. :func:`plan_buckets` computes one more plan from these times, and
    further steps time this plan. The fastest of all plans is used. A new order of gradients restarts the trials. Plans
    change results only with ``selects_across_bucket`` or ``adaptive_density``.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Drop the plan. Buckets then end by size, until :meth:`end_buckets_at` sets a plan."""
        self._ends: Optional[frozenset[str]] = None

    def end_buckets_at(self, ends: Iterable[str]) -> None:
        """End a bucket after each parameter in ``ends``. All ranks must call this method between the same two steps."""
        self._ends = frozenset(ends)

    @override
    def closes_bucket(self, newest: str, numel: int) -> bool:
        return numel >= UNPLANNED_ELEMENTS if self._ends is None else newest in self._ends


class Auto(Merged):
    """Compress gradients and exchange like :class:`Merged`, or use plain DDP if compression saves too little time.

    Steps with compression and steps of DDP are timed in turn. Compression is used only if the saved time is larger than
    the measurement error plus a share of DDP's step. The share makes up for the delay of gradients by compression. The
    comparison repeats after 5000 steps. Timings decide, so two runs are not bitwise identical.
    """


SCHEDULES: dict[str, type[Schedule]] = {
    "auto": Auto,
    "layerwise": Layerwise,
    "merged": Merged,
    "single": Single,
}
