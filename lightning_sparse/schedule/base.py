"""The contract of a schedule, which decides WHEN and WITH WHOM a gradient travels."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Optional

from typing_extensions import override

from lightning_sparse.compressors.base import is_whole

UNPLANNED_ELEMENTS = 1 << 23  # of a bucket, where nothing has been measured


class Schedule(ABC):
    """Cut the stream of gradients, in the order in which backward makes them ready, into buckets.

    The answer must follow from the arguments alone, because every rank has to cut the stream in the same places. It is
    not asked for where all gradients wait for the end of backward: they go as one bucket then, unless a method selects
    across a bucket.
    """

    @abstractmethod
    def closes_bucket(self, newest: str, numel: int) -> bool:
        """Decide whether to exchange the open bucket now; what is open at the end of backward is exchanged then.

        Args:
            newest: name of the parameter that has just joined the bucket.
            numel: number of elements in the bucket, the newest parameter's included.
        """


class Layerwise(Schedule):
    """Exchange every parameter as soon as its gradient is ready: the most overlap, and the most messages."""

    @override
    def closes_bucket(self, newest: str, numel: int) -> bool:
        return True


class Single(Schedule):
    """Exchange everything in one message after backward: no overlap, and the fewest messages."""

    @override
    def closes_bucket(self, newest: str, numel: int) -> bool:
        return False


class FixedSize(Schedule):
    """Exchange as soon as a bucket has gathered a number of elements, whatever they cost.

    Args:
        min_elements: of a complete bucket. Smaller overlaps more of the exchange with backward, larger pays the latency
            of fewer messages.

    Raises:
        ValueError: if ``min_elements`` is no whole number, or not positive.
    """

    def __init__(self, min_elements: int = UNPLANNED_ELEMENTS) -> None:
        if not is_whole(min_elements, 1):
            raise ValueError(
                f"min_elements={min_elements!r} must be a whole number, at least 1; 1 exchanges layer by layer"
            )
        self.min_elements = int(min_elements)

    @override
    def closes_bucket(self, newest: str, numel: int) -> bool:
        return numel >= self.min_elements


class Merged(Schedule):
    """Exchange in the buckets that end a step first, as timed in steps of the user's own model and network.

    The first steps try a handful of plans, which changes no number. The fastest and the optimum by the costs seen
    (:func:`plan_buckets`) take turns, and the faster one is kept. Trials start again when the graph changes.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the plan."""
        self._ends: Optional[frozenset[str]] = None

    def end_buckets_at(self, ends: Iterable[str]) -> None:
        """Close buckets after these parameters; only between two steps, and on all ranks at once."""
        self._ends = frozenset(ends)

    @override
    def closes_bucket(self, newest: str, numel: int) -> bool:
        return numel >= UNPLANNED_ELEMENTS if self._ends is None else newest in self._ends


class Auto(Merged):
    """Exchange like :class:`Merged`, or leave everything to DDP, where that is faster.

    Real steps are timed under the plan and under DDP, and DDP is kept unless compression saves more than the error and
    what a delay is worth. It looks again after some time. What is measured decides, so two runs do not give the same
    bits.
    """
