"""The interface of schedules, which decide when a bucket of gradients is exchanged."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Optional

from typing_extensions import override

from lightning_sparse.compressors.base import is_whole

UNPLANNED_ELEMENTS = 1 << 23  # size of a bucket before anything is measured


class Schedule(ABC):
    """Divide the stream of gradients, in the order of backward, into buckets.

    The result must depend only on the arguments, because every rank must close the same buckets. Gradients that wait
    for the end of backward form a single bucket without a call, unless a method selects across a bucket.
    """

    @abstractmethod
    def closes_bucket(self, newest: str, numel: int) -> bool:
        """Return whether to exchange the open bucket now. The end of backward closes the last bucket.

        Args:
            newest: name of the parameter that has just joined the bucket.
            numel: number of elements in the bucket, the newest parameter included.
        """


class Layerwise(Schedule):
    """Exchange every parameter when the gradient is ready: the most overlap, and the most messages."""

    @override
    def closes_bucket(self, newest: str, numel: int) -> bool:
        return True


class Single(Schedule):
    """Exchange everything in a single message after backward: no overlap, and the fewest messages."""

    @override
    def closes_bucket(self, newest: str, numel: int) -> bool:
        return False


class FixedSize(Schedule):
    """Exchange a bucket when it has a minimum number of elements.

    Args:
        min_elements: minimum size of a bucket. Small buckets overlap more of the exchange with backward. Large buckets
            have the latency of fewer messages.

    Raises:
        ValueError: if ``min_elements`` is not a positive integer.
    """

    def __init__(self, min_elements: int = UNPLANNED_ELEMENTS) -> None:
        if not is_whole(min_elements, 1):
            raise ValueError(
                f"min_elements={min_elements!r} must be an integer, at least 1; 1 exchanges layer by layer"
            )
        self.min_elements = int(min_elements)

    @override
    def closes_bucket(self, newest: str, numel: int) -> bool:
        return numel >= self.min_elements


class Merged(Schedule):
    """Exchange in the fastest buckets, by timings of steps of the user's model and network.

    The first steps try several plans, without an effect on results. Then the fastest plan and the optimum for the
    measured costs (:func:`plan_buckets`) alternate, and the faster one wins. A change of the graph restarts the trials.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset the plan."""
        self._ends: Optional[frozenset[str]] = None

    def end_buckets_at(self, ends: Iterable[str]) -> None:
        """Close buckets after these parameters. Call this between two steps, and on all ranks at once."""
        self._ends = frozenset(ends)

    @override
    def closes_bucket(self, newest: str, numel: int) -> bool:
        return numel >= UNPLANNED_ELEMENTS if self._ends is None else newest in self._ends


class Auto(Merged):
    """Exchange like :class:`Merged`, or let DDP exchange everything if that is faster.

    Steps are timed under the plan and under DDP. DDP is used unless compression saves more than the measurement error
    and the cost of delayed updates. Measurements repeat after some time. Because timings decide, two runs are not
    bitwise identical.
    """
